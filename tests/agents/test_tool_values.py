"""Arguments that stand one by one, without quotes: the schema of the tool tells their types."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowtrain.agents.chat.tool_formats import FORMATS, WrittenCall

ANY_OF = {"anyOf": [{"type": "integer"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("written", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5", {}, 5),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("12", ANY_OF, 12),
        ("null", ANY_OF, None),
        ("12 km", ANY_OF, "12 km"),
        ("True", {"type": "boolean"}, True),
        ("True", {}, "True"),
        ("{'a': [1, None]}", {"type": "object"}, {"a": [1, None]}),
        ('{"a": "5"}', {"type": "object"}, {"a": "5"}),
        ("[1", {"type": "array"}, "[1"),
        ('"5"', {"type": "string"}, '"5"'),
        ('"5"', {"type": ["string", "integer"]}, '"5"'),
        ("Chad", {"type": 3, "anyOf": {"type": "x"}, "enum": "y"}, "Chad"),
        ("NaN", {}, "NaN"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax_m2"])
def test_the_schema_of_the_tool_tells_what_a_value_is(
    name: str, written: str, schema: Any, value: Any
) -> None:
    form = FORMATS[name]
    text = form.shape.replace("NAME", "f").replace("ARGUMENT", "x").replace("...", written)
    tool = {"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    (call,) = form.parse(text, [tool])[1]
    assert json.dumps(call.values) == json.dumps({"x": value})


def test_a_tool_without_a_schema_gets_what_is_json_as_json() -> None:
    form = FORMATS["qwen3_coder"]
    text = form.write([WrittenCall("f", '{"x": 5, "y": "Chad"}')])
    for tools in (
        [],
        [{"function": {"name": "f"}}],
        [{"function": {"name": "f", "parameters": []}}],
    ):
        assert form.parse(text, tools)[1][0].values == {"x": 5, "y": "Chad"}
