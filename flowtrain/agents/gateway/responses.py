"""OpenAI's responses, by the types of its own client library."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from flowtrain.agents.gateway.requests import Message, Options, read_chat
from flowtrain.types import UserError

if TYPE_CHECKING:
    from openai.types import CompletionUsage


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
    logprobs: tuple[tuple[str, float], ...] = ()
    """Token and log-prob, where they were asked for."""

    def message(self) -> Message:
        """The message as a program sends it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return message


def prepare() -> None:
    """Import OpenAI's types and build their validators, which takes a second the first time.

    Raises UserError if its library is not there.
    """
    try:
        import openai.types.chat  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"agent.name='gateway' needs {error.name}: pip install 'flowtrain[gateway]'"
        ) from error
    asked = read_chat(b'{"model": "", "messages": [{"role": "user", "content": ""}]}')
    reply = Reply("", "", (), "stop", num_prompt_tokens=0, num_response_tokens=0)
    for stream in (False, True):
        chat_body(replace(asked.options, stream=stream), reply)


def chat_body(asked: Options, reply: Reply) -> bytes:
    """Write the answer of /chat/completions; with `stream` as events."""
    if asked.stream:
        return _events(_chat_chunks(asked, reply))
    from openai.types.chat import ChatCompletion

    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": reply.finish_reason,
        "message": {**reply.message(), "content": _shown(reply), "refusal": None},
        "logprobs": _chat_logprobs(reply) if asked.logprobs else None,
    }
    completion = ChatCompletion.model_validate(
        {**_head(asked, reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}
    )
    return completion.model_dump_json(exclude_unset=True).encode()


def text_body(asked: Options, reply: Reply) -> bytes:
    """Write the answer of /completions; with `stream` as events."""
    from openai.types import Completion

    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": reply.finish_reason,
        "text": reply.text,
        "logprobs": _text_logprobs(reply) if asked.logprobs else None,
    }
    head = _head(asked, reply, "text_completion")
    if not asked.stream:
        whole = {**head, "choices": [choice], "usage": _usage(reply)}
        return Completion.model_validate(whole).model_dump_json(exclude_unset=True).encode()
    chunks = [Completion.model_validate({**head, "choices": [choice]})]
    if asked.include_usage:
        chunks.append(Completion.model_validate({**head, "choices": [], "usage": _usage(reply)}))
    return _events(chunks)


def models_body(names: Sequence[str]) -> bytes:
    """Write the answer of /models."""
    from openai.types import Model

    rows = [Model(id=name, object="model", created=0, owned_by="flowtrain") for name in names]
    data = [row.model_dump(mode="json") for row in rows]
    return json.dumps({"object": "list", "data": data}).encode()


def _head(asked: Options, reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": reply.id, "object": kind, "created": int(time.time()), "model": asked.model}


def _chat_chunks(asked: Options, reply: Reply) -> Iterator[Any]:
    """The response is complete before its first chunk: clients get each part in one piece."""
    from openai.types.chat import ChatCompletionChunk

    head = _head(asked, reply, "chat.completion.chunk")

    def chunk(
        delta: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> Any:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        usage = {"usage": None} if asked.include_usage else {}
        return ChatCompletionChunk.model_validate({**head, "choices": [choice], **usage})

    yield chunk({"role": "assistant", "content": "" if _shown(reply) is not None else None})
    if reply.text:
        yield chunk(
            {"content": reply.text}, logprobs=_chat_logprobs(reply) if asked.logprobs else None
        )
    for index, call in enumerate(reply.calls):
        function = {"name": call.name, "arguments": call.arguments}
        asked_for = {"index": index, "id": call.id, "type": "function", "function": function}
        yield chunk({"tool_calls": [asked_for]})
    yield chunk({}, reply.finish_reason)
    if asked.include_usage:
        yield ChatCompletionChunk.model_validate({**head, "choices": [], "usage": _usage(reply)})


def _events(chunks: Iterable[Any]) -> bytes:
    lines = [f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n" for chunk in chunks]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


def _shown(reply: Reply) -> str | None:
    """The content, which is null beside calls alone."""
    return reply.text if reply.text or not reply.calls else None


def _usage(reply: Reply) -> CompletionUsage:
    from openai.types import CompletionUsage

    num_prompt, num_response = reply.num_prompt_tokens, reply.num_response_tokens
    return CompletionUsage(
        prompt_tokens=num_prompt,
        completion_tokens=num_response,
        total_tokens=num_prompt + num_response,
    )


def _chat_logprobs(reply: Reply) -> dict[str, Any]:
    tokens = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in reply.logprobs
    ]
    return {"content": tokens, "refusal": None}


def _text_logprobs(reply: Reply) -> dict[str, Any]:
    tokens = [token for token, _ in reply.logprobs]
    offsets = [sum(map(len, tokens[:place])) for place in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [logprob for _, logprob in reply.logprobs],
        "text_offset": offsets,
        "top_logprobs": None,
    }
