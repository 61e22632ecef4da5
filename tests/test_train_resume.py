"""Runs that are killed, interrupted or finished, and go on with `--resume auto`."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from cli_runs import KILL, NUM_STEPS, RFT, SMALL, Server, check_same_run, read, rows, text_of

from flowtrain.utils import lock

pytest_plugins = ("cli_runs",)


KILLS = (
    # Where the warm planner is evaluated.
    ("flowtrain.evaluation.evaluator", "roll_out", 1, False, []),
    # Between the two logs of step 3.
    ("flowtrain.trainer.run.run_logger", "RunLogger.write", 4, False, [0, 1, 2]),
    # After the checkpoint of step 4.
    ("flowtrain.trainer.checkpoint", "Checkpoints._write", 1, True, [0, 1, 2, 3, 4]),
    # Before version 5 is the newest.
    ("flowtrain.weights.stores.folder", "WeightStore._set_head", 1, False, [0, 1, 2, 3, 4]),
    # In the report at the end.
    ("flowtrain.logging.page.curves", "plot_curves", 1, False, [0, 1, 2, 3, 4, 5, 6]),
)


def test_a_run_that_is_killed_again_and_again_goes_on_as_if_nothing_had_happened(
    server: Server, words: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for module, path, number, after, steps in KILLS:
        before = KILL.format(module=module, path=path, number=number, after=after)
        argv = (*words, "--run.dir", run, "--resume", "auto")
        code, lines, _ = server.run("train", *argv, before=before)
        assert code == -signal.SIGKILL, lines
        logged = text_of(run / "metrics.jsonl").splitlines()
        assert [json.loads(line)["step"] for line in logged] == steps, path
    server.resume(run, *words)
    check_same_run(run, full)


def test_resuming_a_finished_run_changes_nothing_but_adds_more_steps(
    server: Server, words: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(full, run)
    assert "  change  " not in server.resume(run, *words)
    check_same_run(run, full)
    more = ("--train.num_steps", NUM_STEPS + 2, "--train.warmup_steps", 10)
    said = server.resume(run, *words, *more)
    assert f"  change  train.num_steps: {NUM_STEPS} -> 8, train.warmup_steps: 0 -> 10\n" in said
    assert rows(run, "metrics.jsonl")[: NUM_STEPS + 1] == rows(full, "metrics.jsonl")
    records = read(run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(NUM_STEPS + 3))
    rates = [record["lr"] for record in records[1:]]
    assert rates == pytest.approx([3e-3] * NUM_STEPS + [0.7 * 3e-3, 0.8 * 3e-3]), (
        "the warm-up is a function of the step, not of when the run was started"
    )
    assert records[-1]["train_tflop"] > 0


def test_a_resume_with_fewer_steps_than_are_done_writes_nothing(
    server: Server, words: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(full, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    argv = (*words, "--run.dir", run, "--resume", "auto", "--train.num_steps", "2")
    code, lines, out = server.run("train", *argv)
    said = f"flowtrain.train: {NUM_STEPS} of 2 steps are done, so nothing is left to do"
    assert (code, lines, out) == (0, [said], "")
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {path.name for path in after.keys() ^ before.keys()} <= {lock.NAME}
    assert all(after[path] == data for path, data in before.items() if path.name != lock.NAME)


def test_a_resume_after_the_questions_have_grown_is_refused(server: Server, tmp_path: Path) -> None:
    path, run = tmp_path / "questions.jsonl", tmp_path / "run"
    lines = [json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) for n in range(80)]
    words = (*SMALL, "--tasks.name", "file", "--tasks.path", path, "--tasks.corpus", "shipped")
    path.write_text("\n".join(lines[:40]))
    assert server.run("train", *words, "--train.num_steps", "0", "--run.dir", run)[:2] == (0, [])
    path.write_text("\n".join(lines))
    again = ("--train.num_steps", "1", "--run.dir", run, "--resume", "auto")
    code, said, _ = server.run("train", *words, *again)
    assert code == 2 and len(said) == 1
    assert f"tasks.path='{path}' holds out other questions than at the start of {run}" in said[0]
    path.write_text("\n".join(lines[:40]))
    assert server.run("train", *words, *again)[0] == 0


def test_an_interrupt_ends_the_step_saves_and_can_be_resumed(
    server: Server, words: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    """By SIGINT; test_train_dataflow.py sends SIGTERM."""
    run = tmp_path / "run"
    process = server.start("train", *words, "--run.dir", run, "--checkpoint.every", "0")
    process.wait_for(lambda: '{"step": 2,' in text_of(run / "metrics.jsonl"))
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 130
    assert "finishing this step, then saving" in process.err.read_text()
    assert "Traceback" not in process.err.read_text()
    last = read(run / "metrics.jsonl")[-1]["step"]
    assert 2 <= last < NUM_STEPS and not (run / "summary.json").exists()
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{last:08d}"]
    server.resume(run, *words)
    check_same_run(run, full)


STUCK = """
import asyncio, flowtrain.agents.agentflow.flow, flowtrain.config.command
flowtrain.config.command._ECHO_S = -1.0
async def stuck(self, *what):
    print("stuck", flush=True)
    await asyncio.sleep(60)
flowtrain.agents.agentflow.flow.Flow.run = stuck
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
        "interrupted; run the same command with --resume auto to continue"
    )


def test_a_second_interrupt_ends_the_run_at_once(
    server: Server, words: tuple[str, ...], tmp_path: Path
) -> None:
    words = (*words, "--eval.at_ends", "false", "--run.dir", str(tmp_path / "run"))
    process = server.start("train", *words, before=STUCK)
    process.wait_for(lambda: "stuck" in process.out.read_text())
    os.kill(process.pid, signal.SIGINT)
    process.wait_for(lambda: "interrupt again to stop at once" in process.err.read_text())
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout_s=20) == 130
    assert "Traceback" not in process.err.read_text()


def test_interrupted_fine_tuning_exports_what_it_has(server: Server, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = server.start("rft", *SMALL, *RFT, "--rft.num_steps", "100000", "--run.dir", run)
    process.wait_for(lambda: '{"step": 10,' in text_of(run / "metrics.jsonl"))
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 130
    assert 10 <= json.loads((run / "model" / "rft.json").read_text())["num_steps"] < 100000
    assert (run / "model" / "model.safetensors").stat().st_size > 10_000
