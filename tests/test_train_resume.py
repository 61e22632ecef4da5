"""Runs that are killed, interrupted or finished, and go on with `--resume auto`."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from cli_runs import KILL, NUM_STEPS, RFT, SMALL, Server, check_same_run, read, rows, text_of

pytest_plugins = ("cli_runs",)


@pytest.mark.parametrize(
    ("module", "path", "number", "after"),
    [
        pytest.param(
            "flowtrain.evaluation.evaluator",
            "roll_out",
            1,
            False,
            id="while the warm planner is evaluated",
        ),
        pytest.param("flowtrain.run.run_logger", "RunLogger.log", 3, True, id="after step 3"),
        pytest.param(
            "flowtrain.run.run_logger",
            "RunLogger.write",
            4,
            False,
            id="between the two logs of step 3",
        ),
        pytest.param(
            "flowtrain.training.checkpoint",
            "_save",
            2,
            True,
            id="inside the checkpoint of step 4",
        ),
        pytest.param(
            "flowtrain.training.checkpoint",
            "Checkpoints._write",
            2,
            True,
            id="after the checkpoint of step 4",
        ),
        pytest.param(
            "flowtrain.weights.store",
            "WeightStore._set_head",
            6,
            False,
            id="before version 5 is the newest",
        ),
        pytest.param(
            "flowtrain.view.curves", "plot_curves", 1, False, id="in the report at the end"
        ),
    ],
)
def test_a_run_that_was_killed_goes_on_as_if_nothing_had_happened(
    module: str,
    path: str,
    number: int,
    after: bool,
    place: Path,
    server: Server,
    words: tuple[str, ...],
    full: Path,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    before = KILL.format(module=module, path=path, number=number, after=after)
    code, _, _ = server.run("train", *words, "--run.dir", run, before=before)
    assert code == -signal.SIGKILL
    server.resume(run, *words)
    check_same_run(run, full)


def test_a_run_that_is_killed_at_any_moment_and_more_than_once_goes_on(
    server: Server, words: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for step in (1, 3, 5):
        process = server.start("train", *words, "--run.dir", run, "--resume", "auto")
        process.wait_for(lambda step=step: f'{{"step": {step},' in text_of(run / "metrics.jsonl"))
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    server.resume(run, *words)
    check_same_run(run, full)


def test_resuming_a_finished_run_changes_nothing(
    server: Server, words: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(full, run)
    server.resume(run, *words)
    check_same_run(run, full)


def test_a_finished_run_goes_on_to_more_steps(
    server: Server, words: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(full, run)
    server.resume(run, *words, "--train.num_steps", NUM_STEPS + 2, "--train.warmup_steps", 10)
    assert rows(run, "metrics.jsonl")[: NUM_STEPS + 1] == rows(full, "metrics.jsonl")
    records = read(run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(NUM_STEPS + 3))
    rates = [record["lr"] for record in records[1:]]
    assert rates == pytest.approx([3e-3] * NUM_STEPS + [0.7 * 3e-3, 0.8 * 3e-3]), (
        "the warm-up is a function of the step, not of when the run was started"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_step_saves_and_can_be_resumed(
    number: signal.Signals, server: Server, words: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = server.start("train", *words, "--run.dir", run, "--checkpoint.every", "0")
    process.wait_for(lambda: '{"step": 2,' in text_of(run / "metrics.jsonl"))
    os.kill(process.pid, number)
    assert process.wait() == 130
    assert (
        "finishing this step, then saving" in process.err.read_text()
        and "Traceback" not in process.err.read_text()
    )
    last = read(run / "metrics.jsonl")[-1]["step"]
    assert 2 <= last < NUM_STEPS and not (run / "summary.json").exists()
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{last:08d}"]
    server.resume(run, *words)
    check_same_run(run, full)


STUCK = """
import asyncio, flowtrain.agents.flow, flowtrain.config.command
flowtrain.config.command._ECHO_S = -1.0
async def stuck(self, *what):
    print("stuck", flush=True)
    await asyncio.sleep(60)
flowtrain.agents.flow.Flow.run = stuck
"""


def test_the_first_interrupt_ends_a_run_that_has_nothing_to_save(
    server: Server, words: tuple[str, ...], tmp_path: Path
) -> None:
    words = (*words, "--eval.at_ends", "true", "--run.dir", str(tmp_path / "run"))
    process = server.start("train", *words, before=STUCK)
    process.wait_for(lambda: "stuck" in process.out.read_text())
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout_s=20) == 130
    said = process.err.read_text()
    assert "Traceback" not in said
    assert said.splitlines()[-1].endswith(
        "interrupted; the same command with --resume auto goes on"
    )


def test_a_second_interrupt_ends_the_run_at_once(
    server: Server, words: tuple[str, ...], tmp_path: Path
) -> None:
    words = (*words, "--eval.at_ends", "false", "--run.dir", str(tmp_path / "run"))
    process = server.start("train", *words, before=STUCK)
    process.wait_for(lambda: "stuck" in process.out.read_text())
    os.kill(process.pid, signal.SIGINT)
    process.wait_for(lambda: "once more to stop at once" in process.err.read_text())
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout_s=20) == 130
    assert "Traceback" not in process.err.read_text()


def test_interrupted_fine_tuning_exports_what_it_has(server: Server, tmp_path: Path) -> None:
    process = server.start(
        "rft", *SMALL, *RFT, "--rft.num_steps", "100000", "--run.dir", tmp_path / "run"
    )
    process.wait_for(lambda: '{"step": 10,' in text_of(tmp_path / "run" / "metrics.jsonl"))
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 130
    assert (
        10
        <= json.loads((tmp_path / "run" / "model" / "rft.json").read_text())["num_steps"]
        < 100000
    )
    assert (tmp_path / "run" / "model" / "model.safetensors").stat().st_size > 10_000


def test_appo_trains_and_resumes_like_a_run_that_nothing_disturbed(
    server: Server, place: Path, words: tuple[str, ...]
) -> None:
    appo = (*words, "--algorithm.name", "appo", "--appo.num_roots", "3", "--appo.spacing", "2")
    code, lines, _ = server.run("train", *appo, "--run.dir", place / "appo")
    assert code == 0, lines
    records = read(place / "appo" / "trajectories.jsonl")
    assert len(records) == NUM_STEPS * 32, "exactly rollout.group_size rollouts of every question"
    steps = [record for record in read(place / "appo" / "metrics.jsonl") if record["step"]]
    assert any(record["num_tokens"] > 0 for record in steps)
    for record in steps:
        of_step = [r for r in records if r["step"] == record["step"]]
        roots = [r for r in of_step if "branch" not in r]
        assert record["num_tokens"] <= sum(
            len(turn["response_ids"]) for r in roots for turn in r["turns"]
        ), "branches cost no pass"
        for branch in (r for r in of_step if "branch" in r):
            at, group = (
                branch["branch"],
                [r for r in roots if r["group_index"] == branch["group_index"]],
            )
            ours, theirs = branch["turns"][at["turn"]], group[at["parent"]]["turns"][at["turn"]]
            assert ours["response_ids"][: at["token"]] == theirs["response_ids"][: at["token"]]
            assert (
                ours["response_logprobs"][: at["token"]]
                == theirs["response_logprobs"][: at["token"]]
            )
    shutil.copytree(place / "appo", place / "appo_cut")
    for path in (place / "appo_cut" / "checkpoints").glob("step_0000000[56]"):
        shutil.rmtree(path)
    server.resume(place / "appo_cut", *appo)
    check_same_run(place / "appo_cut", place / "appo")
