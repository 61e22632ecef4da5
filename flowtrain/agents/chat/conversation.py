"""Conversations whose token ids only grow, through a model's own chat template.

The ids that a policy sampled are never decoded and encoded again. A later prompt is the earlier
prompt, the sampled ids, and the ids of what the template writes after them: the end of the
message where the sample lacks it, the new messages, and the beginning of the next reply. To find
that text, the whole conversation is rendered with a placeholder for each sampled message. What
stands between the placeholders must be what it was before, or else the template rewrites its
history and `TemplateRewrites` is raised.

Some templates take the thinking out of earlier replies. The later prompt is then a branch: of such
a reply it has the sampled ids after the end of the thinking, and no others.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from flowtrain.inference.special_tokens import special_tokens, unmarked
from flowtrain.inference.token_chat import TEMPLATE_ERRORS, ChatTokenizer, message_end, reply_end
from flowtrain.utils.text import THINK_END

Message = Mapping[str, Any]
"""A message as OpenAI's chat completions have it: role, content, tool_calls, tool_call_id."""

_MARK = "pQ7xZ"  # mixed case, so that a template that changes the case of replies is found out
_ID = "0" * 9  # of a call: strict templates want nine letters or digits
_USER: Message = {"role": "user", "content": f"{_MARK}user"}
_MAX_FIRST = 64
"""First prompts that are kept encoded: those of groups that are rolled out at once."""


class TemplateRewrites(Exception):
    """The chat template does not take these messages, or would change what stands before them."""


