"""The reader of commands raises nothing and loses nothing."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowtrain.agents.agentflow.commands import read_command, write_command
from flowtrain.agents.agentflow.planner import parse_action
from flowtrain.agents.agentflow.replies import cut_end_of_turn, read_verdict
from flowtrain.tools import Parameter, ToolCard, schema_of
from flowtrain.utils.text import final_answer

CARD = ToolCard(
    "Wiki",
    "Looks up.",
    schema_of(Parameter("query", "what"), Parameter("limit", "how many", int, False)),
)
CALL = 'execution = tool.execute(query="area of Chad")'
CHAD = {"query": "area of Chad"}

texts = st.text(st.characters(codec="utf-8"), max_size=200)
pieces = st.sampled_from(
    [
        *(
            *("execution = ", "tool.execute(", "query=", '"', "'", '"""', ")", "(", "{"),
            "[" * 50,
            *("**", "\\", "\n", "```", "```python\n", "#"),
        ),
        *("Generated Command:", "Conclusion:", "STOP", "CONTINUE", "stop", "<answer>"),
        *("</answer>", '{"command": "', '"}', "\x00", "\ud800", "Justification:", "Context:"),
        *("Sub-Goal:", "Tool Name:", "Wiki", '{"stop_signal": true}', "=lambda: 1", "*a", "**b"),
        "f'{x}'",
    ]
)
noise = st.lists(st.one_of(pieces, st.text(max_size=10)), max_size=25).map("".join)
values = st.one_of(
    texts,
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(texts, max_size=3),
)
names = st.sampled_from(["query", "limit", "url", "x", "max-age", "class", "a b", ""])
arguments = st.dictionaries(names, values, max_size=4)


# ---- executor


@given(arguments)
def test_a_command_is_read_as_it_was_written(arguments: dict[str, object]) -> None:
    command = write_command(arguments)
    assert read_command(command, CARD)[:2] == (arguments, 1)
    assert "\n" not in command


@settings(max_examples=300)
@given(noise)
@example("execution = tool.execute(" + "(" * 10_000)
@example("execution = tool.execute(a={[]: 1})")
@example("execution = tool.execute(a=" + "9" * 5000 + ")")
@example("execution = tool.execute(a=-" + "-" * 20_000 + "1)")
def test_no_reply_breaks_the_command_parser(reply: str) -> None:
    with contextlib.suppress(ValueError):
        read_command(reply, CARD)


@settings(max_examples=300)
@given(
    st.dictionaries(st.sampled_from(["query", "url"]), texts, min_size=1), st.sampled_from(range(6))
)
@example({"query": "\x85 \u2028 \x0c \x1c"}, 5)
def test_arguments_come_through_whatever_is_around_them(
    arguments: dict[str, str], form: int
) -> None:
    command = write_command(arguments)
    replies = (
        f"Analysis: find it\nExplanation: so\nGenerated Command:\n```python\n{command}\n```",
        f"```python\n{command}\n```",
        f"Generated Command:\n```\n{command}\n```\nThat should do.",
        json.dumps({"analysis": "a", "explanation": "b", "command": command}),
        "```json\n" + json.dumps({"command": f"```python\n{command}\n```"}) + "\n```",
        command,
    )
    if form in (0, 1, 2) and "```" in command:
        return  # a fence within a fence ends it, for people too
    if cut_end_of_turn(command) != command:
        return  # a token that ends a turn does so wherever it stands
    assert read_command(replies[form], CARD)[:2] == (arguments, 1)


@pytest.mark.parametrize(
    "reply",
    [
        f"```python\n{CALL}\n```",
        # AgentFlow's parser wants one line.
        '```py\nexecution = tool.execute(\n    query="area of Chad",\n)\n```',
        '```python\nq = "area of Chad"\nexecution = tool.execute(query=q)\n```',
        '```python\ntool.execute(query="area " "of Chad")\n```',
        # The first that can be read; the rest is not run.
        f"```python\nexecution = tool.execute(query=open('x'))\n{CALL}\n```",
        f"```python\nimport os\nprint(1)\nfor x in 1, 2: pass\n{CALL}\n```",
        f"```text\nno\n```\nGenerated Command:\n```python\n{CALL}\n```\n```python\n{'#' * 9}\n"
        "execution = tool.execute(query='z')\n```",
        f"```\nshort\n```\n```python\n{CALL}\n```",
        f"```\ntool.execute()\n```\n```python\n{CALL}\n```",  # the longest fence
        f"```python\n{CALL}",  # cut before the fence was closed
        f"`{CALL}`",
        '{"command": "execution = tool.execute(query=\\"area of Chad\\")"}',
    ],
)
def test_the_forms_of_a_command(reply: str) -> None:
    assert read_command(reply, CARD)[:2] == (CHAD, 1)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('execution = tool.execute("area of Chad", 3)', ({**CHAD, "limit": 3}, 1)),
        (f"{CALL}\ntool.execute(query='b')\nexecution = tool.execute(query='c')", (CHAD, 3)),
        (r'execution = tool.execute(query="a\ud800b")', ({"query": "a?b"}, 1)),
        (r'execution = tool.execute(query="\d+ \p")', ({"query": r"\d+ \p"}, 1)),
        ("execution = tool.execute()", ({}, 1)),
    ],
)
def test_the_arguments_of_a_command(code: str, expected: tuple[dict[str, object], int]) -> None:
    assert read_command(f"```python\n{code}\n```", CARD)[:2] == expected


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "I cannot do that.",
        "```python\nprint(1)\n```",
        "```python\nexecution = tool.run(query='x')\n```",
        "```python\nexecution = other.execute(query='x')\n```",
        "```python\nexecution = tool.execute(query=__import__('os').system('x'))\n```",
        "```python\nexecution = tool.execute(**{1: 'x'})\n```",
        "```python\nexecution = tool.execute(**['x'])\n```",
        "```python\nexecution = tool.execute(*['x'])\n```",
        "```python\nexecution = tool.execute('a', 1, 'more than the card has')\n```",
        "```python\nexecution = tool.execute(query=unknown)\n```",
        "```python\nq = 'x'\nq = input()\nexecution = tool.execute(query=q)\n```",
        "```python\nexecution += tool.execute(query='x')\n```",
        '{"command": null}',
        '{"command": "No command found."}',
    ],
)
def test_what_is_no_command(reply: str) -> None:
    with pytest.raises(ValueError):
        read_command(reply, CARD)


def test_nothing_of_a_command_is_executed(tmp_path: object) -> None:
    marker = f"{tmp_path}/was-run"
    for code in (
        f"open({marker!r}, 'w')",
        f"[open({marker!r}, 'w')]",
        f"(lambda: open({marker!r}, 'w'))()",
    ):
        for reply in (f"x = {code}\n{CALL}", f"execution = tool.execute(query={code})\n{CALL}"):
            assert read_command(f"```python\n{reply}\n```", CARD)[:2] == (CHAD, 1)
    from pathlib import Path

    assert not Path(marker).exists()


@pytest.mark.clock
@pytest.mark.parametrize(
    "flood",
    [
        "execution = tool.execute(" * 20_000,
        f"{CALL[:-1]}\n" * 10_000,
        "```" * 100_000,
        "(" * 500_000,
        "conclusion:" * 50_000,
        "<answer>" * 50_000,
    ],
)
def test_a_flood_takes_no_time(flood: str) -> None:
    started = time.process_time()
    with pytest.raises(ValueError):
        read_command(flood, CARD)
    assert read_verdict(flood) == (None, ())
    assert final_answer(flood)
    parse_action(flood, ("Wiki",))
    assert time.process_time() - started < 1.5
