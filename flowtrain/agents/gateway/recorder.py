"""Join the requests of one rollout into conversations whose token ids only grow.

A program sends the whole history with every request. The longest recorded prefix identifies the
responses that this rollout sampled, whose sampled ids stay in the prompt even if the program has
changed white space or the order of keys. Among histories that differ only in these, an exact match
wins. Another history, or one that the chat template would rewrite, begins a conversation of its
own, which is trained as well. With `agent.history = "as_deployed"` every request does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flowtrain.agents.chat.conversation import Conversation
from flowtrain.agents.chat.dialect import Dialect
from flowtrain.agents.chat.template import TemplateRewrites
from flowtrain.agents.gateway.plain import (
    ChatRequest,
    Message,
    Refusal,
    Reply,
    ReplyCall,
    check_history,
)
from flowtrain.agents.session import Session
from flowtrain.records import Call, FinishReason, ToolCall, ToolResult
from flowtrain.tools.base import shorten
from flowtrain.utils.seeds import derive_seed

MAX_ID = 100
"""Characters of the name of a response that are shown."""
_ID_CHARS = 9
"""Mistral's templates take no other length."""


class _Key(NamedTuple):
    """Digests of a history, in forms that programs do not change when they send it back."""

    loose: bytes
    """Of texts without the white space around them."""
    exact: bytes
    """Of texts as they are; the loose one where that is no difference."""


class _Response(NamedTuple):
    """A sampled response with its calls of tools."""

    call: Call
    tool_calls: tuple[ReplyCall, ...]


class _Table:
    """Conversations by the keys of their messages; the newest of those that are alike."""

    def __init__(self) -> None:
        self.exact: dict[bytes, Conversation] = {}
        self.loose: dict[bytes, Conversation] = {}

    def keep(self, key: _Key, conversation: Conversation) -> None:
        self.exact[key.exact] = self.loose[key.loose] = conversation


