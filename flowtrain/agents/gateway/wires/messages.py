"""Anthropic's Messages: POST /v1/messages and /v1/messages/count_tokens.

A thinking comes as a block of its own. Its signature holds how it stood in the response, so that it
is known again when it is sent back.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from flowtrain.agents.gateway.plain import ChatRequest, Message, Refusal, Reply
from flowtrain.agents.gateway.wires.forms import (
    MAX_SHOWN,
    STRICT,
    Form,
    Limit,
    Schema,
    Stop,
    ToolName,
    between,
    event,
    plain_call,
    plain_text,
    plain_tool,
    read_form,
)
from flowtrain.utils.text import THINK_END

_IGNORED = {
    *("temperature", "top_p", "top_k", "metadata", "service_tier", "inference_geo", "speed"),
    *("thinking", "cache_control", "context_management"),
}
"""Parameters that change nothing here: sampling is that of the rollout, and the history is what the
program sends."""
_DEFAULTS: Mapping[str, tuple[Any, ...]] = {"mcp_servers": ([],), "betas": ([],)}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_MAX_STOPS = 256
"""Stop strings of a request; Anthropic has no small limit."""
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_THINK = "<think>"
_PLAIN_THINKING = (f"{_THINK}\n", f"\n{THINK_END}\n\n")
"""Around a thinking that is not ours."""


def read(body: bytes) -> ChatRequest:
    form = read_form(_Request, body, _IGNORED, _DEFAULTS)
    messages = [plain for message in form.messages for plain in _messages(message)]
    if system := _text_of(form.system, "system"):
        messages.insert(0, {"role": "system", "content": system})
    return ChatRequest(
        model=form.model[:MAX_SHOWN],
        messages=tuple(messages),
        tools=tuple(plain_tool(t.name, t.description, t.input_schema) for t in form.tools),
        reads_calls=bool(form.tools) and form.tool_choice.type == "auto",
        max_new_tokens=form.max_tokens,
        stop=tuple(map(plain_text, form.stop_sequences)),
        stream=form.stream,
    )


def write(request: ChatRequest, reply: Reply) -> bytes:
    if request.stream:
        return "".join(_events(request, reply)).encode()
    return json.dumps(_answer(request, reply, _blocks(reply))).encode()


def write_count(num_tokens: int) -> bytes:
    return json.dumps({"input_tokens": num_tokens}).encode()


def error(refusal: Refusal) -> bytes:
    kind = _ERRORS.get(refusal.status, "api_error" if refusal.status >= 500 else _ERRORS[400])
    details = {"type": kind, "message": str(refusal)}
    return json.dumps({"type": "error", "error": details, "request_id": None}).encode()


# ---- their form


class _Text(Form):
    ignored = ("cache_control", "citations")
    type: Literal["text"]
    text: str


class _Thinking(Form):
    ignored = ("cache_control",)
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class _Use(Form):
    ignored = ("cache_control", "caller")
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _Result(Form):
    ignored = ("cache_control",)
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[_Text] = ""
    is_error: bool = False


class _User(Form):
    role: Literal["user", "system"]
    content: (
        str
        | Annotated[
            list[Annotated[_Text | _Result, Field(discriminator="type")]], Field(min_length=1)
        ]
    )


class _Assistant(Form):
    role: Literal["assistant"]
    content: str | list[Annotated[_Text | _Thinking | _Use, Field(discriminator="type")]]


class _Tool(Form):
    ignored = ("cache_control", "eager_input_streaming")
    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: Schema


class _Choice(Form):
    type: Literal["auto", "none"] = "auto"
    disable_parallel_tool_use: Literal[False] = False


class _Output(Form):
    ignored = ("effort",)
    format: None = None


class _Request(BaseModel):
    model_config = STRICT

    model: str = ""
    messages: list[Annotated[_User | _Assistant, Field(discriminator="role")]] = Field(min_length=1)
    system: str | list[_Text] = ""
    tools: list[_Tool] = []
    tool_choice: _Choice = Field(default_factory=_Choice)
    max_tokens: Limit | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=_MAX_STOPS)] = []
    stream: bool = False
    output_config: _Output = Field(default_factory=_Output)


def _messages(message: _User | _Assistant) -> Iterator[Message]:
    """Split a message of the user into the results of tools and the rest."""
    blocks = message.content
    if isinstance(blocks, str):
        yield {"role": message.role, "content": plain_text(blocks)}
        return
    for block in blocks:
        if isinstance(block, _Result):
            head = {"role": "tool", "tool_call_id": plain_text(block.tool_use_id)}
            content = _text_of(block.content, "tool")
            if block.is_error:
                content = f"Error: {content or 'the tool failed'}"
            yield {**head, "content": content}
    texts = [block for block in blocks if not isinstance(block, _Result | _Use)]
    calls = [
        plain_call(block.id, block.name, json.dumps(block.input))
        for block in blocks
        if isinstance(block, _Use)
    ]
    if calls:
        yield {"role": message.role, "content": _text_of(texts, message.role), "tool_calls": calls}
    elif texts or message.role == "assistant":
        yield {"role": message.role, "content": _text_of(texts, message.role)}


def _text_of(content: str | Sequence[_Text | _Thinking], role: str) -> str:
    if isinstance(content, str):
        return plain_text(content)
    return plain_text(between(role).join(_block_text(block) for block in content))


def _block_text(block: _Text | _Thinking) -> str:
    if isinstance(block, _Text):
        return block.text
    prefix, suffix = _read_signature(block.signature)
    return f"{prefix}{block.thinking}{suffix}"


# ---- our answers


def _answer(request: ChatRequest, reply: Reply, blocks: Sequence[Message]) -> dict[str, Any]:
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": list(blocks),
        **_end(reply),
        "usage": {"input_tokens": reply.num_prompt_tokens, **_usage(reply)},
    }


def _end(reply: Reply) -> dict[str, Any]:
    if reply.stopped_by:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_by}
    return {"stop_reason": _REASONS[reply.finish_reason], "stop_sequence": None}


def _usage(reply: Reply) -> dict[str, int]:
    return {"output_tokens": reply.num_response_tokens}


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    thinking, end, text = reply.text.partition(THINK_END)
    blocks: list[dict[str, Any]] = []
    if end:
        inner = thinking.removeprefix(_THINK)
        prefix = thinking[: len(thinking) - len(inner.lstrip())]
        suffix = f"{inner[len(inner.rstrip()) :] if inner.strip() else ''}{end}"
        suffix += text[: len(text) - len(text.lstrip())]
        signed = {"thinking": inner.strip(), "signature": _signature(prefix, suffix)}
        blocks.append({"type": "thinking", **signed})
        text = text.lstrip()
    else:
        text = reply.text
    if text or not (reply.calls or blocks):
        blocks.append({"type": "text", "text": text})
    for call in reply.calls:
        arguments = json.loads(call.arguments, parse_constant=str)  # NaN is JSON to Python alone
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def _signature(prefix: str, suffix: str) -> str:
    return base64.b64encode(json.dumps([prefix, suffix]).encode()).decode()


def _read_signature(signature: str) -> tuple[str, str]:
    """Return what stood around a thinking; the usual where the signature is not one of ours."""
    try:
        prefix, suffix = json.loads(base64.b64decode(signature, validate=True))
    except (ValueError, TypeError, RecursionError):
        return _PLAIN_THINKING
    is_ours = isinstance(prefix, str) and isinstance(suffix, str)
    return (prefix, suffix) if is_ours else _PLAIN_THINKING


def _events(request: ChatRequest, reply: Reply) -> Iterator[str]:
    """Yield the events of a complete response: clients get each block in one piece."""
    start = _answer(request, reply, [])
    start |= {"stop_reason": None, "stop_sequence": None}
    yield event("message_start", message={**start, "usage": {**start["usage"], "output_tokens": 0}})
    for index, block in enumerate(_blocks(reply)):
        empty, deltas = _in_deltas(block)
        yield event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    yield event("message_delta", delta=_end(reply), usage=_usage(reply))
    yield event("message_stop")


def _in_deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block without what it holds, and the deltas that bring it."""
    match block["type"]:
        case "tool_use":
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            return {**block, "input": {}}, [delta]
        case "thinking":
            parts = [
                {"type": f"{name}_delta", name: block[name]} for name in block if name != "type"
            ]
            return {**block, "thinking": "", "signature": ""}, parts
        case _:
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
