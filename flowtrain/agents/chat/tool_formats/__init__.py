"""How models write tool calls: parse them out of a response, write them, tell a model how.

A call that cannot be read stays a call, with the problem instead of arguments, so that the model
can be told about it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from flowtrain.agents.chat.tool_formats.contract import MAX_CALLS, ToolFormat, WrittenCall
from flowtrain.agents.chat.tool_formats.keyed import KEYED
from flowtrain.agents.chat.tool_formats.tagged import JSON, TAGGED
from flowtrain.agents.chat.tool_formats.values import TYPES
from flowtrain.inference.token_chat import TEMPLATE_ERRORS, render_template
from flowtrain.utils.text import THINK_END

__all__ = [
    "FORMATS",
    "MAX_CALLS",
    "ToolFormat",
    "WrittenCall",
    "format_of",
    "reads",
    "rendered_reply",
    "tools_of",
]

FORMATS = {each.name: each for each in (*TAGGED, *KEYED, JSON)}
"""The formats by name."""


def format_of(chat_template: str, tokens: Mapping[str, str] = MappingProxyType({})) -> str:
    """Name the format that reads what a chat template writes: one call of a tool, and two where it
    takes two; "": none of ours does.

    Args:
        tokens: the special tokens that the template writes, by name, such as bos_token.
    """
    values = {"city": 'The "Hague"', "code": "5", "lines": "\na\n", "more": {"is": [True]}}
    calls = [WrittenCall(f"find_{n}", json.dumps({**values, "n": n})) for n in range(2)]
    replies: dict[str, Sequence[WrittenCall]] = {}
    with suppress(*TEMPLATE_ERRORS):  # some take one call at a time, and say so in their own way
        for given in (calls[:1], calls):
            replies.setdefault(rendered_reply(chat_template, given, tokens), given)
    for name, form in FORMATS.items():
        if replies and all(reads(form, reply, given) for reply, given in replies.items()):
            return name
    return ""


def reads(form: ToolFormat, reply: str, calls: Sequence[WrittenCall]) -> bool:
    """Return whether a format reads a reply as these calls, and nothing beside."""
    content, found = form.parse(reply, tools_of(calls))
    is_alone = not content.rpartition(THINK_END)[2].strip()
    return is_alone and list(map(_facts, found)) == list(map(_facts, calls))


def _facts(call: WrittenCall) -> tuple[str, str]:
    """Return a call in a form in which 1, 1.0 and true differ, and orders of keys do not."""
    return call.name, "" if call.problem else json.dumps(call.values, sort_keys=True)


def tools_of(calls: Sequence[WrittenCall]) -> list[dict[str, Any]]:
    """Define tools, as OpenAI's chat completions do, that take these calls."""
    tools = []
    for call in calls:
        kinds = {key: TYPES[type(value)] for key, value in call.values.items()}
        fields = {key: {"type": kind, "description": key} for key, kind in kinds.items()}
        schema = {"type": "object", "properties": fields}
        function = {"name": call.name, "description": "Finds.", "parameters": schema}
        tools.append({"type": "function", "function": function})
    return tools


def rendered_reply(
    chat_template: str, calls: Sequence[WrittenCall], tokens: Mapping[str, str], content: str = ""
) -> str:
    """Return a reply of these calls as the template writes it, without the message's end.

    Raises whatever the template does.
    """
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
        {"role": "assistant", "content": content, "tool_calls": tool_calls},
        {"role": "assistant", "content": mark},
    )
    tools = tools_of(calls)
    prompt = render_template(chat_template, [user], tools, tokens, reply=True)
    whole, plain = (
        render_template(chat_template, [user, reply], tools, tokens) for reply in replies
    )
    if "add_generation_prompt" in chat_template and whole.startswith(prompt):
        begins = len(prompt)
    else:  # the prompt has more, such as a thinking that it opens; replies differ from there on
        pairs = enumerate(zip(whole, plain, strict=False))
        begins = next((n for n, (char, other) in pairs if char != other), len(whole))
        before, opened, part = whole[:begins].rpartition("<")
        if opened and ">" not in part:  # they differ in the midst of a mark
            begins = len(before)
    return whole[begins:].removesuffix(plain.rpartition(mark)[2])
