"""Commands that models write which are not literal, or no Python; and what is never run."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.agents.commands import find_command, write_command
from flowtrain.agents.executor import LLMExecutor
from flowtrain.agents.lenient_commands import Command, fitted, read_command
from flowtrain.tools import ToolCard
from flowtrain.tools.base import Parameter
from flowtrain.types import Action

CARD = ToolCard("Python_Coder", "computes", aliases=("Python_Code_Generator_Tool",))
TWO = ToolCard("Pages", "finds", (Parameter("query", "what"), Parameter("url", "where")))
FORMS = {
    'd = 5\nexecution = tool.execute(query=f"Compute {d}*18/30")': ["Compute 5*18/30"],
    'execution = tool.execute(query="a " + "b")': ["a b"],
    "execution = tool.execute(query=str_of)": None,
    'n = 2 ** 10\nexecution = tool.execute(query=f"root of {n}")': ["root of 1024"],
    'n = -(3 + 4) * 2\nexecution = tool.execute(query=f"{n}")': ["-14"],
    'execution = Python_Coder.execute(query="2 + 2")': ["2 + 2"],
    'execution = Python_Coder_Tool.execute(query="2 + 2")': ["2 + 2"],
    'execution = Python_Code_Generator_Tool.execute(query="2 + 2")': ["2 + 2"],
    'execution = tool.execute(query="one\ntwo")': ["one\ntwo"],
    'execution = tool.execute(query="say "hi" twice")': ['say "hi" twice'],
    "execution = tool.execute(query='it's 4')": ["it's 4"],
    'execution = tool.execute(query=f"{x}")': None,
    'execution = tool.execute(query=open("/etc/passwd").read())': None,
    'execution = Search.execute(query="2 + 2")': None,
    "execution = tool.execute(query=f'{9 ** 9 ** 9}')": None,
    "a = 'x' * 10 ** 9\nexecution = tool.execute(query=a)": None,
    "execution = tool.execute(query=1 / 0)": None,
    "no command": None,
}


@pytest.mark.parametrize("code", FORMS)
def test_a_command_is_read_as_it_was_meant(code: str) -> None:
    reply = f"Generated Command:\n```python\n{code}\n```"
    with pytest.raises(ValueError, match="no tool command"):
        find_command(reply, CARD)
    if (queries := FORMS[code]) is None:
        with pytest.raises(ValueError, match="no tool command"):
            read_command(reply, CARD)
    else:
        found = read_command(reply, CARD)
        assert [run["query"] for run in found.runs] == queries and found.rules


@pytest.mark.parametrize(
    ("given", "card", "runs"),
    [
        ({"query": "a"}, CARD, ({"query": "a"},)),
        ({"question": "a"}, CARD, ({"query": "a"},)),
        ({"query": ["Methanol", "Ethanol"]}, CARD, ({"query": "Methanol"}, {"query": "Ethanol"})),
        ({"queries": ["a"]}, CARD, ({"query": "a"},)),
        ({"query": ["a"] * 6}, CARD, ({"query": ["a"] * 6},)),
        ({"query": []}, CARD, ({"query": []},)),
        ({"query": [1]}, CARD, ({"query": [1]},)),
        ({"query": 1}, CARD, ({"query": 1},)),
        ({"q": "a"}, TWO, ({"q": "a"},)),
        ({"url": "a"}, TWO, ({"url": "a"},)),
        ({"a": "b", "c": "d"}, CARD, ({"a": "b", "c": "d"},)),
    ],
)
def test_arguments_are_fitted_to_a_tool_of_one(
    given: dict[str, object], card: ToolCard, runs: tuple[dict[str, object], ...]
) -> None:
    assert fitted(given, card) == (runs, runs != (given,))


class Says:
    """A chat engine that says one thing."""

    def __init__(self, reply: str) -> None:
        self.reply = reply

    async def ask(self, prompt: str, *, seed: int = 0, deadline_s: float = 60.0) -> str:
        return self.reply


class Coder:
    card = CARD

    async def execute(self, query: str) -> str:
        if query == "bad":
            raise ZeroDivisionError(query)
        return query.upper()

    def close(self) -> None: ...


def execute(reply: str, is_lenient: bool = True) -> tuple[str, str, tuple[str, ...]]:
    executor = LLMExecutor(
        {"Python_Coder": Coder()},
        5.0,
        100,
        Says(reply),
        5.0,
        is_lenient,  # type: ignore[arg-type]
    )
    action = Action("", "", "area", "Python_Coder")
    done = asyncio.run(executor.execute("q", action, 0, 5.0))
    return done.command, done.result.text, done.rescued


def test_the_executor_runs_each_value_and_says_what_it_took() -> None:
    command, text, rescued = execute('execution = tool.execute(query=["a", "bad"])')
    assert command == 'execution = tool.execute(query="a"); execution = tool.execute(query="bad")'
    assert text == "a: A\nbad: Error: ZeroDivisionError: bad" and rescued == ("arguments",)
    _, text, _ = execute('execution = tool.execute(query=["bad"])')
    assert text == "Error: ZeroDivisionError: bad"
    assert execute('execution = tool.execute(query="a")')[2] == ()


def test_the_strict_executor_does_not() -> None:
    command, text, rescued = execute('tool.execute(query="a" + "b")', is_lenient=False)
    assert text == "Error: the executor wrote no command" and not rescued
    assert command.startswith("No command found in: ")
    assert "takes (query: str)" in execute('tool.execute(q="a")', is_lenient=False)[1]


texts = st.text(max_size=60)
pieces = st.lists(st.sampled_from([*FORMS, "(", '"', "f", "{", "}"])).map("".join)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(texts | pieces)
def test_what_is_read_reads_the_same_when_it_is_written(reply: str) -> None:
    try:
        found = read_command(reply, CARD)
    except ValueError:
        return
    assert isinstance(found, Command)
    for run in found.runs:
        if all(isinstance(value, str) for value in run.values()) and "query" in run:
            assert find_command(write_command(run), CARD) == (run, 1)


HOSTILE = (
    "tool.execute(" * 5000,
    "tool.execute(query=" + "(" * 50_000,
    "tool.execute(query=" + "-" * 50_000 + "1)",
    "tool.execute(query=f'" + "{1}" * 20_000 + "')",
    "x.execute" * 10_000,
    'tool.execute(query="' + '"' * 50_000,
)


@pytest.mark.parametrize("code", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_commands_take_no_time(code: str) -> None:
    started = time.process_time()
    with pytest.raises(ValueError, match="no tool command"):
        read_command(code, CARD)
    assert time.process_time() - started < 3.0
