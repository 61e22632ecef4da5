"""Benchmarks that a run asks while it trains: their metrics, and that nothing else changes."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from cli_runs import KILL, Server, check_same_run, read, rows

pytest_plugins = ("cli_runs",)
NUM_STEPS = 4
EVERY = ("--train.num_steps", str(NUM_STEPS), "--eval.every", "2")


@pytest.fixture(scope="module")
def asked(place: Path, words: tuple[str, ...]) -> tuple[str, ...]:
    """Options of a run that asks two benchmarks every second step, of other questions."""
    tasks = [
        {**task, "question": f"Say {number} in other words, please."}
        for number, task in enumerate(read(place / "tasks.jsonl")[:5])
    ]
    (place / "mine.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    puzzles = [{"query": "24 from 1, 2, 3, 4", "question": [1, 2, 3, 4]}]
    (place / "gameof24.json").write_text(json.dumps(puzzles))
    named = f'["mine={place / "mine.jsonl"}:qa", "gameof24"]'
    return (
        *words,
        *(*EVERY, "--eval.benchmarks", named, "--tasks.benchmarks", str(place)),
        *("--eval.trials", "2", "--eval.rows", "4"),
    )


@pytest.fixture(scope="module")
def run(
    place: Path, server: Server, asked: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("benchmarks") / "run"
    code, lines, _ = server.run("train", *asked, "--run.dir", path)
    assert (code, lines) == (0, [])
    return path


def of_benchmarks(record: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in record.items() if key.startswith("eval_") and "/" in key}


def test_every_evaluation_asks_them(run: Path) -> None:
    found = {record["step"]: of_benchmarks(record) for record in read(run / "metrics.jsonl")}
    assert [step for step, metrics in found.items() if metrics] == [0, 2, 4]
    for metrics in filter(None, found.values()):
        assert set(metrics) == {
            *(f"eval_{name}/mine" for name in ("accuracy", "pass_at_2", "em", "f1", "turns")),
            *(f"eval_{name}/gameof24" for name in ("accuracy", "pass_at_2", "turns")),
        }
        # Four questions, twice each.
        assert metrics["eval_accuracy/mine"] * 8 == pytest.approx(
            round(metrics["eval_accuracy/mine"] * 8)
        )
        assert metrics["eval_accuracy/mine"] <= metrics["eval_pass_at_2/mine"]
        assert metrics["eval_em/mine"] == metrics["eval_accuracy/mine"] <= metrics["eval_f1/mine"]
    assert any(metrics.get("eval_accuracy/mine", 0) > 0 for metrics in found.values()), (
        "this run shows something"
    )
    summary = json.loads((run / "summary.json").read_text())
    assert summary["warm"]["benchmarks"] == found[0]
    assert set(summary["trained"]["benchmarks"]) == set(found[0])


def test_training_is_the_same_with_them_and_without(
    run: Path, server: Server, words: tuple[str, ...], tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    code, _, _ = server.run("train", *words, *EVERY, "--run.dir", plain)
    assert code == 0
    ours, theirs = rows(run, "metrics.jsonl"), rows(plain, "metrics.jsonl")
    left = [
        {key: value for key, value in record.items() if key not in of_benchmarks(record)}
        for record in ours
    ]
    assert left == theirs
    for name in ("trajectories.jsonl", "held_out.jsonl"):
        assert rows(run, name) == rows(plain, name)


def test_a_run_that_was_killed_goes_on_with_them(
    run: Path, server: Server, asked: tuple[str, ...], tmp_path: Path
) -> None:
    again = tmp_path / "run"
    before = KILL.format(
        module="flowtrain.run.run_logger", path="RunLogger.log", number=3, after=True
    )
    code, _, _ = server.run("train", *asked, "--run.dir", again, before=before)
    assert code == -signal.SIGKILL
    server.resume(again, *asked)
    check_same_run(again, run, NUM_STEPS)


def test_greedy_asks_nothing_by_chance(
    run: Path, server: Server, asked: tuple[str, ...], tmp_path: Path
) -> None:
    """Two trials at temperature 0 are the same: every number of rights is even."""
    shutil.copytree(run, tmp_path / "run")
    more = ("--train.num_steps", str(NUM_STEPS + 2), "--eval.temperature", "0")
    server.resume(tmp_path / "run", *asked, *more)
    last = read(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["step"] == NUM_STEPS + 2 and last["eval_accuracy/mine"] * 4 in range(5)
