"""No question is trained that an evaluation asks, whatever a file repeats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowtrain.config import Config
from flowtrain.records import UserError
from flowtrain.tasks.sets import TaskSet, task_set


def write(path: Path, questions: list[str]) -> str:
    rows = [
        {"id": f"{path.stem}-{number}", "question": text, "answer": "1"}
        for number, text in enumerate(questions)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def loaded(**sections: dict[str, Any]) -> TaskSet:
    return task_set(Config.model_validate(sections))


def asked(tasks: TaskSet) -> tuple[set[str], set[str]]:
    """The questions of training and of evaluation, as words."""
    kept = [task for split in tasks.held_out.values() for task in split]
    return tuple(
        {" ".join(t.question.lower().split()) for t in each} for each in (tasks.train, kept)
    )  # type: ignore[return-value]


def test_a_question_twice_in_a_file_is_trained_or_held_out(tmp_path: Path) -> None:
    questions = [f"What is the answer to riddle {number}?" for number in range(40)]
    again = [f" what is  the answer to riddle {number}? " for number in range(40)]
    path = write(tmp_path / "rows.jsonl", questions + again)
    train, held_out = asked(loaded(tasks={"name": "file", "path": path, "held_out_share": 0.5}))
    assert held_out and not train & held_out
    assert train | held_out == set(map(str.lower, questions))


def test_a_question_in_two_files_of_a_mixture_is_trained_or_held_out(tmp_path: Path) -> None:
    questions = [f"What is the answer to riddle {number}?" for number in range(20)]
    orders = {"a.jsonl": questions, "b.jsonl": questions[::-1]}
    paths = [write(tmp_path / name, order) for name, order in orders.items()]
    mixture = dict.fromkeys(paths, 1.0)
    train, held_out = asked(loaded(tasks={"name": "file", "mixture": mixture}))
    assert held_out and not train & held_out


def test_rows_that_differ_in_their_columns_are_other_questions(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": "Run it.", "seed": number} for number in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = {"function": "mine.py:score"}
    tasks = loaded(tasks={"name": "file", "path": str(path)}, reward=reward)
    assert len(tasks.train) + len(tasks.held_out["texts"]) == 10


def test_a_file_of_one_question_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ["What is it?"] * 10)
    with pytest.raises(UserError, match="all rows are duplicates of each other"):
        loaded(tasks={"name": "file", "path": path})


def test_questions_of_a_benchmark_from_a_file_are_not_trained(tmp_path: Path) -> None:
    riddles = [f"Which animal is number {number} of the {number}th riddle?" for number in range(30)]
    path = write(tmp_path / "rows.jsonl", riddles)
    hard = write(tmp_path / "hard.jsonl", [riddles[3], riddles[7]])
    train, _ = asked(
        loaded(tasks={"name": "file", "path": path}, eval={"benchmarks": [f"hard={hard}:qa"]})
    )
    assert len(train) > 20 and not train & {riddles[3].lower(), riddles[7].lower()}
