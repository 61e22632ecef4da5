"""Rows with options are scored as a choice, unless somebody says otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowtrain.records import UserError
from flowtrain.rewards.choice import choice
from flowtrain.tasks.files import load_tasks


@pytest.mark.parametrize(
    ("row", "scorer", "expected"),
    [
        ({}, "", "choice"),
        ({"scorer": "qa"}, "", "qa"),
        ({}, "math", "math"),
        ({"choices": []}, "", "exact"),
    ],
)
def test_the_scorer_of_a_row_with_options(
    row: dict[str, object], scorer: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"question": "Which?", "answer": "B", "choices": ["Rome", "Oslo"], **row}
    row = {key: value for key, value in row.items() if value != []}
    path.write_text(json.dumps(row))
    (task,) = load_tasks(str(path), scorer=scorer)
    assert task.scorer == expected


@pytest.mark.parametrize("label", ["{})", "{}) ", "({}) ", "{}. ", "{}: "])
def test_options_lose_their_letters(label: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    options = [label.format(letter) + text for letter, text in zip("ABC", "123", strict=True)]
    path.write_text(json.dumps({"question": "q", "answer": "B", "choices": options}))
    (task,) = load_tasks(str(path))
    assert task.choices == ("1", "2", "3")
    assert [choice(task, each) for each in ("B", "B)2", "B) 2", "(B) 2", "2")] == [1.0] * 5


@pytest.mark.parametrize("answer", ["NaN", "Infinity", "[1, NaN]"])
def test_an_answer_that_is_no_number_is_refused(answer: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"question": "q", "answer": {answer}}}')
    with pytest.raises(
        UserError, match=r"rows\.jsonl, line 1: the answer in 'answer' is not a number"
    ):
        load_tasks(str(path))
