"""How models write tool calls: parse them out of a response, write them, tell a model how.

The formats are those that vLLM's parsers of the same names read. A call that cannot be read stays
a call, with the problem instead of arguments, so that the model can be told about it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from flowtrain.inference.token_chat import TEMPLATE_ERRORS, render_template
from flowtrain.utils.text import THINK_END, encodable

_PYTHON_TAG = "<|python_tag|>"
MAX_CALLS = 16
"""Calls of one response that are read; a response with more is malformed."""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call of a tool as a response writes it."""

    name: str
    """"" where it could not be read."""
    arguments: str
    """A JSON object; the text of the call where that could not be read."""
    problem: str = ""
    """Why it could not be read, for the model; else ""."""

    @property
    def values(self) -> dict[str, Any]:
        """Return the arguments of a call without a problem."""
        return dict(json.loads(self.arguments))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write tool calls."""

    name: str
    shape: str
    """A call as the model is shown it."""
    read: Callable[[str], tuple[str, list[WrittenCall]]]
    """Split a response into the text before the calls, and the calls."""
    write: Callable[[Sequence[WrittenCall]], str]

    def parse(self, text: str) -> tuple[str, tuple[WrittenCall, ...]]:
        """Return the text without calls, thinking included, and the calls; never raises."""
        thinking, end, reply = text.rpartition(THINK_END)
        if not end and "<think>" in text:  # it was cut while it thought
            return text, ()
        content, calls = self.read(reply)
        if len(calls) > MAX_CALLS:
            calls = [_broken(reply, f"more than {MAX_CALLS} calls in one response")]
        return thinking + end + content, tuple(calls)

    def describe(self, tools: Iterable[Mapping[str, Any]]) -> str:
        """Describe tools, given as OpenAI's chat completions have them, and how to call them."""
        lines = [f"- {json.dumps(tool['function'], ensure_ascii=False)}" for tool in tools]
        return "\n".join(
            [
                "You can call tools. The arguments of each are described as a JSON schema:",
                *lines,
                f"To call one, write nothing but this, and wait for the result:\n{self.shape}",
                "Give your answer without a call.",
            ]
        )


def format_of(chat_template: str, tokens: Mapping[str, str] = MappingProxyType({})) -> str:
    """Name the format that reads what a chat template writes: one call of a tool, and two where it
    takes two; "": none of ours does.

    Args:
        tokens: the special tokens that the template writes, by name, such as bos_token.
    """
    calls = [_probe(0), _probe(1)]
    try:
        replies = [(calls[:1], _rendered(chat_template, calls[:1], tokens))]
    except TEMPLATE_ERRORS:
        return ""
    with suppress(*TEMPLATE_ERRORS):  # some take one call at a time, and say so in their own way
        replies.append((calls, _rendered(chat_template, calls, tokens)))
    for name, form in FORMATS.items():
        if name != "json" and all(
            form.parse(reply)[1] == tuple(probes) for probes, reply in replies
        ):
            return name
    return ""


def _probe(number: int) -> WrittenCall:
    values = {"city": 'The "Hague"', "numbers": [number, 2], "more": {"is_new": True}}
    return WrittenCall(f"find_{number}", json.dumps(values))


