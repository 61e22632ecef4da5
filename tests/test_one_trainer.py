"""Runs that find their folder in use, or their newest checkpoint damaged."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
from cli_runs import NUM_STEPS, RFT, SMALL, Server, check_same_run, text_of

from flowtrain.utils.lock import Lock

pytest_plugins = ("cli_runs",)

NEWEST, BEFORE = (f"step_{step:08d}" for step in (NUM_STEPS, NUM_STEPS - 2))


def is_in_use(lines: list[str], module: str, what: object, cure: str, pid: int) -> bool:
    """One line says who has it, and what to do."""
    (line,) = lines
    return (
        line.startswith(f"flowtrain.{module}: {what} is in use by python -")
        and f" on host {socket.gethostname()}, process {pid}, since 20" in line
        and line.endswith(f"; {cure}")
    )


# ---- a folder in use


@pytest.mark.parametrize(
    ("module", "argv"), [("train", ()), ("train", ("--resume", "auto")), ("rft", RFT)]
)
def test_a_folder_in_use_is_refused_and_left_alone(
    module: str, argv: tuple[str, ...], server: Server, words: tuple[str, ...], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with Lock.of_folder(run, "end it"):
        options = (*(SMALL if module == "rft" else words), *argv, "--run.dir", run)
        code, lines, _ = server.run(module, *options)
        assert code == 2
        assert is_in_use(
            lines, module, run, "end this process or choose another --run.dir", os.getpid()
        )
        assert [path.name for path in run.iterdir()] == ["lock"]


def test_a_second_trainer_is_told_of_the_first_and_takes_over_when_it_is_killed(
    server: Server, words: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = server.start("train", *words, "--run.dir", run)
    first.wait_for(lambda: '{"step": 2,' in text_of(run / "metrics.jsonl"))
    os.kill(first.pid, signal.SIGSTOP)
    code, lines, _ = server.run("train", *words, "--run.dir", run, "--resume", "auto")
    assert code == 2
    assert is_in_use(lines, "train", run, "end this process or choose another --run.dir", first.pid)
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    server.resume(run, *words)
    check_same_run(run, full)
    assert not list(run.rglob("lock"))


def test_of_two_ranks_neither_waits_for_the_other_that_was_refused(
    server: Server, words: tuple[str, ...], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with Lock.of_folder(run, "end it"):
        ranks = server.start_ranks(2, *words, "--run.dir", run)
        assert [rank.wait() for rank in ranks] == [2, 2]
        lines = [line for rank in ranks for line in rank.err.read_text().splitlines()]
        ours = [line for line in lines if line.startswith("flowtrain.train: ")]
        assert is_in_use(
            ours, "train", run, "end this process or choose another --run.dir", os.getpid()
        )
        assert not any("Traceback" in line for line in lines)


def test_a_store_in_use_is_not_cleaned_up(server: Server, full: Path, tmp_path: Path) -> None:
    shutil.copytree(full / "weights", tmp_path / "weights")
    with Lock.of_folder(tmp_path / "weights", "end it"):
        code, lines, _ = server.run("weights", "gc", tmp_path / "weights", "--keep", 1)
    assert code == 2 and f"process {os.getpid()}" in lines[-1]
    assert (tmp_path / "weights" / "v00000005").exists()


# ---- damaged checkpoints


def flip(path: Path) -> None:
    data = bytearray((path / "model" / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "model" / "model.safetensors").write_bytes(data)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_taken(
    server: Server, words: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    """And set aside, so that it does not count as one of those to keep."""
    run = tmp_path / "run"
    shutil.copytree(full, run)
    flip(run / "checkpoints" / NEWEST)
    options = (*words, "--run.dir", run, "--resume", "auto", "--checkpoint.keep", "1")
    code, lines, _ = server.run("train", *options)
    assert code == 0 and len(lines) == 1, lines
    assert f"skipping checkpoint {run / 'checkpoints' / NEWEST}: " in lines[0]
    check_same_run(run, full)
    there = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert there == [NEWEST, f"{NEWEST}.damaged"]
