"""Formats whose calls have their arguments as one value, most of them JSON, between marks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from flowtrain.agents.chat.tool_formats.contract import (
    MAX_CALLS,
    Schemas,
    ToolFormat,
    WrittenCall,
    broken,
    called,
    make_format,
    name_in,
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
    written: Callable[[WrittenCall, int], str],
    opening: str,
    closing: str = "",
    around: tuple[str, str, str] = ("", "\n", ""),
    *,
    decode: Callable[..., Decoded] = decode_json,
    example: str = "{...}",
    **options: Any,
) -> ToolFormat:
    """Make a format whose `opening` stands before a value, and `closing` behind it; the last value
    may lack that, as where it was cut.
    """
    opens = re.compile(opening)

    def calls_at(text: str, match: re.Match[str], _: Schemas) -> tuple[list[WrittenCall], int]:
        tool, place, calls = name_in(match), match.end(), list[WrittenCall]()
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
            place = behind
            if is_last:
                break
        return calls, place

    return make_format(name, opening, calls_at, written, around, example=example, **options)


def _calls_of(name: str, value: Any, raw: str) -> list[WrittenCall]:
    """Read a value: the arguments of a call whose name is known, or a call, or a list of calls."""
    if name:
        return [called(name, _object(value), raw)]
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
    before: str = "", after: str = "", kind: str = "", key: str = "arguments"
) -> Callable[[WrittenCall, int], str]:
    """Return a writer of calls as objects; `kind` stands before the word "name"."""
    return lambda call, _: (
        f'{before}{{"{kind}name": {_json(call.name)}, "{key}": {call.arguments}}}{after}'
    )


def _apertus(call: WrittenCall, _: int) -> str:
    return f"{{{_json(call.name)}: {call.arguments}}}"


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
_LLAMA = _named(key="parameters")


def _listed(
    name: str, begin: str, end: str, each: Callable[[WrittenCall, int], str] | None = None
) -> ToolFormat:
    """Make a format of one list of calls."""
    around = (f"{begin}[", ", ", f"]{end}")
    return _tagged(name, each or _named(), re.escape(begin), end, around)


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
        lambda call, _: f"{before}{call.name}{middle}{call.arguments}{after}",
        rf'(?:{section}\s*)?{begin}(?P<name>[^<>"\n]*)(?:{between}|\Z)|{section}|{begin}',
        after.lstrip(),
        around,
    )


TAGGED = (
    _tagged("hermes", _named("<tool_call>\n", "\n</tool_call>"), "<tool_call>", "</tool_call>"),
    _tagged("llama3", _LLAMA, r"<\|python_tag\|>", "", ("", "; ", ""), bare=_OBJECT),
    _tagged(
        "mistral",
        _named(),
        r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[\]{}]*)\s*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?",
        around=("[TOOL_CALLS] [", ", ", "]"),
    ),
    _after_name("xml", ('<tool name="', '">', "</tool>")),
    _listed("tool_calls", "<tool_calls>", "</tool_calls>"),
    _listed("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    _listed("granite", "<|tool_call|>", ""),
    _listed("cohere", "<|START_ACTION|>", "<|END_ACTION|>", _named("", "", "tool_", "parameters")),
    _listed("apertus", "<|tools_prefix|>", "<|tools_suffix|>", _apertus),
    _tagged(
        "gigachat",
        _named("<|function_call|>"),
        r"<\|function_call\|>|<\|message_sep\|>\n\nfunction call<\|role_sep\|>\n",
    ),
    _after_name("functionary", ("<function=", ">", "</function>")),
    _after_name(
        "deepseek_v3",
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
        ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    ),
    _after_name(
        "deepseek_v31",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    ),
    _tagged(
        "kimi_k2",
        lambda call, number: (
            f"<|tool_call_begin|>functions.{call.name}:{number}"
            f"<|tool_call_argument_begin|>{call.arguments}<|tool_call_end|>"
        ),
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>(?:functions\.)?"
        r"(?P<name>[^<:]*)(?::\d*)?(?:<\|tool_call_argument_begin\|>|\Z)"
        r"|<\|tool_calls_section_begin\|>|<\|tool_call_begin\|>",
        "<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    ),
    _tagged(
        "harmony",
        lambda call, _: (
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
            f"{call.arguments}<|call|>"
        ),
        r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? to=(?:functions\.)?(?P<name>[\w.-]*+)"
        r"(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\w*(?:<\|message\|>|\Z)",
        "<|call|>",
        ("", "<|start|>assistant", ""),
        content=_of_channels,
    ),
    _tagged(
        "gemma4",
        lambda call, _: f"<|tool_call>call:{call.name}{_gemma(call.values)}<tool_call|>",
        r"<\|tool_call>(?:call:|\Z)(?P<name>[^{}<>]*)",
        "<tool_call|>",
        ("", "", ""),
        decode=decode_gemma,
        example=_ONE,
    ),
    _tagged(
        "pythonic",
        _python,
        r"<\|tool_call_start\|>",
        "<|tool_call_end|>",
        ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
        bare=r"\[\s*[A-Za-z_][\w.-]*\(",
        decode=decode_python,
        example=_ONE,
    ),
)
JSON = _tagged("json", _named(), "(?!)", bare=rf"(?:\[\s*)?{_OBJECT}")
"""Nothing but an object, or a list of them; last of all, as others begin so, too."""