def _rendered(chat_template: str, calls: Sequence[WrittenCall], tokens: Mapping[str, str]) -> str:
    """Return a reply of these calls as the template writes it, without the message's end."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": call.name,
                "description": "Finds.",
                "parameters": {"type": "object", "properties": {}},
            },
        }
        for call in calls
    ]
    tool_calls = [
        {
            "id": f"{number:09}",  # strict templates want nine letters or digits
            "type": "function",
            "function": {"name": call.name, "arguments": call.values},
        }
        for number, call in enumerate(calls)
    ]
    user, mark = {"role": "user", "content": "Find."}, "pQ7xZ"
    replies = (
        {"role": "assistant", "content": "", "tool_calls": tool_calls},
        {"role": "assistant", "content": mark},
    )
    whole, plain = (
        render_template(chat_template, [user, reply], tools, tokens) for reply in replies
    )
    # A prompt may describe calls in the same words, and the reply begins behind it.
    pairs = enumerate(zip(whole, plain, strict=False))
    begins = next((place for place, (char, plain_char) in pairs if char != plain_char), len(whole))
    return whole[begins:].removesuffix(plain.rpartition(mark)[2])


# ---- readers


def _read_hermes(text: str) -> tuple[str, list[WrittenCall]]:
    return _read_tags(text, re.compile(r"<tool_call>"), "</tool_call>", _named)


def _read_xml(text: str) -> tuple[str, list[WrittenCall]]:
    opening = re.compile(r'<tool name="([^"<>]*)">')
    return _read_tags(
        text, opening, "</tool>", lambda match, value, raw: _call(match[1], value, raw)
    )


def _read_tags(
    text: str,
    opening: re.Pattern[str],
    closing: str,
    call: Callable[[re.Match[str], Any, str], WrittenCall],
) -> tuple[str, list[WrittenCall]]:
    """Read calls between tags; the last closing tag may be missing, as where it was cut."""
    match = opening.search(text)
    content = text[: match.start()] if match else text
    calls: list[WrittenCall] = []
    while match and len(calls) <= MAX_CALLS:
        start = match.end()
        value, end, problem = _decode(text, start)
        next_place = _skip(text, end)
        if not problem and next_place < len(text) and not text.startswith(closing, next_place):
            problem = f"something other than {closing} follows the JSON object"
        if problem:
            closed = text.find(closing, start)
            end = len(text) if closed < 0 else closed
            calls.append(_broken(text[start:end], problem))
        else:
            calls.append(call(match, value, text[start:end]))
        match = opening.search(text, end)
    return content, calls


def _read_llama3(text: str) -> tuple[str, list[WrittenCall]]:
    content, calls = _read_objects(text, text.strip())
    if calls:
        return content, calls
    content, tag, body = text.partition(_PYTHON_TAG)
    return (content, _objects(body.strip())) if tag else (text, [])


def _read_json(text: str) -> tuple[str, list[WrittenCall]]:
    content, calls = _read_objects(text, text.strip())
    if len(calls) > 1:
        return content, [_broken(text, "more than one JSON object")]
    return content, calls


def _read_objects(text: str, body: str) -> tuple[str, list[WrittenCall]]:
    """Read a response that is nothing but calls; any other text, JSON included, is an answer."""
    if not re.match(r'\{\s*"(name|type|function|parameters|arguments)"', body):
        return text, []
    return "", _objects(body)


def _objects(body: str) -> list[WrittenCall]:
    """Read JSON objects one after the other, with nothing but ";" or Llama's tag between them."""
    calls: list[WrittenCall] = []
    place = 0
    while (place < len(body) or not calls) and len(calls) <= MAX_CALLS:
        value, end, problem = _decode(body, place)
        if problem:
            return [*calls, _broken(body[place:], problem)]
        calls.append(_named(None, value, body[place:end]))
        place = _skip(body, end, " \t\r\n;")
        while body.startswith(_PYTHON_TAG, place):
            place = _skip(body, place + len(_PYTHON_TAG))
    return calls


def _read_mistral(text: str) -> tuple[str, list[WrittenCall]]:
    content, tag, _ = text.partition("[TOOL_CALLS]")
    calls: list[WrittenCall] = []
    place = len(content)
    while tag and text.startswith(tag, place) and len(calls) <= MAX_CALLS:
        place += len(tag)
        new_calls, end = _mistral_calls(text, place)
        calls += new_calls
        place = len(text) if end < 0 else _skip(text, end)
        if (
            new_calls
            and not new_calls[-1].problem
            and place < len(text)
            and not text.startswith(tag, place)
        ):
            calls.append(_broken(text[place:], "text after a call"))
    return content, calls


