"""OpenAI's responses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from flowtrain.agents.gateway.requests import ChatRequest, Message


@dataclass(frozen=True, slots=True)
class AskedCall:
    """A call of a tool that a response asks for."""

    id: str
    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A response as the program gets it."""

    id: str
    text: str
    calls: tuple[AskedCall, ...]
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_prompt_tokens: int
    num_response_tokens: int
    created_s: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970; a retry gets the same."""

    def message(self) -> Message:
        """The message as a program sends it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [_called(call) for call in self.calls]
        return message


def chat_body(asked: ChatRequest, reply: Reply) -> bytes:
    """Write the answer of /chat/completions; with `stream` as events."""
    if asked.stream:
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in _chunks(asked, reply)]
        return "".join([*events, "data: [DONE]\n\n"]).encode()
    choice = {
        "index": 0,
        "finish_reason": reply.finish_reason,
        "message": {**reply.message(), "content": _shown(reply), "refusal": None},
        "logprobs": None,
    }
    head = _head(asked, reply, "chat.completion")
    return json.dumps({**head, "choices": [choice], "usage": _usage(reply)}).encode()


def _head(asked: ChatRequest, reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": reply.id, "object": kind, "created": reply.created_s, "model": asked.model}


def _chunks(asked: ChatRequest, reply: Reply) -> Iterator[dict[str, Any]]:
    """The response is complete before its first chunk: clients get each part in one piece."""
    head = _head(asked, reply, "chat.completion.chunk")
    usage = {"usage": None} if asked.include_usage else {}

    def chunk(delta: Message, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return {**head, "choices": [choice], **usage}

    yield chunk({"role": "assistant", "content": "" if _shown(reply) is not None else None})
    if reply.text:
        yield chunk({"content": reply.text})
    for index, call in enumerate(reply.calls):
        yield chunk({"tool_calls": [{"index": index, **_called(call)}]})
    yield chunk({}, reply.finish_reason)
    if asked.include_usage:
        yield {**head, "choices": [], "usage": _usage(reply)}


def _called(call: AskedCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _shown(reply: Reply) -> str | None:
    """The content, which is null beside calls alone."""
    return reply.text if reply.text or not reply.calls else None


def _usage(reply: Reply) -> dict[str, int]:
    num_prompt, num_response = reply.num_prompt_tokens, reply.num_response_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_response,
        "total_tokens": num_prompt + num_response,
    }
