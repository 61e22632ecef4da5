"""Formats whose calls have each argument between marks of its own.

A text stands there as it is, so that "5" and 5 look alike. The schema of the tool tells them apart;
where it says nothing, what is JSON is read as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from flowtrain.agents.chat.tool_formats.contract import (
    Schemas,
    ToolFormat,
    WrittenCall,
    broken,
    called,
    make_format,
    name_in,
)
from flowtrain.agents.chat.tool_formats.values import TYPES, decode_json, decode_python, skip


def _keyed(
    name: str,
    opening: str,
    argument: str,
    ends: tuple[str, str],
    forms: tuple[str, str, str],
    around: tuple[str, str, str] = ("", "\n", ""),
    pad: str = "",
) -> ToolFormat:
    """Make a format.

    Args:
        opening: the pattern before the arguments, with the `name` of the tool in it; or else that
            of the marks alone by which a call begins.
        argument: the pattern before a value, with its `key`, and `kind` where that is written.
        ends: the patterns behind a value and behind the last one.
        forms: how the beginning of a call, an argument and the end of a call are written.
        around: what is written before, between and after calls.
        pad: what stands on either side of a value, and is no part of it.
    """
    takes, closes = re.compile(argument), re.compile(ends[1])
    # Marks in a value are text, unless what comes next could stand behind a value.
    ends_value = re.compile(rf"{ends[0]}(?=\s*(?:{argument}|{ends[1]}|\Z))")

    def call_at(text: str, match: re.Match[str], schemas: Schemas) -> tuple[list[WrittenCall], int]:
        tool, place = name_in(match), match.end()
        schema = schemas.get(tool)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        values: dict[str, Any] = {}
        while begun := takes.match(text, skip(text, place)):
            ended = ends_value.search(text, begun.end())
            if ended is None:
                break
            raw = text[begun.end() : ended.start()].removeprefix(pad).removesuffix(pad)
            known = properties.get(begun["key"]) if isinstance(properties, Mapping) else None
            values[begun["key"]] = _value(raw, begun.groupdict().get("kind"), known)
            place = ended.end()
        place = skip(text, place)
        if closed := closes.match(text, place):
            return [called(tool, values, text[match.start() : closed.end()])], closed.end()
        following = closes.search(text, place)
        end = following.end() if following else len(text)
        problem = "the call has no end" if following is None else "the arguments are malformed"
        return [broken(text[match.start() : end], problem)], end

    def written(call: WrittenCall, _: int) -> str:
        begin, each, end = forms
        pieces = [begin.format(name=call.name)]
        for key, value in call.values.items():
            is_text = isinstance(value, str)
            shown = value if is_text else json.dumps(value, ensure_ascii=False)
            pieces.append(each.format(key=key, kind=str(is_text).lower(), value=shown))
        return "".join([*pieces, end])

    return make_format(name, opening, call_at, written, around)


def _value(raw: str, kind: str | None, schema: Any) -> Any:
    """Read an argument by the kind that stands there, or else by its schema."""
    types = {"string"} if kind == "true" else set() if kind else _types(schema)
    if types == {"string"}:
        return raw
    for decode in (decode_json, decode_python):  # Seed's template writes objects as Python does
        value, end, problem = decode(raw)
        is_whole = not problem and skip(raw, end) == len(raw)
        if is_whole and (not types or _type_of(value) in types - {"string"}):
            return value
        if not types - {"string"}:
            break  # without a type, words such as True are text
    return raw


def _types(schema: Any) -> set[str]:
    """Return the JSON types that a schema takes; none where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    names = {name for name in _list(named) or [named] if isinstance(name, str)}
    types = {"number" if name == "integer" else name for name in names}
    for key in ("anyOf", "oneOf"):
        types = types.union(*map(_types, _list(schema.get(key))))
    return types.union(map(_type_of, _list(schema.get("enum"))))


def _type_of(value: Any) -> str:
    return TYPES[type(value)].replace("integer", "number")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _invoked(name: str, prefix: str, wrapper: str, attribute: str = "") -> ToolFormat:
    """Make a format of <invoke name="..."> and <parameter name="...">, whose tags have a prefix."""
    return _keyed(
        name,
        r"(?: to=[^<>\s]{0,100}<\|message\|>)?(?:<[\w:｜]{1,30}_calls?>\s*)?"
        rf'<{prefix}invoke name="(?P<name>[^"<>]*)">|<{prefix}invoke|<{wrapper}>',
        rf'<{prefix}parameter name="(?P<key>[^"<>]*)"(?: string="(?P<kind>\w*)")?>',
        (f"</{prefix}parameter>", f"</{prefix}invoke>"),
        (
            f'<{prefix}invoke name="{{name}}">\n',
            f'<{prefix}parameter name="{{key}}"{attribute}>{{value}}</{prefix}parameter>\n',
            f"</{prefix}invoke>",
        ),
        (f"<{wrapper}>\n", "\n", f"\n</{wrapper}>"),
    )


def _function(name: str, tag: str, pad: str) -> ToolFormat:
    """Make a format of <function=...> and <parameter=...>."""
    return _keyed(
        name,
        rf"(?:<{tag}>\s*)?<function=(?P<name>[^<>]*)>|<{tag}>|<function=",
        r"<parameter=(?P<key>[^<>]*)>",
        ("</parameter>", rf"</function>(?:\s*</{tag}>)?"),
        (
            f"<{tag}>\n<function={{name}}>\n",
            f"<parameter={{key}}>{pad}{{value}}{pad}</parameter>\n",
            f"</function>\n</{tag}>",
        ),
        pad=pad,
    )


KEYED = (
    _function("qwen3_coder", "tool_call", "\n"),
    _function("seed_oss", "seed:tool_call", ""),
    _keyed(
        "glm",
        r"(?:<tool_calls(?::\w+)?>\s*)?<tool_call(?::\w+)?>(?P<name>[^<>]*)"
        r"(?:<tool_sep(?::\w+)?>)?",
        r"<arg_key(?::\w+)?>(?P<key>[^<>]*)</arg_key(?::\w+)?>\s*<arg_value(?::\w+)?>",
        (r"</arg_value(?::\w+)?>", r"</tool_call(?::\w+)?>"),
        (
            "<tool_call>{name}\n",
            "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
            "</tool_call>",
        ),
    ),
    _invoked("minimax_m2", "", "minimax:tool_call"),
    _invoked("deepseek_v32", "｜DSML｜", "｜DSML｜tool_calls", ' string="{kind}"'),
    _invoked("muse", "atem:", "atem:function_calls"),
)
