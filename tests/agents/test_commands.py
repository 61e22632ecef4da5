"""Commands that models write which are not literal, or no Python; and what is never run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make import Chat, Tool

from flowtrain.agents.agentflow.commands import command_of, fitted, read_command, write_command
from flowtrain.agents.agentflow.executor import Executor
from flowtrain.records import Action
from flowtrain.tools import ToolCard
from flowtrain.tools.base import Parameter, schema_of

CARD = ToolCard("Python_Coder", "computes", aliases=("Python_Code_Generator_Tool",))
TWO = ToolCard("Pages", "finds", schema_of(Parameter("query", "what"), Parameter("url", "where")))
REPLIES = [
    (found["reply"], found["read"])
    for line in Path(__file__).with_name("replies.jsonl").read_text("utf-8").splitlines()
    if (found := json.loads(line))["role"] == "executor"
]
"""What executors write, and the query of the command in it; None for no command that runs."""


@pytest.mark.parametrize(("reply", "query"), REPLIES)
def test_a_command_is_read_as_it_was_meant_or_not_at_all(reply: str, query: str | None) -> None:
    if query is not None:
        assert read_command(reply, CARD).arguments == {"query": query}
        return
    with pytest.raises(ValueError, match="no tool command"):
        read_command(reply, CARD)


@pytest.mark.parametrize(
    ("reply", "rules"),
    [
        ('tool.execute(query="a")', ()),
        ('Python\\_Coder.execute(query="a")', ("quotes", "values")),
        ('tool.execute(query="a" + "b")', ("values",)),
        ('tool.execute(query="a "b" c")', ("quotes",)),
        ('{"query": "a"}', ("json",)),
    ],
)
def test_the_rules_that_a_command_took_are_named(reply: str, rules: tuple[str, ...]) -> None:
    assert read_command(reply, CARD).rules == rules


@pytest.mark.parametrize(
    ("given", "card", "fits"),
    [
        ({"query": "a"}, CARD, {"query": "a"}),
        ({"question": "a"}, CARD, {"query": "a"}),
        ({"queries": ["a"]}, CARD, {"query": "a"}),
        ({"query": ["a", "b"]}, CARD, {"query": ["a", "b"]}),
        ({"query": []}, CARD, {"query": []}),
        ({"query": [1]}, CARD, {"query": [1]}),
        ({"query": 1}, CARD, {"query": 1}),
        ({"q": "a"}, TWO, {"q": "a"}),
        ({"url": "a"}, TWO, {"url": "a"}),
        ({"a": "b", "c": "d"}, CARD, {"a": "b", "c": "d"}),
    ],
)
def test_arguments_are_fitted_to_a_tool_of_one(
    given: dict[str, object], card: ToolCard, fits: dict[str, object]
) -> None:
    assert fitted(given, card) == fits


def execute(reply: str) -> tuple[str, str, tuple[str, ...]]:
    tools = {"Python_Coder": Tool(CARD, lambda query: query.upper())}
    executor = Executor(tools, 5.0, 100, Chat(reply), 5.0)
    action = Action("", "", "area", "Python_Coder")
    done = asyncio.run(executor.execute("q", action, 0, 5.0))
    assert done.tool_call is not None
    return command_of(done.tool_call), done.tool_call.result.text, done.rescued


def test_the_executor_says_what_it_took() -> None:
    command, text, rescued = execute('execution = tool.execute(question=["a"])')
    assert (command, text) == ('execution = tool.execute(query="a")', "A")
    assert rescued == ("arguments",)
    assert execute('execution = tool.execute(query="a")')[2] == ()
    _, text, rescued = execute('execution = tool.execute(query=["a", "b"])')
    assert text.startswith("Error: ") and "query" in text and rescued == ()


texts = st.text(max_size=60)
pieces = st.lists(st.sampled_from([*(reply for reply, _ in REPLIES), "\n", "(", '"', "{"])).map(
    "".join
)


@settings(max_examples=200)
@given(texts | pieces)
def test_what_is_read_reads_the_same_when_it_is_written(reply: str) -> None:
    with contextlib.suppress(ValueError):
        found = read_command(reply, CARD).arguments
        assert read_command(write_command(found), CARD) == (found, 1, ())


HOSTILE = (
    "tool.execute(" * 5000,
    "tool.execute(query=" + "(" * 50_000,
    "tool.execute(query=" + "-" * 50_000 + "1)",
    "tool.execute(query=f'" + "{1}" * 20_000 + "')",
    "x.execute" * 10_000,
    'tool.execute(query="' + '"' * 50_000,
)


@pytest.mark.clock
@pytest.mark.parametrize("code", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_commands_take_no_time(code: str) -> None:
    started = time.process_time()
    with pytest.raises(ValueError, match="no tool command"):
        read_command(code, CARD)
    assert time.process_time() - started < 3.0
