"""Rows with options are scored as a choice, unless somebody says otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
