"""Conversations whose token ids only grow, through a model's own chat template.

The ids that a policy sampled are never decoded and encoded again. A later prompt is the earlier
prompt, the sampled ids, and the ids of what the template writes after them: the end of the
message where the sample lacks it, the new messages, and the beginning of the next reply. To find
that text, the whole conversation is rendered with a placeholder for each sampled message. What
stands between the placeholders must be what it was before, or else the template rewrites its
history and `TemplateRewrites` is raised.

Some templates take the thinking out of earlier replies. The later prompt is then a branch: of such
a reply it has the sampled ids after the end of the thinking, and no others.

With `agent.history = "as_deployed"` no ids are kept: each prompt is rendered and encoded `anew`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flowtrain.agents.chat.template import (
    CALL_ID,
    MARK,
    ChatTemplate,
    Message,
    TemplateRewrites,
    tool_call,
)
from flowtrain.utils.text import THINK_END


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
        stem = f"{MARK}{secrets.token_hex(8)}"  # in no message, as nobody can have known it
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

    def anew(self, messages: Sequence[Message]) -> Conversation:
        """Go on with these messages, as the template renders them: whatever was sampled is encoded
        from its text again. Raises TemplateRewrites.
        """
        text = self.template.render(messages, self.tools)
        gap = _Gap(text, self.template.encode(text))
        return Conversation(self.template, tuple(messages), self.tools, (gap,))


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
        call = tool_call(
            first["function"]["name"], {"text": self.argument}, first.get("id") or CALL_ID
        )
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
