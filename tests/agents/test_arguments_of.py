"""What the executor by rules makes of a sub-goal."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.agents.agentflow.executor import arguments_of
from flowtrain.tools import Parameter, ToolCard, schema_of

ONE = ToolCard("One", "", schema_of(Parameter("country", "")))
TEXT_AND_MORE = ToolCard(
    "More", "", schema_of(Parameter("q", ""), Parameter("limit", "", int, False))
)
TWO = ToolCard("Two", "", schema_of(Parameter("path", ""), Parameter("text", "")))
LIST = ToolCard("List", "", schema_of(Parameter("numbers", "", list)))
NONE = ToolCard("None", "", schema_of())
OPTIONAL = ToolCard(
    "Optional", "", schema_of(Parameter("n", "", int, False), Parameter("q", "", str, False))
)


@pytest.mark.parametrize(
    ("card", "sub_goal", "arguments"),
    [
        (ONE, "Chad", {"country": "Chad"}),
        (ONE, '{"country": "Chad"}', {"country": '{"country": "Chad"}'}),
        (TEXT_AND_MORE, "Chad", {"q": "Chad"}),
        (TEXT_AND_MORE, '{"q": "Chad", "limit": 3}', {"q": "Chad", "limit": 3}),
        (TEXT_AND_MORE, '{"a": 1}', {"q": '{"a": 1}'}),
        (TWO, '{"path": "a", "text": "b"}', {"path": "a", "text": "b"}),
        (TWO, '{"pat": "a"}', {"pat": "a"}),
        (TWO, "a.txt", {"path": "a.txt"}),
        (LIST, '{"numbers": [1, 2.5]}', {"numbers": [1, 2.5]}),
        (LIST, "[1]", {"query": "[1]"}),
        (LIST, '{"numbers": [NaN]}', {"query": '{"numbers": [NaN]}'}),
        (NONE, "{}", {}),
        (NONE, "now", {"query": "now"}),
        (OPTIONAL, "x", {"q": "x"}),
        (TWO, '{"path": "\\ud800", "text": ""}', {"path": "?", "text": ""}),
        (TWO, "[" * 100_000, {"path": "[" * 100_000}),
    ],
)
def test_what_a_sub_goal_becomes(
    card: ToolCard, sub_goal: str, arguments: dict[str, object]
) -> None:
    assert arguments_of(card, sub_goal) == arguments


@given(st.dictionaries(st.sampled_from(["path", "text"]), st.text(st.characters(codec="utf-8"))))
def test_arguments_written_as_json_come_through(arguments: dict[str, object]) -> None:
    assert arguments_of(TWO, json.dumps(arguments)) == arguments
