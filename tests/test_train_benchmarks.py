"""Benchmarks that a run asks while it trains: their metrics, and that nothing else changes."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_runs import AFTER_STEP_3, Run, Server, check_same_run, read, rows

pytest_plugins = ("cli_runs",)
NUM_STEPS = 4
EVERY = ("--train.num_steps", str(NUM_STEPS), "--eval.every", "2")


@pytest.fixture(scope="session")
def asked(once: Callable[..., Path], inputs: Path, words: tuple[str, ...]) -> tuple[str, ...]:
    """Options of a run that asks two benchmarks every second step, of other questions."""

    def make(path: Path) -> None:
        path.mkdir()
        tasks = [
            {**task, "question": f"Say {number} in other words, please."}
            for number, task in enumerate(read(inputs / "tasks.jsonl")[:5])
        ]
        (path / "mine.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        puzzles = [{"query": "24 from 1, 2, 3, 4", "question": [1, 2, 3, 4]}]
        (path / "gameof24.json").write_text(json.dumps(puzzles))

    path = once("benchmarks", make)
    named = f'["mine={path / "mine.jsonl"}:qa", "gameof24"]'
    return (
        *words,
        *(*EVERY, "--eval.benchmarks", named, "--tasks.benchmarks", str(path)),
        *("--eval.trials", "2", "--eval.rows", "4"),
    )


@pytest.fixture(scope="session")
def whole(once: Callable[..., Path], server: Server, asked: tuple[str, ...]) -> Path:
    """The folder of a run that asked them."""

    def make(path: Path) -> None:
        code, lines, _ = server.run("train", *asked, "--run.dir", path)
        assert (code, lines) == (0, [])

    return once("asks_benchmarks", make)


def of_benchmarks(record: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in record.items() if key.startswith("eval_") and "/" in key}


def test_every_evaluation_asks_them(whole: Path) -> None:
    found = {record["step"]: of_benchmarks(record) for record in read(whole / "metrics.jsonl")}
    assert [step for step, metrics in found.items() if metrics] == [0, 2, 4]
    for metrics in filter(None, found.values()):
        assert set(metrics) == {
            *(f"eval_{name}/mine" for name in ("accuracy", "pass_at_2", "em", "f1", "turns")),
            *(f"eval_{name}/gameof24" for name in ("accuracy", "pass_at_2", "turns")),
        }
        num_right = 8 * metrics["eval_accuracy/mine"]  # of four questions, twice each
        assert num_right == pytest.approx(round(num_right))
        assert metrics["eval_accuracy/mine"] <= metrics["eval_pass_at_2/mine"]
        assert metrics["eval_em/mine"] == metrics["eval_accuracy/mine"] <= metrics["eval_f1/mine"]
    assert any(metrics.get("eval_accuracy/mine", 0) > 0 for metrics in found.values())
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["warm"]["benchmarks"] == found[0]
    assert set(summary["trained"]["benchmarks"]) == set(found[0])


def test_training_is_the_same_with_them_and_without(whole: Path, run: Run) -> None:
    plain = run("plain", *EVERY).path
    ours, theirs = rows(whole, "metrics.jsonl"), rows(plain, "metrics.jsonl")
    left = [
        {key: value for key, value in record.items() if key not in of_benchmarks(record)}
        for record in ours
    ]
    assert left == theirs
    for name in ("trajectories.jsonl", "held_out.jsonl"):
        assert rows(whole, name) == rows(plain, name)


def test_a_run_that_was_killed_goes_on_with_them(
    whole: Path, run: Run, server: Server, asked: tuple[str, ...]
) -> None:
    again = run("run", base=asked, before=AFTER_STEP_3, code=-signal.SIGKILL).path
    server.resume(again, *asked)
    check_same_run(again, whole, NUM_STEPS)


def test_greedy_asks_nothing_by_chance(
    whole: Path, server: Server, asked: tuple[str, ...], tmp_path: Path
) -> None:
    """Two trials at temperature 0 are the same: every number of rights is even."""
    shutil.copytree(whole, tmp_path / "run")
    more = ("--train.num_steps", str(NUM_STEPS + 2), "--eval.temperature", "0")
    server.resume(tmp_path / "run", *asked, *more)
    last = read(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["step"] == NUM_STEPS + 2 and last["eval_accuracy/mine"] * 4 in range(5)