def _mistral_calls(text: str, place: int) -> tuple[list[WrittenCall], int]:
    """Read a list of calls, or the name and the arguments of one; return the end, -1 if broken."""
    name = re.compile(r"\s*([^\s\[\]{}]*)\s*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?").match(
        text, place
    )
    assert name is not None, "it matches any text"
    value, end, problem = _decode(text, name.end())
    if problem:
        return [_broken(text[place:], problem)], -1
    raw = text[name.end() : end]
    if name[1]:
        return [_call(name[1], value, raw)], end
    values = value if isinstance(value, list) else [value]
    return [_named(None, item, raw) for item in values] or [_broken(raw, "no call")], end


class _Decoded(NamedTuple):
    """A JSON value in a text."""

    value: Any
    end: int
    """The place behind it."""
    problem: str = ""
    """Why there is none, for the model."""


def _decode(text: str, place: int) -> _Decoded:
    """Decode the JSON value at a place."""
    place = _skip(text, place)
    try:
        value, end = _JSON.raw_decode(text, place)
    except (ValueError, RecursionError) as error:
        return _Decoded(None, place, f"no valid JSON: {error}")
    return _Decoded(value, end)


def _skip(text: str, place: int, letters: str = " \t\r\n") -> int:
    """Return the first place from this one on that has none of the letters."""
    while place < len(text) and text[place] in letters:
        place += 1
    return place


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_no_constant)


def _named(match: object, value: Any, raw: str) -> WrittenCall:
    """Read an object with a name and arguments; Llama calls these parameters."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _broken(raw, 'a call is a JSON object with "name" and "arguments"')
    key = "arguments" if "arguments" in value else "parameters"
    if key not in value:
        return _broken(raw, 'the call has no "arguments"')
    return _call(value["name"], value[key], raw)


def _call(name: str, arguments: Any, raw: str) -> WrittenCall:
    if isinstance(arguments, str):  # Granite 4 writes the object as a text
        arguments, end, _ = _decode(text := arguments, 0)
        arguments = arguments if _skip(text, end) == len(text) else None
    if not isinstance(arguments, dict):
        return _broken(raw, "the arguments are no JSON object")
    # JSON can spell half a surrogate pair, which no tokenizer takes.
    return WrittenCall(encodable(name), encodable(json.dumps(arguments, ensure_ascii=False)))


def _broken(raw: str, problem: str) -> WrittenCall:
    return WrittenCall("", encodable(raw), encodable(problem))


# ---- writers


def _object(call: WrittenCall, key: str = "arguments") -> str:
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{key}": {call.arguments}}}'


def _write_hermes(calls: Sequence[WrittenCall]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)


def _write_llama3(calls: Sequence[WrittenCall]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def _write_mistral(calls: Sequence[WrittenCall]) -> str:
    return f"[TOOL_CALLS] [{', '.join(map(_object, calls))}]"


def _write_xml(calls: Sequence[WrittenCall]) -> str:
    return "\n".join(f'<tool name="{call.name}">{call.arguments}</tool>' for call in calls)


def _write_json(calls: Sequence[WrittenCall]) -> str:
    assert len(calls) == 1, "this format has one call in a response"
    return _object(calls[0])


_SHAPE = '{"name": "NAME", "arguments": {...}}'
FORMATS = {
    tool_format.name: tool_format
    for tool_format in (
        ToolFormat(
            "hermes", f"<tool_call>\n{_SHAPE}\n</tool_call>", _read_hermes, write=_write_hermes
        ),
        ToolFormat(
            "llama3", '{"name": "NAME", "parameters": {...}}', _read_llama3, write=_write_llama3
        ),
        ToolFormat("mistral", f"[TOOL_CALLS] [{_SHAPE}]", _read_mistral, write=_write_mistral),
        ToolFormat("xml", '<tool name="NAME">{...}</tool>', _read_xml, write=_write_xml),
        ToolFormat("json", _SHAPE, _read_json, write=_write_json),
    )
}
"""The formats by name."""
