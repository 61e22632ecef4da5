"""A model's own chat template: its texts and its abilities."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from flowtrain.inference.special_tokens import special_tokens, unmarked
from flowtrain.inference.token_chat import TEMPLATE_ERRORS, ChatTokenizer, message_end, reply_end
from flowtrain.utils.text import THINK_END

Message = Mapping[str, Any]
"""A message as OpenAI's chat completions have it: role, content, tool_calls, tool_call_id."""

MARK = "pQ7xZ"  # mixed case, so that a template that changes the case of replies is found out
CALL_ID = "0" * 9  # of a call: strict templates want nine letters or digits
_USER: Message = {"role": "user", "content": f"{MARK}user"}
_THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which servers return a thinking, and templates look for it."""
_MAX_FIRST = 64
"""First prompts that are kept encoded: those of groups that are rolled out at once."""


class TemplateRewrites(Exception):
    """The chat template does not take these messages, or would change what stands before them."""


class ChatTemplate:
    """A tokenizer's chat template and its abilities."""

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
        if message["role"] == "assistant":
            return dict(unmarked(message))
        return {**message, "content": self._special.marked(message["content"])}

    def decode(self, ids: Sequence[int]) -> str:
        """Decode with special tokens, for people."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def text_of(self, response_ids: Sequence[int], ended: bool = False) -> str:
        """Decode a response without its end token (see `has_end`); other special tokens stay,
        because they may open tool calls.
        """
        return self.decode(response_ids[:-1] if self.has_end(response_ids, ended) else response_ids)

    def has_end(self, response_ids: Sequence[int], ended: bool = False) -> bool:
        """Return whether the last token of a response ends it: the template's token or the
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
        """Return whether the template describes tools to the model."""
        function = {
            "name": f"{MARK}tool",
            "description": "probe",
            "parameters": {"type": "object", "properties": {}},
        }
        return f"{MARK}tool" in self._probe([_USER], [{"type": "function", "function": function}])

    @cached_property
    def takes_results(self) -> bool:
        """Return whether the template shows messages of the role "tool"."""
        return f"{MARK}result" in self._answered

    @cached_property
    def says_first(self) -> bool:
        """Return whether the template shows the text of a reply with calls before their results."""
        return f"{MARK}said" in self._answered.partition(f"{MARK}result")[0]

    @cached_property
    def _answered(self) -> str:
        result = {"role": "tool", "name": "f", "content": f"{MARK}result", "tool_call_id": CALL_ID}
        asks = {"role": "assistant", "content": f"{MARK}said", "tool_calls": [tool_call("f", {})]}
        return self._probe([_USER, asks, result])

    @cached_property
    def thinking_key(self) -> str:
        """Return the key of a reply under which it looks for a thinking; "" where it knows none, so
        that a thinking stands in the content.
        """
        calls = {"tool_calls": [tool_call("f", {})]}
        for key in _THINKING_KEYS:
            thinks = {"role": "assistant", "content": "", key: f"{MARK}thought"}
            if any(thinks[key] in self._probe([_USER, {**thinks, **more}]) for more in ({}, calls)):
                return key
        return ""

    @cached_property
    def call_closing(self) -> str:
        """Return the text after a reply that calls a tool, from its last special token on, where it
        is another than `closing`, e.g. "<|call|>".
        """
        asks = {"role": "assistant", "content": "", "tool_calls": [tool_call("f", {"text": MARK})]}
        end = self._probe([_USER, asks], (), False).rpartition(MARK)[2]
        own = "" if end.endswith(self.closing) else self._special.last_in(end)
        return own or self.closing

    @cached_property
    def takes_system(self) -> bool:
        """Return whether the template shows a message of the role "system"."""
        system = {"role": "system", "content": f"{MARK}system"}
        return f"{MARK}system" in self._probe([system, _USER])

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
        """Return whether decoding can leave a token out."""
        return not self._tokenizer.decode([token], skip_special_tokens=True)

    def _closing(self) -> str:
        reply = {"role": "assistant", "content": f"{MARK}reply"}
        _, mark, closing = self.render([_USER, reply], reply=False).rpartition(f"{MARK}reply")
        if not mark:
            raise TemplateRewrites("the chat template does not show what the assistant said")
        return closing

    def _probe(self, messages: Sequence[Message], *options: Any) -> str:
        try:
            return self.render(messages, *options)
        except TemplateRewrites:
            return ""


def tool_call(name: str, arguments: Mapping[str, Any], call_id: str = CALL_ID) -> dict[str, Any]:
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
