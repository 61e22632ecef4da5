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
        pytest.param(
            "flowtrain.run.run_logger",
            "RunLogger.write",
            4,
            False,
            id="between the two logs of step 3",
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
    more = ("--train.num_steps", NUM_STEPS + 2, "--train.warmup_steps", 10)
    server.resume(run, *words, *more, "--train.peak_tflops", "0.002")
    assert rows(run, "metrics.jsonl")[: NUM_STEPS + 1] == rows(full, "metrics.jsonl")
    records = read(run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(NUM_STEPS + 3))
    rates = [record["lr"] for record in records[1:]]
    assert rates == pytest.approx([3e-3] * NUM_STEPS + [0.7 * 3e-3, 0.8 * 3e-3]), (
        "the warm-up is a function of the step, not of when the run was started"
    )
    last = records[-1]
    assert last["mfu"] == pytest.approx(last["train_tflop"] / last["train_s"] / 0.002)
    assert last["train_tflop"] > 0, "what the trees need against the peak that is given"


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
