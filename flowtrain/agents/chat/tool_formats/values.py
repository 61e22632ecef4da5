"""The values of arguments: JSON, and the literals of Python and Gemma, as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

TYPES: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number"}
TYPES |= {list: "array", dict: "object", type(None): "null"}
"""The types of values in the words of JSON schemas."""


class Decoded(NamedTuple):
    """A value in a text."""

    value: Any
    end: int
    """The place behind it."""
    problem: str = ""
    """Why there is none, for the model."""


def decode_json(text: str, place: int = 0) -> Decoded:
    """Decode the JSON value at a place."""
    place = skip(text, place)
    try:
        value, end = _JSON.raw_decode(text, place)
    except (ValueError, RecursionError) as error:
        return Decoded(None, place, f"no valid JSON: {error}")
    return Decoded(value, end)


def skip(text: str, place: int, letters: str = " \t\r\n") -> int:
    """Return the first place from this one on that has none of the letters."""
    while place < len(text) and text[place] in letters:
        place += 1
    return place


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_no_constant)
_LOOSE_JSON = json.JSONDecoder(parse_constant=_no_constant, strict=False)
_ESCAPE = re.compile(r'\\(.)|"', re.DOTALL)
_WORDS = {"True": "true", "False": "false", "None": "null", ")": "}}"}


def _literals(word: str) -> Callable[..., Decoded]:
    """Make a decoder of literals whose words are these; they become JSON, and nothing is evaluated.

    A value goes up to the next mark, that is up to a "<" outside of its texts.
    """
    pattern = re.compile(word, re.DOTALL)

    def decode(text: str, place: int = 0) -> Decoded:
        words: list[str] = []
        while match := pattern.match(text, place):
            words.append(_as_json(match.groupdict(), match[0]))
            place = match.end()
        try:
            return Decoded(_LOOSE_JSON.decode("".join(words)), place)
        except (ValueError, RecursionError) as error:
            return Decoded(None, place, f"no valid value: {error}")

    return decode


def _as_json(parts: Mapping[str, str | None], word: str) -> str:
    if (text := parts["text"]) is not None:
        quoted = (
            json.dumps(text)[:-1] if "quote" not in parts else '"' + _ESCAPE.sub(_escaped, text)
        )
        return quoted + ('"' if parts["closed"] else "")
    if name := parts.get("called"):
        return f'{{"name": "{name}", "arguments": {{'
    if key := parts["key"]:
        return f'"{key}": '
    return _WORDS.get(word, word)


def _escaped(match: re.Match[str]) -> str:
    """Escape for JSON a letter of a text in Python's quotes."""
    letter = match[1]
    if letter is None or letter == "'":
        return "'" if letter else '\\"'
    return match[0] if letter in '"\\/bfnrtu' else f"\\{match[0]}"


decode_python = _literals(
    r"""(?P<quote>['"])(?P<text>(?:\\.|(?!(?P=quote))[^\\])*)(?P<closed>(?P=quote)?)"""
    r"|(?P<called>[A-Za-z_][\w.-]*)\(|(?P<key>[A-Za-z_]\w*)=|[A-Za-z_][\w.-]*|\)"
    r"""|[^<'"A-Za-z_)]+"""
)
"""Decode a list of calls, [find(city="Bern", numbers=[1, 2])], or a value, {'is_new': True}."""
decode_gemma = _literals(
    r"""<\|"\|>(?P<text>.*?)(?P<closed><\|"\|>|\Z)|(?P<key>[\w.$-]+):|[\w.$-]+|[^<\w.$-]+"""
)
"""Decode an object of Gemma 4: {city:<|"|>Bern<|"|>,numbers:[1,2]}."""
