"""Sub-goals written by a scripted engine: rows of HotpotQA through the command, bad replies, a
command that was stopped, and rows that need no engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_servers import ChatServer, chat_server
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.tasks.annotate import main
from flowtrain.tasks.files import load_tasks
from flowtrain.tasks.sub_goal_prompt import MAX_REPLY_CHARS, from_tree, passages, read_reply
from flowtrain.tasks.sub_goals import check
from flowtrain.types import SubGoal, Task, UserError

ROW = {
    "_id": "5a8b57f25542995d1e6f1371",
    "question": "Where was the author of Utopia born?",
    "answer": "Moss",
    "supporting_facts": [["Utopia (book)", 0], ["Ann Lee", 0]],
    "context": [
        ["Tax law", ["Nothing of interest."]],
        ["Utopia (book)", ["Utopia was written by Ann Lee."]],
        ["Ann Lee", ["Ann Lee was born in Moss."]],
    ],
}
GOAL = {"names": ["Ann Lee"], "importance": 2, "query": "author of Utopia"}
ASKED = Task("t", ROW["question"], ("Moss",), columns=json.dumps({"context": ROW["context"]}))  # type: ignore[arg-type]


def said(*goals: dict[str, Any]) -> str:
    return json.dumps({"sub_goals": list(goals)})


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def engine(
    script: Callable[[str], str], num_together: int = 0
) -> Iterator[tuple[ChatServer, list[str]]]:
    """An endpoint, and the options that name it; the first requests wait for three together."""
    three = asyncio.Barrier(3)

    async def wait() -> None:
        if len(server.asked) <= num_together:
            await three.wait()

    with chat_server(lambda body: script(body["messages"][0]["content"]), wait) as server:
        settings = {"model": "m", "base_url": server.base_url, "api_key_env": ""}
        settings |= {"max_retries": "0", "max_concurrency": "3", "timeout_s": "20"}
        settings |= {"price_in": "1", "price_out": "2"}
        words = [f"--engines.expert.{key}={value}" for key, value in settings.items()]
        yield server, ["--engine", "expert", *words]


def test_rows_get_sub_goals_and_what_is_written_is_not_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [{**ROW, "question": f"Where was the author of Utopia {n} born?"} for n in range(20)]
    rows, out = write(tmp_path / "hotpot.jsonl", ROW, *others), tmp_path / "annotated.jsonl"
    text = f"Here it is:\n```json\n{said(GOAL)}\n```"
    with engine(lambda _: text, num_together=21) as (server, options):
        argv = ["--in", str(rows), "--out", str(out), "--tasks.scorer", "qa", *options]
        assert main(argv) == 0
        assert len(server.asked) == 21 and server.most == 3
        prompt = next(each for each in server.prompts if "of Utopia born" in each)
        assert "Utopia (book): Utopia was written by Ann Lee." in prompt
        shown = capsys.readouterr().out
        assert "21 rows; 0 failed" in shown
        words = sum(len(each.split()) for each in server.prompts)
        replied = 21 * len(text.split())
        cost = f"{(words + 2 * replied) / 1e6:.4g}"
        assert f"expert: 21 requests, {words:,} + {replied:,} tokens" in shown
        assert shown.strip().endswith(f"cost {cost}")
        lines = out.read_bytes().splitlines(keepends=True)
        out.write_bytes(b"".join(lines[:5]) + lines[5][:20])  # killed in the middle of a row
        assert main(argv) == 0
        assert len(server.asked) == 21 + 16
        again = out.read_bytes().splitlines(keepends=True)
        assert again[:5] == lines[:5] and sorted(again) == sorted(lines)
        assert main(argv) == 0 and len(server.asked) == 37
    tasks = load_tasks(out)
    assert {task.question for task in tasks} == {row["question"] for row in (ROW, *others)}
    assert {task.sub_goals for task in tasks} == {(SubGoal(("Ann Lee",), 1.0, "author of Utopia"),)}
    assert {(task.scorer, task.answers) for task in tasks} == {("qa", ("Moss",))}
    for task in tasks:
        check(task)


def test_a_bad_reply_is_asked_again_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = said({**GOAL, "query": "Ann Lee's books"})
    replies = ["I would rather not.", bad, bad, said(GOAL)]
    rows, out = write(tmp_path / "rows.jsonl", ROW), tmp_path / "out.jsonl"
    with engine(lambda _: replies[len(server.asked) - 1]) as (server, options):
        argv = ["--in", str(rows), "--out", str(out), *options]
        assert main(argv) == 1
        assert "Your last reply was:\nI would rather not." in server.prompts[1]
        told = capsys.readouterr().err.strip()
        assert told.startswith("failed: rows-1: task 'rows-1': the query") and not out.exists()
        assert told.endswith("away (3 replies)")
        assert main(argv) == 0
    assert len(read(out)) == 1


def test_a_stopped_command_keeps_its_rows_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = [{**ROW, "question": f"Where was the author of Utopia {n} born?"} for n in range(12)]
    rows, out = write(tmp_path / "rows.jsonl", *many), tmp_path / "out.jsonl"
    stops = [8]

    def script(_: str) -> str:
        if len(server.asked) in stops:
            os.kill(os.getpid(), signal.SIGTERM)
        return said(GOAL)

    with engine(script) as (server, options):
        argv = ["--in", str(rows), "--out", str(out), *options]
        assert main(argv) == 130 and "the same command goes on" in capsys.readouterr().err
        num_done = len(read(out))
        assert 5 <= num_done <= 8
        stops.clear()
        assert main(argv) == 0
        # A request that was under way may reach the server after the stop: count what was sent.
        assert f"expert: {12 - num_done} requests" in capsys.readouterr().out
    assert {task.question for task in load_tasks(out)} == {row["question"] for row in many}
    assert len(read(out)) == 12


def test_an_engine_that_fails_fails_its_row_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from starlette.responses import Response

    rows = write(tmp_path / "rows.jsonl", {**ROW, "question": "Where is the bad one?"}, ROW)
    out = tmp_path / "out.jsonl"

    def script(prompt: str) -> Any:
        return Response("overloaded", 503) if "bad one" in prompt else said(GOAL)

    with engine(script) as (_, options):
        assert main(["--in", str(rows), "--out", str(out), *options]) == 1
    assert [row["id"] for row in read(out)] == ["rows-2"]
    assert "HTTP 503" in capsys.readouterr().err


def test_rows_with_a_tree_or_sub_goals_of_their_own_need_no_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"names": ["Ann Lee"], "weight": 1.0, "query": "author of Utopia"}
    plain = {key: ROW[key] for key in ("question", "answer")}
    rows = write(
        tmp_path / "rows.jsonl",
        {"sub_goals": [own], **plain},
        {"root": {"entity": "Moss", "children": [{"entity": "Ann Lee"}]}, **plain},
    )
    out = tmp_path / "out.jsonl"
    assert main(["--in", str(rows), "--out", str(out)]) == 0
    assert "2 rows; 0 failed" in capsys.readouterr().out
    asked, drawn = (task.sub_goals for task in load_tasks(out))
    assert asked == (SubGoal(("Ann Lee",), 1.0, "author of Utopia"),)
    assert drawn == (SubGoal(("Ann Lee",), 1.0),)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "task 'rows-1' has no sub-goals of its own"),
        (["--engine", "gpt"], "--engine 'gpt' must be a name in [engines], which holds nothing"),
    ],
)
def test_a_missing_engine_is_named_before_anything_is_written(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write(tmp_path / "rows.jsonl", ROW)
    assert main(["--in", str(rows), "--out", str(tmp_path / "out.jsonl"), *argv]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": "rows-1", "question": "another", "sub_goals": []}, "is of another question"),
        ({"id": "x", "question": "another", "sub_goals": []}, "is of another question"),
        ({"step": 1}, "was not written by this command"),
        ([1], "was not written by this command"),
    ],
)
def test_a_file_of_something_else_is_left_alone(
    line: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = {"entity": "Moss", "children": [{"entity": "Ann Lee"}]}
    rows = write(tmp_path / "rows.jsonl", {"root": root, **ROW})
    out = write(tmp_path / "out.jsonl", line)
    with out.open("a") as file:
        file.write("and no end of line")
    before = out.read_bytes()
    assert main(["--in", str(rows), "--out", str(out)]) == 2
    assert message in capsys.readouterr().err and out.read_bytes() == before


# ---- replies


def test_importance_becomes_weights_that_sum_to_one() -> None:
    second = {"names": ["1901", "the year 1901"], "importance": 1, "query": "birth of Ann Lee"}
    goals = read_reply(Task("t", "q", ("Moss",)), said({**GOAL, "importance": 3}, second))
    assert [goal.weight for goal in goals] == [0.75, 0.25]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("", "not the JSON object"),
        ("[]", "not the JSON object"),
        ("{" * 5000 + "}" * 5000, "not the JSON object"),
        ('{"sub_goals": ' + "[" * 9000 + "}", "not the JSON object"),
        ('{"sub_goals": [{"names": ["\\ud800"], "importance": 1}]}', "not the JSON object"),
        (said({"names": ["Ann Lee"], "importance": 0}), "importance"),
        (said({"names": ["Ann Lee"], "importance": 1e300}), "importance"),
        ('{"sub_goals": [{"names": ["Ann Lee"], "importance": NaN}]}', "not the JSON object"),
        (said({"names": [], "importance": 1}), "names"),
        (said({"names": ["?"], "importance": 1}), "names"),
        (said({"names": ["x" * 300], "importance": 1}), "names"),
        (said(*[GOAL] * 17), "sub_goals"),
        (said(GOAL, GOAL), "twice"),
        (said({"names": ["moss"], "importance": 1}), "the answer itself"),
        (said({**GOAL, "query": "who is Ann Lee"}), "gives 'Ann Lee' away"),
        (said({**GOAL, "query": "author born in Moss"}), "gives 'Moss' away"),
        (said({"names": ["Utopia"], "importance": 1}), "the question itself names 'Utopia'"),
        (said({"names": ["Bo Dahl"], "importance": 1}), "the passages do not name 'Bo Dahl'"),
        ("x" * MAX_REPLY_CHARS + said(GOAL), "more than 20000"),
    ],
)
def test_what_cannot_be_used_is_explained(reply: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read_reply(ASKED, reply)


@settings(max_examples=300)
@given(st.text(max_size=60) | st.text('{}[]":,sub_goalnmeipre123 ', max_size=80))
def test_any_reply_is_read_or_refused(reply: str) -> None:
    for text in (reply, f"{reply}{said(GOAL)}", f"{said(GOAL)}{reply}"):
        try:
            goals = read_reply(ASKED, text)
        except UserError:
            continue
        assert goals == () or goals[0].names[0].startswith("Ann Lee")


# ---- what rows hold


def row_of(columns: dict[str, Any]) -> Task:
    return Task("t", "Where does the mayor live?", ("Oslo",), columns=json.dumps(columns))


TREE = {
    "entity": "Oslo",
    "question": "Where does the mayor live?",
    "children": [
        {"entity": "Bo Dahl", "question": "mayor of a fjord town", "children": []},
        {
            "entity": "Moss",
            "question": "the town of Moss",
            "children": [
                {"entity": "Ann Lee", "question": "author born in Moss", "children": []},
                {"entity": "None", "children": []},
                {"entity": "oslo", "children": [7]},
                {"entity": None},
            ],
        },
    ],
}


def test_a_tree_begins_with_what_is_deepest() -> None:
    """Two nodes stand on the author, one on the others: 3, 2 and 2 of 7."""
    asked = row_of({"root": TREE})
    goals = from_tree(asked) or ()
    assert [(goal.names, goal.query) for goal in goals] == [
        (("Ann Lee",), "author born in Moss"),
        (("Bo Dahl",), "mayor of a fjord town"),
        (("Moss",), ""),
    ]
    assert [goal.weight for goal in goals] == pytest.approx([3 / 7, 2 / 7, 2 / 7])
    check(replace(asked, sub_goals=goals))


@pytest.mark.parametrize("root", [None, 7, "Oslo", {"entity": "x"}, {"entity": "x", "children": 3}])
def test_other_rows_have_no_tree(root: object) -> None:
    assert from_tree(row_of({"root": root})) is None


def test_passages_of_published_rows() -> None:
    """HotpotQA in both of its published forms, and MuSiQue's paragraphs."""
    pairs = [["Moss", ["Moss is", " a town."]], ["Utopia", ["By Ann Lee."]]]
    table = {"title": ["Moss", "Utopia"], "sentences": [pair[1] for pair in pairs]}
    wanted = "Moss: Moss is a town.\n\nUtopia: By Ann Lee."
    assert passages({"context": pairs}) == passages({"context": table}) == wanted
    paragraphs = [{"title": "Moss", "paragraph_text": "Moss is a town."}, "plain"]
    assert passages({"paragraphs": paragraphs}) == "Moss: Moss is a town.\n\nplain"
    assert passages({"context": "one text"}) == "one text" and passages({}) == ""
    assert len(passages({"passages": ["x" * 20_000]})) == 16_000
