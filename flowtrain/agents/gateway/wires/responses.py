"""OpenAI's Responses: POST /v1/responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from flowtrain.agents.gateway.plain import ChatRequest, Message, Reply
from flowtrain.agents.gateway.wires.chat import error
from flowtrain.agents.gateway.wires.forms import (
    MAX_SHOWN,
    STRICT,
    Form,
    Limit,
    Schema,
    ToolName,
    between,
    event,
    plain_call,
    plain_text,
    plain_tool,
    read_form,
)

__all__ = ["error", "read", "write"]

_IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "client_metadata"),
    *("temperature", "top_p", "reasoning", "stream_options"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
}
"""Parameters that change nothing here. A response is kept for `previous_response_id` as long as its
rollout lasts, whatever `store` says."""
_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([], ["reasoning.encrypted_content"]),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


def read(body: bytes) -> ChatRequest:
    form = read_form(_Request, body, _IGNORED, _DEFAULTS)
    items = form.input
    if isinstance(items, str):
        items = [_Item(role="user", content=items)]
    system = [{"role": "system", "content": plain_text(form.instructions)}]
    return ChatRequest(
        model=form.model[:MAX_SHOWN],
        messages=tuple(_messages(items)),
        tools=tuple(plain_tool(t.name, t.description, t.parameters) for t in form.tools),
        reads_calls=bool(form.tools) and form.tool_choice == "auto",
        max_new_tokens=form.max_output_tokens,
        stop=(),
        stream=form.stream,
        instructions=tuple(system) if form.instructions else (),
        after=form.previous_response_id.removeprefix("resp_"),
    )


def write(request: ChatRequest, reply: Reply) -> bytes:
    if request.stream:
        return "".join(_events(request, reply)).encode()
    return json.dumps(_answer(request, reply)).encode()


# ---- their form


class _Part(Form):
    ignored = ("annotations", "logprobs")
    type: Literal["input_text", "output_text"]
    text: str


class _Item(Form):
    ignored = ("id", "status", "phase")
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]


class _Call(Form):
    ignored = ("id", "status")
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _Result(Form):
    ignored = ("id", "status")
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[_Part]


class _Tool(Form):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: Schema | None = None


class _Format(Form):
    type: Literal["text"] = "text"


class _Output(Form):
    ignored = ("verbosity",)
    format: _Format = Field(default_factory=_Format)


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else item.type
    return str(kind)


_Input = Annotated[
    Annotated[_Call, Tag("function_call")]
    | Annotated[_Result, Tag("function_call_output")]
    | Annotated[_Item, Tag("message")],
    Discriminator(_kind),
]


class _Request(BaseModel):
    model_config = STRICT

    model: str = ""
    input: str | Annotated[list[_Input], Field(min_length=1)]
    instructions: str = ""
    previous_response_id: str = ""
    tools: list[_Tool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    max_output_tokens: Limit | None = None
    stream: bool = False
    text: _Output = Field(default_factory=_Output)


def _messages(items: Sequence[_Call | _Result | _Item]) -> list[Message]:
    """Join the items of a reply, one for its text and one for each call, into one message again."""
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        if isinstance(item, _Result):
            head = {"role": "tool", "tool_call_id": plain_text(item.call_id)}
            messages.append({**head, "content": _text_of(item.output, "tool")})
        elif isinstance(item, _Item):
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _text_of(item.content, role)})
        else:
            if not number or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = plain_call(item.call_id, item.name, item.arguments)
            messages[-1].setdefault("tool_calls", []).append(call)
    return list(messages)


def _text_of(content: str | Sequence[_Part], role: str) -> str:
    if isinstance(content, str):
        return plain_text(content)
    return plain_text(between(role).join(part.text for part in content))


# ---- our answers


def _answer(request: ChatRequest, reply: Reply, status: str = "") -> dict[str, Any]:
    is_whole = reply.finish_reason != "length"
    num_prompt, num_response = reply.num_prompt_tokens, reply.num_response_tokens
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created_s,
        "status": status or ("completed" if is_whole else "incomplete"),
        "incomplete_details": None if is_whole or status else {"reason": "max_output_tokens"},
        "error": None,
        "model": request.model,
        "metadata": {},
        "instructions": request.instructions[0]["content"] if request.instructions else None,
        "output": [] if status else _items(reply),
        "parallel_tool_calls": True,
        "previous_response_id": f"resp_{request.after}" if request.after else None,
        "tool_choice": "auto" if request.reads_calls or not request.tools else "none",
        "tools": [{"type": "function", "strict": False, **t["function"]} for t in request.tools],
        "usage": None
        if status
        else {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_response,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_response,
        },
    }


def _items(reply: Reply) -> list[dict[str, Any]]:
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if reply.text or not reply.calls:
        head = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "status": status}
        items.append({**head, "content": [_text_part(reply.text)]})
    for call in reply.calls:
        call_head = {"id": f"fc_{call.id}", "type": "function_call", "call_id": call.id}
        items.append(
            {**call_head, "name": call.name, "arguments": call.arguments, "status": "completed"}
        )
    return items


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _events(request: ChatRequest, reply: Reply) -> Iterator[str]:
    """Yield the events of a complete response: clients get each item in one piece."""
    initial, final = _answer(request, reply, "in_progress"), _answer(request, reply)
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": initial}),
        ("response.in_progress", {"response": initial}),
    ]
    for index, item in enumerate(final["output"]):
        place = {"item_id": item["id"], "output_index": index}
        is_call = item["type"] == "function_call"
        empty = {
            **item,
            "status": "in_progress",
            **({"arguments": ""} if is_call else {"content": []}),
        }
        events.append(("response.output_item.added", {"output_index": index, "item": empty}))
        events += _call_events(item, place) if is_call else _text_events(item, place)
        events.append(("response.output_item.done", {"output_index": index, "item": item}))
    events.append((f"response.{final['status']}", {"response": final}))
    for number, (kind, data) in enumerate(events):
        yield event(kind, sequence_number=number, **data)


def _call_events(
    item: Mapping[str, Any], place: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    kind, arguments = "response.function_call_arguments", item["arguments"]
    yield f"{kind}.delta", {**place, "delta": arguments}
    yield f"{kind}.done", {**place, "name": item["name"], "arguments": arguments}


def _text_events(
    item: Mapping[str, Any], place: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    (part,) = item["content"]
    place = {**place, "content_index": 0}
    yield "response.content_part.added", {**place, "part": _text_part("")}
    yield "response.output_text.delta", {**place, "delta": part["text"], "logprobs": []}
    yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**place, "part": part}
