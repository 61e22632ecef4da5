"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from flowtrain.agents.gateway.plain import ChatRequest, Message, Refusal, Reply
from flowtrain.agents.gateway.wires.forms import (
    MAX_SHOWN,
    MAX_STOPS,
    STRICT,
    Form,
    Limit,
    Schema,
    Stop,
    ToolName,
    between,
    plain_call,
    plain_text,
    plain_tool,
    read_form,
)

_IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("temperature", "top_p", "seed", "reasoning_effort"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
}
"""Parameters that change nothing here; sampling and seeds are those of the rollout."""
_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
}


def read(body: bytes) -> ChatRequest:
    form = read_form(_Request, body, _IGNORED, _DEFAULTS)
    return ChatRequest(
        model=form.model[:MAX_SHOWN],
        messages=tuple(_message(message) for message in form.messages),
        tools=tuple(
            plain_tool(f.name, f.description, f.parameters)
            for f in (tool.function for tool in form.tools)
        ),
        reads_calls=bool(form.tools) and form.tool_choice == "auto",
        max_new_tokens=form.max_completion_tokens or form.max_tokens,
        stop=tuple(map(plain_text, [form.stop] if isinstance(form.stop, str) else form.stop)),
        stream=form.stream,
        include_usage=form.stream_options.include_usage,
    )


def write(request: ChatRequest, reply: Reply) -> bytes:
    if request.stream:
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in _chunks(request, reply)]
        return "".join([*events, "data: [DONE]\n\n"]).encode()
    choice = {
        "index": 0,
        "finish_reason": reply.finish_reason,
        "message": {**reply.message(), "content": _content(reply), "refusal": None},
        "logprobs": None,
    }
    head = _head(request, reply, "chat.completion")
    return json.dumps({**head, "choices": [choice], "usage": _usage(reply)}).encode()


def error(refusal: Refusal) -> bytes:
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    details = {"type": kind, "param": refusal.param, "code": refusal.code}
    return json.dumps({"error": {"message": str(refusal), **details}}).encode()


# ---- their form


class _Part(Form):
    ignored = ("cache_control", "annotations")
    type: Literal["text"]
    text: str


class _RefusalPart(Form):
    type: Literal["refusal"]
    refusal: str


_PartOrRefusal = Annotated[_Part | _RefusalPart, Field(discriminator="type")]


class _CalledFunction(Form):
    name: str
    arguments: str


class _Call(Form):
    ignored = ("index",)  # of streams that a client has put together
    id: str
    type: Literal["function"]
    function: _CalledFunction


class _Message(Form):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_PartOrRefusal] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: None = None
    audio: None = None

    @model_validator(mode="after")
    def _check(self) -> _Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role!r} needs content")
        if self.tool_call_id is None and self.role == "tool":
            raise ValueError("a message of the role 'tool' needs a tool_call_id")
        return self


class _Function(Form):
    name: ToolName
    description: str | None = None
    parameters: Schema | None = None


class _Tool(Form):
    ignored = ("cache_control",)
    type: Literal["function"]
    function: _Function


class _StreamOptions(Form):
    ignored = ("include_obfuscation",)
    include_usage: bool = False


class _Request(BaseModel):
    model_config = STRICT

    model: str = ""
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    stream: bool = False
    stream_options: _StreamOptions = Field(default_factory=_StreamOptions)


def _message(form: _Message) -> Message:
    content = form.content or ""
    role = "system" if form.role == "developer" else form.role
    if not isinstance(content, str):
        parts = (part.text if isinstance(part, _Part) else part.refusal for part in content)
        content = between(role).join(parts)
    message: dict[str, Any] = {"role": role, "content": plain_text(content)}
    if role == "assistant" and form.tool_calls:
        message["tool_calls"] = [
            plain_call(call.id, call.function.name, call.function.arguments)
            for call in form.tool_calls
        ]
    extras = {"tool_call_id": form.tool_call_id, "name": form.name}
    return message | {name: plain_text(value) for name, value in extras.items() if value}


# ---- our answers


def _head(request: ChatRequest, reply: Reply, kind: str) -> dict[str, Any]:
    head = {"id": f"chatcmpl-{reply.id}", "object": kind}
    return {**head, "created": reply.created_s, "model": request.model}


def _chunks(request: ChatRequest, reply: Reply) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a complete response: clients get each part in one piece."""
    head = _head(request, reply, "chat.completion.chunk")
    usage = {"usage": None} if request.include_usage else {}

    def chunk(delta: Message, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return {**head, "choices": [choice], **usage}

    yield chunk({"role": "assistant", "content": "" if _content(reply) is not None else None})
    if reply.text:
        yield chunk({"content": reply.text})
    for index, call in enumerate(reply.calls):
        yield chunk({"tool_calls": [{"index": index, **call.plain()}]})
    yield chunk({}, reply.finish_reason)
    if request.include_usage:
        yield {**head, "choices": [], "usage": _usage(reply)}


def _content(reply: Reply) -> str | None:
    """Return the content, which is null beside calls alone."""
    return reply.text if reply.text or not reply.calls else None


def _usage(reply: Reply) -> dict[str, int]:
    num_prompt, num_response = reply.num_prompt_tokens, reply.num_response_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_response,
        "total_tokens": num_prompt + num_response,
    }
