"""Formats whose calls have their arguments as one value, most of them JSON, between marks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from flowtrain.agents.chat.tool_formats.contract import (
    MAX_CALLS,
    Read,
    Schemas,
    ToolFormat,
    WrittenCall,
    broken,
    called,
)
from flowtrain.agents.chat.tool_formats.values import (
    Decoded,
    decode_gemma,
    decode_json,
    decode_python,
    skip,
)

_NAMES, _ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")
_THOUGHT = re.compile(r"<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>|\Z)", re.DOTALL)
_FRAME = re.compile(
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?(?:<\|message\|>|\Z)|<\|end\|>|<\|start\|>\w+\Z"
)


def _tagged(
    name: str,
    opening: str,
    closing: str,
    each: Callable[[WrittenCall, int], str],
    around: tuple[str, str, str] = ("", "\n", ""),
    *,
    bare: str = "(?!)",
    decode: Callable[..., Decoded] = decode_json,
    content: Callable[[str], str] = str,
    example: str = "{...}",
) -> ToolFormat:
    """Make a format.

    Args:
        opening: the pattern before a value; `name` in it is the name of the tool, where that does
            not stand in the value.
        closing: the mark behind a value, which the last one may lack, as where it was cut.
        each: writes a call, whose number is given.
        around: what is written before, between and after calls.
        bare: how a response begins that has calls without marks, and nothing else.
        content: makes of the text before calls what the model has said.
    """
    opens, is_bare = re.compile(opening), re.compile(rf"\s*{bare}")
    has_name = "name" in opens.groupindex

    def read(text: str, schemas: Schemas) -> Read:
        calls: list[WrittenCall] = []
        match = opens.search(text)
        if is_bare.match(text):
            new_calls, place = values(text, 0, None)
            calls += new_calls
            said, match = "", opens.search(text, place)
        else:
            said = text[: match.start()] if match else text
        while match and len(calls) <= MAX_CALLS:
            new_calls, place = values(text, match.end(), match["name"] if has_name else None)
            calls += new_calls
            match = opens.search(text, place)
        return content(said), calls

    def values(text: str, place: int, tool: str | None) -> tuple[list[WrittenCall], int]:
        """Read the calls from a place to the next mark; return the place behind them, too."""
        calls: list[WrittenCall] = []
        while len(calls) <= MAX_CALLS:
            value, end, problem = decode(text, place)
            behind = skip(text, end, " \t\r\n;,")
            is_last = behind == len(text) or bool(opens.match(text, behind))
            if closing and text.startswith(closing, behind):
                is_last, behind = True, behind + len(closing)
            if not problem and not is_last and text[behind] not in "{[":
                problem = f"something other than {closing or 'a call'} follows the value"
            if problem:
                closed = text.find(closing, place) if closing else -1
                end = closed if closed >= 0 else len(text)
                return [*calls, broken(text[place:end], problem)], end
            calls += _calls_of(tool, value, text[place:end])
            if is_last:
                return calls, behind
            place = behind
        return calls, place

    def write(calls: Sequence[WrittenCall]) -> str:
        before, between, after = around
        return before + between.join(each(call, n) for n, call in enumerate(calls)) + after

    return ToolFormat(name, read, write, WrittenCall("NAME", example))


def _calls_of(name: str | None, value: Any, raw: str) -> list[WrittenCall]:
    """Read a value: the arguments of a call whose name is known, or a call, or a list of calls."""
    if name:
        return [called(name.strip(), _object(value), raw)]
    values = value if isinstance(value, list) else [value]
    return [_call_of(value, raw) for value in values] or [broken(raw, "no call")]


def _call_of(value: Any, raw: str) -> WrittenCall:
    if not isinstance(value, dict):
        return broken(raw, 'a call is a JSON object with "name" and "arguments"')
    name = next((value[key] for key in _NAMES if key in value), None)
    arguments = next((value[key] for key in _ARGUMENTS if key in value), None)
    if name is None and arguments is None and len(value) == 1:  # Apertus: {"find": {...}}
        ((name, arguments),) = value.items()
    if not isinstance(name, str):
        return broken(raw, 'a call is a JSON object with "name" and "arguments"')
    if arguments is None:
        return broken(raw, 'the call has no "arguments"')
    return called(name, _object(arguments), raw)


def _object(value: Any) -> Any:
    """Return arguments, which Granite 4 and others write as a text that holds them."""
    if not isinstance(value, str):
        return value
    arguments, end, _ = decode_json(value)
    return arguments if skip(value, end) == len(value) else None


def _of_channels(text: str) -> str:
    """Return what gpt-oss has said, its thoughts in the usual tags."""
    thoughts = "".join(match[1] for match in _THOUGHT.finditer(text))
    said = _FRAME.sub("", _THOUGHT.sub("", text)).removesuffix("<|return|>")
    return f"<think>\n{thoughts}\n</think>\n\n{said}" if thoughts else said


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _named(
    before: str = "", after: str = "", name: str = "name", arguments: str = "arguments"
) -> Callable[[WrittenCall, int], str]:
    """Return a writer of calls as objects with these keys."""
    return lambda call, _: (
        f'{before}{{"{name}": {_json(call.name)}, "{arguments}": {call.arguments}}}{after}'
    )


def _python(call: WrittenCall, _: int) -> str:
    arguments = ", ".join(f"{key}={_json(value)}" for key, value in call.values.items())
    return f"{call.name}({arguments})"


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_gemma(item)}' for key, item in value.items())}}}"
    return f"[{','.join(map(_gemma, value))}]" if isinstance(value, list) else _json(value)


_OBJECT = r'\{\s*"(?:name|type|function|parameters|arguments)"'
_ONE = '{"ARGUMENT": "..."}'


def _listed(
    name: str, begin: str, end: str, each: Callable[[WrittenCall, int], str] | None = None
) -> ToolFormat:
    """Make a format of one list of calls."""
    around = (f"{begin}[", ", ", f"]{end}")
    return _tagged(name, re.escape(begin), end, each or _named(), around)


def _after_name(
    name: str,
    parts: tuple[str, str, str],
    around: tuple[str, str, str] = ("", "\n", ""),
) -> ToolFormat:
    """Make a format of calls whose name stands before the arguments; `parts` are what is written
    before the name, between the two, and behind.
    """
    before, middle, after = parts
    begin, between = re.escape(before), re.escape(middle)
    section = re.escape(around[0]) or "(?!)"
    return _tagged(
        name,
        rf'(?:{section}\s*)?{begin}(?P<name>[^<>"\n]*)(?:{between}|\Z)|{section}|{begin}',
        after.lstrip(),
        lambda call, _: f"{before}{call.name}{middle}{call.arguments}{after}",
        around,
    )


TAGGED = (
    _tagged("hermes", "<tool_call>", "</tool_call>", _named("<tool_call>\n", "\n</tool_call>")),
    _tagged(
        "llama3",
        r"<\|python_tag\|>",
        "",
        _named(arguments="parameters"),
        ("", "; ", ""),
        bare=_OBJECT,
    ),
    _tagged(
        "mistral",
        r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[\]{}]*)\s*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?",
        "",
        _named(),
        ("[TOOL_CALLS] [", ", ", "]"),
    ),
    _after_name("xml", ('<tool name="', '">', "</tool>")),
    _listed("tool_calls", "<tool_calls>", "</tool_calls>"),
    _listed("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    _listed("granite", "<|tool_call|>", ""),
    _listed(
        "cohere",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        _named(name="tool_name", arguments="parameters"),
    ),
    _listed(
        "apertus",
        "<|tools_prefix|>",
        "<|tools_suffix|>",
        lambda call, _: f"{{{_json(call.name)}: {call.arguments}}}",
    ),
    _tagged(
        "internlm2",
        r"<\|action_start\|>(?:<\|plugin\|>)?",
        "<|action_end|>",
        _named("<|action_start|><|plugin|>\n", "<|action_end|>"),
    ),
    _tagged(
        "gigachat",
        r"<\|function_call\|>|<\|message_sep\|>\n\nfunction call<\|role_sep\|>\n",
        "",
        _named("<|function_call|>"),
    ),
    _after_name("functionary", ("<function=", ">", "</function>")),
    _after_name(
        "deepseek_v3",
        (
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
        ),
        ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    ),
    _after_name(
        "deepseek_v31",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    ),
    _tagged(
        "kimi_k2",
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>(?:functions\.)?"
        r"(?P<name>[^<:]*)(?::\d*)?(?:<\|tool_call_argument_begin\|>|\Z)"
        r"|<\|tool_calls_section_begin\|>|<\|tool_call_begin\|>",
        "<|tool_call_end|>",
        lambda call, number: (
            f"<|tool_call_begin|>functions.{call.name}:{number}"
            f"<|tool_call_argument_begin|>{call.arguments}<|tool_call_end|>"
        ),
        ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    ),
    _tagged(
        "harmony",
        r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? to=(?:functions\.)?(?P<name>[\w.-]*+)"
        r"(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\w*(?:<\|message\|>|\Z)",
        "<|call|>",
        lambda call, _: (
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
            f"{call.arguments}<|call|>"
        ),
        ("", "<|start|>assistant", ""),
        content=_of_channels,
    ),
    _tagged(
        "gemma4",
        r"<\|tool_call>(?:call:|\Z)(?P<name>[^{}<>]*)",
        "<tool_call|>",
        lambda call, _: f"<|tool_call>call:{call.name}{_gemma(call.values)}<tool_call|>",
        ("", "", ""),
        decode=decode_gemma,
        example=_ONE,
    ),
    _tagged(
        "pythonic",
        r"<\|tool_call_start\|>",
        "<|tool_call_end|>",
        _python,
        ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
        bare=r"\[\s*[A-Za-z_][\w.-]*\(",
        decode=decode_python,
        example=_ONE,
    ),
)
JSON = _tagged("json", "(?!)", "", _named(), bare=rf"(?:\[\s*)?{_OBJECT}")
"""Nothing but an object, or a list of them; last of all, as others begin so, too."""
