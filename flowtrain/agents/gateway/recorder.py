"""Join the requests of one rollout into conversations whose token ids only grow.

A program sends the whole history with every request. What of it this rollout sampled is found by
the longest recorded beginning, and stands in the prompt with the ids that were sampled, though the
program may have changed white space or the order of keys: of histories that differ in no more than
that, it is the one that was sent, if it is among them. Another history, or one that
the chat template would rewrite, begins a conversation of its own, which is trained as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flowtrain.agents.chat.conversation import Conversation, TemplateRewrites
from flowtrain.agents.chat.dialect import Dialect
from flowtrain.agents.gateway.plain import Asked, AskedCall, Message, Refusal, Reply, check_history
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
        self._unanswered: dict[str, tuple[Call, tuple[AskedCall, ...]]] = {}
        """Calls of tools without a result yet, with all of their response, by id."""
        self._histories: dict[str, tuple[Message, ...]] = {}
        """The messages up to each reply, without instructions, for requests that name it."""
        self._num_replies = 0

    async def chat(self, asked: Asked) -> Reply:
        """Sample the next message of a conversation. Raises Refusal and what the session raises."""
        messages = self._messages(asked)
        check_history(messages)
        path = _digests(messages, asked.tools)
        conversation = self._find(messages, asked, path)
        self._prompts.keep(path[-1], conversation)
        self._note_results(messages)
        call = await self._session.sample(
            conversation.prompt_ids, max_new_tokens=asked.max_new_tokens, stop_strings=asked.stop
        )
        number = self._num_replies
        self._num_replies += 1
        text, calls = self._read(call, asked, number)
        reply = self._reply(call, asked, text, calls, number)
        message = reply.message()
        grown = conversation.add_response(call.response_ids, message, _is_whole(call))
        self._answered.keep(_extended(path[-1], message), grown)
        self._histories[reply.id] = (*messages[len(asked.instructions) :], message)
        for each in calls:
            self._unanswered[each.id] = (call, calls)
        return reply

    async def count(self, asked: Asked) -> int:
        """Count the tokens of the prompt that a request would sample from. Raises Refusal."""
        messages = self._messages(asked)
        return len(self._find(messages, asked, _digests(messages, asked.tools)).prompt_ids)

    def finish(self) -> None:
        """Record the calls of tools whose results no request has brought."""
        while self._unanswered:
            self._record_calls(next(iter(self._unanswered)), {})

    def _messages(self, asked: Asked) -> tuple[Message, ...]:
        """Return the whole history of a request, which may name a reply for its beginning."""
        before = self._histories.get(asked.after, ())
        if asked.after and not before:
            text = f"this rollout has no response 'resp_{asked.after[:MAX_ID]}'"
            code = "previous_response_not_found"
            raise Refusal(text, param="previous_response_id", code=code)
        return (*asked.instructions, *before, *asked.messages)

    def _find(
        self, messages: Sequence[Message], asked: Asked, path: Sequence[_Key]
    ) -> Conversation:
        """Return the conversation that the request goes on with, or begin one."""
        if (found := self._prompts.exact.get(path[-1].exact)) is not None:
            return found
        # The same prompt but for white space is what is meant, unless a reply before it is exact.
        like = self._prompts.loose.get(path[-1].loose)
        for place in range(len(path) - 2, 0, -1):
            before = self._answered.exact.get(path[place].exact)
            if before is None and like is None:
                before = self._answered.loose.get(path[place].loose)
            if before is not None:
                try:
                    return self._dialect.add(before, messages[place:])
                except TemplateRewrites:
                    break
            if like is not None and path[place].loose in self._answered.loose:
                break
        if like is not None:
            return like
        try:
            return self._dialect.start(messages, asked.tools)
        except TemplateRewrites as error:
            raise Refusal(str(error), param="messages") from None

    def _read(self, call: Call, asked: Asked, number: int) -> tuple[str, tuple[AskedCall, ...]]:
        """Return a response's text and calls of tools. One that is malformed is all text."""
        if not asked.reads_calls:
            return _before_stop(call.text, asked.stop), ()
        whole = self._dialect.template.text_of(call.response_ids, _is_whole(call))
        content, written = self._dialect.format.parse(_before_stop(whole, asked.stop))
        if problem := next((each.problem for each in written if each.problem), ""):
            self._session.record_malformed(call, problem)
        if problem or not written:
            return _before_stop(call.text, asked.stop), ()
        calls = [
            AskedCall(self._id(number, place), each.name, each.arguments)
            for place, each in enumerate(written)
        ]
        return content.strip(), tuple(calls)

    def _reply(
        self, call: Call, asked: Asked, text: str, calls: tuple[AskedCall, ...], number: int
    ) -> Reply:
        return Reply(
            id=self._id(number, -1),
            text=text,
            calls=calls,
            finish_reason="tool_calls" if calls else "stop" if _is_whole(call) else "length",
            num_prompt_tokens=len(call.prompt_ids),
            num_response_tokens=len(call.response_ids),
            stopped_by=_first_stop(call.text, asked.stop),
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
        for named in results:
            if named in self._unanswered:
                self._record_calls(named, results)

    def _record_calls(self, named: str, results: Mapping[str, str]) -> None:
        """Record all calls of a response at once, so that they are in its order."""
        call, calls = self._unanswered[named]
        for each in calls:
            del self._unanswered[each.id]
            result = ToolResult(shorten(results.get(each.id, ""), self._max_result_chars))
            self._session.record_tool(call, ToolCall(each.name, each.arguments, result, each.id))


def _is_whole(call: Call) -> bool:
    return call.finish_reason is FinishReason.STOP


def _digests(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[_Key]:
    """Return the keys of the tools with the first 0, 1, ... of the messages."""
    of_tools = hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).digest()
    found = [_Key(of_tools, of_tools)]
    for message in messages:
        found.append(_extended(found[-1], message))
    return found


def _extended(before: _Key, message: Message) -> _Key:
    """Add a message to a key."""
    calls = [
        (call["id"], call["function"]["name"], _canonical(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    named = [message["role"], message.get("name", ""), message.get("tool_call_id", "")]

    def digest(before: bytes, text: str) -> bytes:
        # The `repr` of texts tells them apart as well as JSON does, at a third of the time.
        return hashlib.sha256(before + repr((*named, text, calls)).encode()).digest()

    text = message["content"]
    loose = digest(before.loose, text.strip())
    is_loose = before.exact == before.loose and text == text.strip()
    return _Key(loose, loose if is_loose else digest(before.exact, text))


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _first_stop(text: str, stop: Sequence[str]) -> str:
    """Return the stop string that comes first in a text; "" where there is none."""
    return min((each for each in stop if each in text), key=text.find, default="")


def _before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string, whose tokens stay in the record."""
    first = _first_stop(text, stop)
    return text.partition(first)[0] if first else text
