"""Arguments against the schema of a stranger."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.tools import Parameter, ToolCard
from flowtrain.tools.json_schema import check_schema, problem

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}
BOMB: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/l30"}},
    "$defs": {
        "l0": {"type": "integer"},
        **{
            f"l{n}": {"allOf": [{"$ref": f"#/$defs/l{n - 1}"}, {"$ref": f"#/$defs/l{n - 1}"}]}
            for n in range(1, 31)
        },
    },
}
LOOP = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/b"}},
    "$defs": {"b": {"$ref": "#/$defs/b"}},
}
AWAY = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/schema.json"}}}
PATTERNS = {
    "type": "object",
    "patternProperties": {"^(x+)+$": {"type": "integer"}},
    "propertyNames": {"pattern": "^(x+)+$"},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "arguments", "reason"),
    [
        (PERSON, {"name": "a"}, ""),
        (PERSON, {"name": "a", "children": [{"name": "b"}]}, ""),
        (PERSON, {}, "'name' is a required property"),
        (PERSON, {"name": 3}, "['name'] 3 is not of type 'string'"),
        (PERSON, {"name": "a", "children": [{}]}, "['children'][0] 'name' is a required property"),
        (PERSON, {"name": "a", "x": 1}, "Additional properties are not allowed"),
        (PATTERNS, {"x" * 40 + "y": "z"}, ""),
        (BOMB, {"a": 1}, "nested too deep to be checked"),
        (LOOP, {"a": 1}, "nested too deep to be checked"),
        (AWAY, {"a": 1}, "refers to what it does not hold"),
    ],
)
def test_problems(schema: dict[str, Any], arguments: dict[str, object], reason: str) -> None:
    text = json.dumps(schema)
    check_schema(text)
    started = time.monotonic()
    found = problem(text, arguments)
    assert time.monotonic() - started < 5.0
    assert (found == "") == (reason == "") and reason in found and len(found) < 1000


@pytest.mark.parametrize(
    "schema",
    ["[]", '{"type": "string"}', "no json", '{"required": 5}', "[" * 100_000],
)
def test_what_is_no_schema_of_an_object(schema: str) -> None:
    with pytest.raises(ValueError):
        check_schema(schema)


def test_the_check_starts_afresh_each_time() -> None:
    text = json.dumps(PERSON)
    for _ in range(3):
        assert problem(text, {"name": "", "children": [{"name": ""}] * 900}) == ""
    assert problem(text, {"name": "", "children": [{"name": ""}] * 1001}) != ""


values = st.one_of(st.text(), st.integers(), st.booleans(), st.floats(allow_nan=False))


@settings(deadline=None)  # the first example imports jsonschema
@given(st.dictionaries(st.sampled_from(["q", "n", "on", "x"]), values))
def test_a_card_and_its_schema_agree(arguments: dict[str, object]) -> None:
    """But for whole numbers, of which JSON does not say whether they are floats."""
    card = ToolCard(
        "T",
        "",
        (Parameter("q", ""), Parameter("n", "", int), Parameter("on", "", bool, False)),
    )
    schema = {**card.json_schema(), "additionalProperties": False}
    if any(isinstance(value, float) and value.is_integer() for value in arguments.values()):
        return
    assert bool(card.check(arguments)) == bool(problem(json.dumps(schema), arguments))


def test_references_to_other_places_are_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def connect(*address: object, **_: object) -> None:
        asked.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", connect)
    away = {**AWAY, "title": "not cached"}
    assert problem(json.dumps(away), {"a": 1}) and not asked
