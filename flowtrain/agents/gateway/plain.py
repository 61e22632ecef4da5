"""Requests and replies in one plain form, whatever wire a program speaks (wires/)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

PREFIX = "/v1"
"""Paths of both vendors begin with it; OpenAI's clients have it in their URL."""
Message = Mapping[str, Any]
"""Plain: role and content, which is text; tool_calls, tool_call_id and name where there are any."""


_PLACE = "messages"


class Refusal(Exception):
    """A request is answered with an error, which each wire tells in its own form."""

    def __init__(
        self,
        text: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(text)
        self.status, self.param, self.code = status, param, code
        self.headers = {"x-should-retry": "false"} if headers is None else headers


def check_history(messages: Sequence[Message]) -> None:
    """Raise Refusal unless the messages end where a reply begins, and each call of a tool in them
    has one result, before the next message of the user or the assistant.
    """
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if (call_id := message["tool_call_id"]) not in waiting:
                raise Refusal(
                    f"there is a result of {call_id!r}, but no call before it", param=_PLACE
                )
            waiting.remove(call_id)
        elif waiting and message["role"] != "system":
            break
        waiting += [call["id"] for call in message.get("tool_calls", ())]
    if waiting:
        raise Refusal(f"the call {waiting[0]!r} has no result", param=_PLACE)
    if not messages:
        raise Refusal("there is no message to reply to", param=_PLACE)
    if messages[-1]["role"] == "assistant":
        text = "the last message is the assistant's, and to go on with it is not supported"
        raise Refusal(text, param=_PLACE)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for the next message of a conversation."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    reads_calls: bool
    """Calls of tools are read out of the response."""
    max_new_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool = False
    instructions: tuple[Message, ...] = ()
    """They come before all messages, those of `after` too."""
    after: str = ""
    """The response whose messages these go on with; "": they are all that there is."""


@dataclass(frozen=True, slots=True)
class ReplyCall:
    """A call of a tool that a response asks for."""

    id: str
    name: str
    arguments: str
    """JSON."""

    def plain(self) -> Message:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Reply:
    """A response as the program gets it."""

    id: str
    text: str
    calls: tuple[ReplyCall, ...]
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_prompt_tokens: int
    num_response_tokens: int
    stopped_by: str = ""
    """The stop string that ended it."""
    created_s: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970; a retry gets the same."""

    def message(self) -> Message:
        """Return the message as a program sends it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [call.plain() for call in self.calls]
        return message