class ChatTemplate:
    """A tokenizer's chat template, and what it can do."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        """Raises TemplateRewrites for one that does not show replies as they are."""
        self._tokenizer = tokenizer
        self.source = str(tokenizer.chat_template)
        self._special = special_tokens(tokenizer)
        # The rollouts of a group begin alike, and nothing takes as long as to encode a prompt.
        self.encode_first = lru_cache(_MAX_FIRST)(self.encode)
        self.closing = self._closing()
        """The text after the content of a reply, e.g. "<|im_end|>" and a newline."""

    def render(
        self,
        messages: Iterable[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        reply: bool = True,
    ) -> str:
        """Render messages; with `reply` up to where the reply begins. Raises TemplateRewrites."""
        options: dict[str, Any] = {"tools": self._special.marked(list(tools))} if tools else {}
        plain = [self._harmless(_plain(message)) for message in messages]
        # A template is a program of the model's maker, which stops on messages that it cannot take.
        try:
            return self._tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=reply, **options
            )
        except TEMPLATE_ERRORS as error:
            raise TemplateRewrites(f"the chat template refuses the messages: {error}") from error

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode a rendered text; special tokens that stand in messages become plain text."""
        return tuple(self._special.encode(text))

    def _harmless(self, message: dict[str, Any]) -> dict[str, Any]:
        # Of replies special tokens stay: templates look for the end of their thinking.
        is_reply = message["role"] == "assistant"
        content = message["content"]
        return {
            **message,
            "content": unmarked(content) if is_reply else self._special.marked(content),
        }

    def decode(self, ids: Sequence[int]) -> str:
        """Decode with special tokens, for people."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def text_of(self, response_ids: Sequence[int], ended: bool = False) -> str:
        """Decode a response without its end token (see `has_end`); other special tokens stay,
        because they may open tool calls.
        """
        return self.decode(response_ids[:-1] if self.has_end(response_ids, ended) else response_ids)

    def has_end(self, response_ids: Sequence[int], ended: bool = False) -> bool:
        """Tell whether the last token of a response ends it: the template's token or the
        tokenizer's, and any special one of a response of which it is known that it `ended`.
        """
        if not response_ids:
            return False
        last = response_ids[-1]
        if last in (self._closing_id, getattr(self._tokenizer, "eos_token_id", None)):
            return True
        return ended and self._is_special(last)

    @property
    def end_id(self) -> Any:
        """Return the token that ends a reply: the template's, or else the tokenizer's."""
        return reply_end(self._tokenizer)

    @cached_property
    def opening(self) -> str:
        """Return the text that opens a reply, e.g. "<|im_start|>assistant" and a newline."""
        return self.render([_USER]).removeprefix(self.render([_USER], reply=False))

    @cached_property
    def takes_tools(self) -> bool:
        """Tell whether it describes tools to the model."""
        function = {
            "name": f"{_MARK}tool",
            "description": "probe",
            "parameters": {"type": "object", "properties": {}},
        }
        return f"{_MARK}tool" in self._probe([_USER], [{"type": "function", "function": function}])

    @cached_property
    def takes_results(self) -> bool:
        """Tell whether it shows messages of the role "tool"."""
        return f"{_MARK}result" in self._answered

    @cached_property
    def says_first(self) -> bool:
        """Tell whether it shows what a reply says besides its calls before their results."""
        return f"{_MARK}said" in self._answered.partition(f"{_MARK}result")[0]

    @cached_property
    def _answered(self) -> str:
        result = {"role": "tool", "name": "f", "content": f"{_MARK}result", "tool_call_id": _ID}
        asks = {"role": "assistant", "content": f"{_MARK}said", "tool_calls": [_call("f", {})]}
        return self._probe([_USER, asks, result])

    @cached_property
    def call_closing(self) -> str:
        """Return the text after a reply that calls a tool, from its last special token on, where it
        is another than `closing`, e.g. "<|call|>".
        """
        asks = {"role": "assistant", "content": "", "tool_calls": [_call("f", {"text": _MARK})]}
        end = self._probe([_USER, asks], (), False).rpartition(_MARK)[2]
        own = "" if end.endswith(self.closing) else self._special.last_in(end)
        return own or self.closing

    @cached_property
    def takes_system(self) -> bool:
        """Tell whether it shows a message of the role "system"."""
        system = {"role": "system", "content": f"{_MARK}system"}
        return f"{_MARK}system" in self._probe([system, _USER])

    def gap_ids(self, text: str, end: int | None) -> tuple[int, ...]:
        """Encode what follows a response; the end of its message only where no token was that."""
        ids = self.encode(text)
        return ids[1:] if end is not None and ids[:1] in ((end,), (self._closing_id,)) else ids

    def without_thinking(self, response_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the ids after the thinking, as they were sampled. Raises TemplateRewrites."""
        end = self.encode(THINK_END)
        if len(end) != 1 or end[0] not in response_ids:
            raise TemplateRewrites(
                f"the chat template takes the thinking out of earlier replies, but {THINK_END!r} "
                "is no single token, so the rest cannot be kept as it was sampled"
            )
        start = len(response_ids) - tuple(response_ids)[::-1].index(end[0])
        texts = [self._tokenizer.decode([token]) for token in response_ids[start:]]
        blank = next((n for n, text in enumerate(texts) if text.strip()), len(texts))
        if texts[blank:] and texts[blank].startswith("\n"):
            raise TemplateRewrites(
                "the chat template takes the thinking out of earlier replies, but the first token "
                "after it spans the end of a line, so the rest cannot be kept as it was sampled"
            )
        return tuple(response_ids[start + blank :])

    @cached_property
    def _closing_id(self) -> int | None:
        """Return the token that ends a message; None where text alone follows a reply."""
        return message_end(self._tokenizer)

    def _is_special(self, token: int) -> bool:
        """Tell whether decoding can leave a token out."""
        return not self._tokenizer.decode([token], skip_special_tokens=True)

    def _closing(self) -> str:
        reply = {"role": "assistant", "content": f"{_MARK}reply"}
        _, mark, closing = self.render([_USER, reply], reply=False).rpartition(f"{_MARK}reply")
        if not mark:
            raise TemplateRewrites("the chat template does not show what the assistant said")
        return closing

    def _probe(self, messages: Sequence[Message], *options: Any) -> str:
        try:
            return self.render(messages, *options)
        except TemplateRewrites:
            return ""


