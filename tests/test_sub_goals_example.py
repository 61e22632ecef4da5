"""The example that gives questions sub-goals, with a scripted model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_servers import chat_server

from examples import sub_goals
from flowtrain.records import SubGoal
from flowtrain.tasks.files import load_tasks

ROW = {
    "question": "Where was the author of Utopia born?",
    "answer": "Moss",
    "context": [["Ann Lee", ["Ann Lee was born in Moss."]]],
}
LEE = {"names": ["Ann Lee"], "weight": 3, "query": "author of Utopia"}
BOOK = {"names": ["1901"], "weight": 1, "query": "birth of Ann Lee"}
TREE = {
    "entity": "Moss",
    "children": [
        {"entity": "Ann Lee", "question": "born in Moss", "children": [{"entity": "Bo Dahl"}]},
        {"entity": "Utopia", "question": "a book"},
    ],
}


def said(*goals: dict[str, Any]) -> str:
    return f"Here it is: {json.dumps({'sub_goals': goals})}"


def annotated(path: Path, row: dict[str, Any], *replies: str) -> tuple[int, list[str], Path]:
    """The exit code, what the model was told last, and the file with the row."""
    given, out = path / "rows.jsonl", path / "out.jsonl"
    given.write_text(json.dumps(row) + "\n")
    with pytest.MonkeyPatch.context() as patched:
        texts = iter(replies)
        with chat_server(lambda body: next(texts)) as server:
            patched.setenv("OPENAI_BASE_URL", server.base_url)
            patched.setenv("OPENAI_API_KEY", "none")
            code = sub_goals.main(["--model", "m", "--in", str(given), "--out", str(out)])
    return code, [body["messages"][-1]["content"] for body in server.asked], out


def test_a_reply_that_gives_something_away_is_asked_again(tmp_path: Path) -> None:
    bad = [{**LEE, "query": "Ann Lee"}, {**LEE, "names": ["Utopia"]}]
    code, asked, out = annotated(tmp_path, ROW, *map(said, bad), said(LEE, BOOK))
    assert code == 0 and "Ann Lee was born" in asked[0]
    assert "reveals its answer 'Ann Lee'" in asked[1] and "question itself names" in asked[2]
    (task,) = load_tasks(out)
    assert task.sub_goals == (
        SubGoal(("Ann Lee",), 0.75, "author of Utopia"),
        SubGoal(("1901",), 0.25, "birth of Ann Lee"),
    )
    assert annotated(tmp_path, ROW)[:2] == (0, []), "what is there is not asked again"


def test_a_row_without_a_usable_reply_fails_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, out = annotated(tmp_path, ROW, "No.", said({**LEE, "names": ["moss"]}), '{"a": 1}')
    assert code == 1 and not out.exists()
    assert "failed: rows-1: It cannot be used: KeyError" in capsys.readouterr().err


def test_a_tree_needs_no_model(tmp_path: Path) -> None:
    code, asked, out = annotated(tmp_path, {**ROW, "root": TREE})
    (task,) = load_tasks(out)
    assert (code, asked) == (0, [])
    assert task.sub_goals == (SubGoal(("Bo Dahl",), 0.6), SubGoal(("Ann Lee",), 0.4))