class Recorder:
    """The conversations of one rollout; for the coroutines of its event loop."""

    def __init__(self, session: Session, dialect: Dialect, max_result_chars: int) -> None:
        self._session = session
        self._dialect = dialect
        self._max_result_chars = max_result_chars
        self._prompts = _Table()
        """By their messages, which end where a reply begins."""
        self._answered = _Table()
        """Likewise, with the reply."""
        self._unanswered: dict[str, _Response] = {}
        """Calls of tools without a result yet, with all of their response, by id."""
        self._histories: dict[str, tuple[Message, ...]] = {}
        """The messages up to each reply, without instructions, for requests that name it."""
        self._num_replies = 0

    async def chat(self, request: ChatRequest) -> Reply:
        """Sample the next message of a conversation. Raises Refusal and what the session raises."""
        messages = self._messages(request)
        check_history(messages)
        path = _digests(messages, request.tools)
        conversation = self._find(messages, request, path)
        self._prompts.keep(path[-1], conversation)  # the same messages get the same prompt again
        self._note_results(messages)
        call = await self._session.sample(
            conversation.prompt_ids,
            max_new_tokens=request.max_new_tokens,
            stop_strings=request.stop,
        )
        number = self._num_replies
        self._num_replies += 1
        text, calls = self._read(call, request, number)
        reply = self._reply(call, request, text, calls, number)
        message = reply.message()
        grown = conversation.add_response(call.response_ids, message, _is_whole(call))
        self._answered.keep(_extended(path[-1], message), grown)
        self._histories[reply.id] = (*messages[len(request.instructions) :], message)
        for tool_call in calls:
            self._unanswered[tool_call.id] = _Response(call, calls)
        return reply

    async def count(self, request: ChatRequest) -> int:
        """Count the tokens of the prompt that a request would sample from. Raises Refusal."""
        messages = self._messages(request)
        return len(self._find(messages, request, _digests(messages, request.tools)).prompt_ids)

    def finish(self) -> None:
        """Record the calls of tools whose results no request has brought."""
        while self._unanswered:
            self._record_calls(next(iter(self._unanswered)), {})

    def _messages(self, request: ChatRequest) -> tuple[Message, ...]:
        """Return the whole history of a request, which may name a reply for its beginning."""
        history = self._histories.get(request.after, ())
        if request.after and not history:
            text = f"this rollout has no response 'resp_{request.after[:MAX_ID]}'"
            code = "previous_response_not_found"
            raise Refusal(text, param="previous_response_id", code=code)
        return (*request.instructions, *history, *request.messages)

    def _find(
        self, messages: Sequence[Message], request: ChatRequest, path: Sequence[_Key]
    ) -> Conversation:
        """Return the conversation that the request goes on with, or begin one."""
        if self._dialect.encodes_anew:
            return self._started(messages, request)
        if (conversation := self._prompts.exact.get(path[-1].exact)) is not None:
            return conversation
        # The same prompt but for white space is what is meant, unless a reply before it is exact.
        lookalike = self._prompts.loose.get(path[-1].loose)
        for place in range(len(path) - 2, 0, -1):
            base = self._answered.exact.get(path[place].exact)
            if base is None and lookalike is None:
                base = self._answered.loose.get(path[place].loose)
            if base is not None:
                try:
                    return self._dialect.add(base, messages[place:])
                except TemplateRewrites:
                    break
            if lookalike is not None and path[place].loose in self._answered.loose:
                break
        if lookalike is not None:
            return lookalike
        return self._started(messages, request)

    def _started(self, messages: Sequence[Message], request: ChatRequest) -> Conversation:
        try:
            return self._dialect.start(messages, request.tools)
        except TemplateRewrites as error:
            raise Refusal(str(error), param="messages") from None

    def _read(
        self, call: Call, request: ChatRequest, number: int
    ) -> tuple[str, tuple[ReplyCall, ...]]:
        """Return a response's text and calls of tools. A malformed response is all text."""
        text = self._dialect.template.text_of(call.response_ids, _is_whole(call))
        text = _before_stop(text, request.stop)
        content, tool_calls = self._dialect.format.parse(text, request.tools)
        problem = next((each.problem for each in tool_calls if each.problem), "")
        if problem and request.reads_calls:
            self._session.record_malformed(call, problem)
        if problem or not tool_calls or not request.reads_calls:
            # The marks of an answer, such as gpt-oss's, are no part of it.
            said = call.text if tool_calls or content == text else content
            return _before_stop(said, request.stop), ()
        calls = [
            ReplyCall(self._id(number, place), tool_call.name, tool_call.arguments)
            for place, tool_call in enumerate(tool_calls)
        ]
        return content.strip(), tuple(calls)

    def _reply(
        self, call: Call, request: ChatRequest, text: str, calls: tuple[ReplyCall, ...], number: int
    ) -> Reply:
        return Reply(
            id=self._id(number, -1),
            text=text,
            calls=calls,
            finish_reason="tool_calls" if calls else "stop" if _is_whole(call) else "length",
            num_prompt_tokens=len(call.prompt_ids),
            num_response_tokens=len(call.response_ids),
            stopped_by=_first_stop(call.text, request.stop),
        )

    def _id(self, number: int, place: int) -> str:
        """Name a call; the same rollout gives the same names, as they may be in its prompts."""
        return f"{derive_seed(self._session.seed, 'call', number, place):016x}"[-_ID_CHARS:]

    def _note_results(self, messages: Sequence[Message]) -> None:
        """Record the results of tools that ran in the program."""
        results = {
            message["tool_call_id"]: message["content"]
            for message in messages
            if message.get("tool_call_id") in self._unanswered
        }
        for call_id in results:
            if call_id in self._unanswered:  # another call of its response may have recorded it
                self._record_calls(call_id, results)

    def _record_calls(self, call_id: str, results: Mapping[str, str]) -> None:
        """Record all calls of a response at once, so that they are in its order."""
        response, calls = self._unanswered[call_id]
        for call in calls:
            del self._unanswered[call.id]
            result = ToolResult(shorten(results.get(call.id, ""), self._max_result_chars))
            self._session.record_tool(
                response, ToolCall(call.name, call.arguments, result, call.id)
            )


def _is_whole(call: Call) -> bool:
    return call.finish_reason is FinishReason.STOP


def _digests(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[_Key]:
    """Return the keys of the tools with the first 0, 1, ... of the messages."""
    tools_digest = hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).digest()
    keys = [_Key(tools_digest, tools_digest)]
    for message in messages:
        keys.append(_extended(keys[-1], message))
    return keys


def _extended(key: _Key, message: Message) -> _Key:
    """Add a message to a key."""
    calls = [
        (call["id"], call["function"]["name"], _canonical(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    head = [message["role"], message.get("name", ""), message.get("tool_call_id", "")]

    def digest(key: bytes, text: str) -> bytes:
        # The `repr` of texts tells them apart as well as JSON does, at a third of the time.
        return hashlib.sha256(key + repr((*head, text, calls)).encode()).digest()

    text = message["content"]
    loose = digest(key.loose, text.strip())
    is_loose = key.exact == key.loose and text == text.strip()
    return _Key(loose, loose if is_loose else digest(key.exact, text))


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _first_stop(text: str, stop: Sequence[str]) -> str:
    """Return the stop string that comes first in a text; "" where there is none."""
    return min((word for word in stop if word in text), key=text.find, default="")


def _before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string, whose tokens stay in the record."""
    first = _first_stop(text, stop)
    return text.partition(first)[0] if first else text