@dataclass(frozen=True, slots=True)
class _Gap:
    """The text that the template writes before a response, the beginning of the reply included."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Response:
    """A message that was sampled."""

    place: int
    """Its number among the messages."""
    ids: tuple[int, ...]
    """As sampled; without the thinking once the template has taken that out."""
    thinks: bool
    """The ids hold the end of a thinking."""
    end: int | None
    """The token that ends the message; None where it was cut."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and their token ids. It never changes: what adds to it returns a new one, so that
    several conversations can go on from one.

    Example: c = Conversation.start(ChatTemplate(tokenizer), [{"role": "user", "content": "Hi"}])
    c = c.add_response(ids, {"role": "assistant", "content": "Hello"}).add([...]); c.prompt_ids
    """

    template: ChatTemplate
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Definitions as OpenAI's chat completions have them, for the template."""
    _gaps: tuple[_Gap, ...] = field(default=(), repr=False)
    _responses: tuple[_Response, ...] = field(default=(), repr=False)

    @classmethod
    def start(
        cls,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Conversation:
        """Begin with messages that nobody sampled here. Raises TemplateRewrites."""
        text = template.render(messages, tools)
        gap = _Gap(text, template.encode_first(text))
        return cls(template, tuple(messages), tuple(tools), (gap,))

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Return the ids up to where the reply begins."""
        assert len(self._gaps) > len(self._responses), "a response is the last message"
        ids: list[int] = list(self._gaps[0].ids)
        for response, gap in zip(self._responses, self._gaps[1:], strict=True):
            ids += response.ids
            ids += gap.ids
        return tuple(ids)

    def add_response(
        self, response_ids: Sequence[int], message: Message, ended: bool = False
    ) -> Conversation:
        """Add the reply that was sampled after `prompt_ids`.

        Args:
            message: what was read from it; the template learns no more of it than whether it calls
                tools.
            ended: it was not cut, so that a special token at its end is the end of it.
        """
        assert len(self._gaps) > len(self._responses), "a response is the last message already"
        thinks = THINK_END in self.template.decode(response_ids)
        end = response_ids[-1] if self.template.has_end(response_ids, ended) else None
        response = _Response(len(self.messages), tuple(response_ids), thinks, end)
        return replace(
            self, messages=(*self.messages, message), _responses=(*self._responses, response)
        )

    def add(self, new_messages: Sequence[Message]) -> Conversation:
        """Add messages that nobody sampled here, after a response. Raises TemplateRewrites."""
        assert len(self._gaps) == len(self._responses), "there is no response to add them to"
        template = self.template
        messages = (*self.messages, *new_messages)
        stem = f"{_MARK}{secrets.token_hex(8)}"  # in no message, as nobody can have known it
        marks = [_Marks.of(stem, response.place) for response in self._responses]
        placeholders = list(messages)
        for response, mark in zip(self._responses, marks, strict=True):
            message = messages[response.place]
            placeholders[response.place] = mark.placeholder(message, response.thinks, template)
        text = template.render(placeholders, self.tools)
        found = _places_of(stem, text)
        gaps: list[_Gap] = []
        responses: list[_Response] = []
        place = 0
        end: int | None = None
        for gap, response, mark in zip(self._gaps, self._responses, marks, strict=True):
            closings = {template.closing, template.call_closing}
            slot = mark.find(found, text, place, closings)
            if not text.startswith(gap.text.removesuffix(template.opening), place):
                raise TemplateRewrites("the chat template changes what stands before a reply")
            if response.thinks and not slot.has_thinking:
                if slot.content < 0:
                    raise TemplateRewrites("the chat template takes the thinking out of tool calls")
                ids = template.without_thinking(response.ids)
                response = replace(response, ids=ids, thinks=False)
                new_text = text[place : slot.content]
                gap = _Gap(new_text, template.gap_ids(new_text, end))
            gaps.append(gap)
            responses.append(response)
            place, end = slot.end, response.end
        gaps.append(_Gap(text[place:], template.gap_ids(text[place:], end)))
        return replace(self, messages=messages, _gaps=tuple(gaps), _responses=tuple(responses))


@dataclass(frozen=True, slots=True)
class _Slot:
    """The part of a rendered conversation that stands for a response."""

    content: int
    """Where the content begins; below 0 where the reply does not begin with it."""
    end: int
    """Where the template ends the message."""
    has_thinking: bool


@dataclass(frozen=True, slots=True)
class _Marks:
    """Words that stand for the parts of a response; they occur in none of the messages."""

    thinking: str
    content: str
    argument: str

    @classmethod
    def of(cls, stem: str, place: int) -> _Marks:
        prefix = f"{stem}n{place}"
        return cls(f"{prefix}tZ", f"{prefix}cZ", f"{prefix}aZ")

    def placeholder(self, message: Message, thinks: bool, template: ChatTemplate) -> Message:
        """Return a message of the same parts: a thinking, a content, and one call of a tool."""
        thinking = f"<think>\n{self.thinking}\n{THINK_END}\n\n" if thinks else ""
        placeholder = {"role": "assistant", "content": thinking + self.content}
        calls = message.get("tool_calls") if template.closing else None
        if not calls:
            return placeholder
        # One call alone, because some templates take no more.
        first = calls[0]
        call = _call(first["function"]["name"], {"text": self.argument}, first.get("id") or _ID)
        said = {} if template.says_first else {"content": ""}
        return {**placeholder, **said, "tool_calls": [call]}

    def find(
        self, found: Mapping[str, Sequence[int]], text: str, place: int, closings: set[str]
    ) -> _Slot:
        """Find the response from `place` on, given where each mark is. Raises TemplateRewrites."""
        marks = (self.thinking, self.content, self.argument)
        if max(len(found.get(mark, ())) for mark in marks) > 1:
            raise TemplateRewrites("the chat template repeats what the assistant said")
        starts = [next((at for at in found.get(mark, ()) if at >= place), -1) for mark in marks]
        if max(starts) < 0:
            raise TemplateRewrites("the chat template leaves out what the assistant said")
        last = max(start + len(mark) for start, mark in zip(starts, marks, strict=True))
        end = min((n for each in closings if (n := text.find(each, last)) >= 0), default=-1)
        if end < 0:
            raise TemplateRewrites("the chat template ends replies in more than one way")
        thinking, content, argument = starts
        if 0 <= argument < content:
            content = -1
        return _Slot(content, end, thinking >= 0)


def _places_of(stem: str, text: str) -> dict[str, list[int]]:
    """Find all marks at once: one by one, each turn of a rollout would read the text as often as
    there were turns.
    """
    found: dict[str, list[int]] = {}
    for match in re.finditer(f"{stem}n[0-9]+[tca]Z", text):
        found.setdefault(match[0], []).append(match.start())
    return found


def _call(name: str, arguments: Mapping[str, Any], call_id: str = _ID) -> dict[str, Any]:
    function = {"name": name, "arguments": dict(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as templates read it: its content a text, the arguments of calls objects."""
    plain = dict(message)
    content = plain.get("content")
    if not isinstance(content, str) and isinstance(content, Sequence):
        content = "".join(part["text"] for part in content)
    plain["content"] = content or ""
    if not plain.get("tool_calls"):
        plain.pop("tool_calls", None)
        return plain
    plain["tool_calls"] = [
        {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
        for call in plain["tool_calls"]
    ]
    return plain


def _arguments(function: Mapping[str, Any]) -> Any:
    """Return the arguments of a call as an object, where their text is one."""
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
