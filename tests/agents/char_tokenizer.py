"""A tokenizer that tests can read, and an engine that says what they want in its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from make import Engine

from flowtrain.inference.protocol import EngineError
from flowtrain.records import Sampling


class CharTokenizer:
    """One token per character, and a chat template that is the message alone."""

    chat_template: str | None = "yes"
    eos_token_id = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        return conversation[0]["content"]


class ChatChars(CharTokenizer):
    """Its chat template is the roles in brackets."""

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and add_generation_prompt
        turns = "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation)
        return f"{turns}<assistant>"


def says(*lines: str, fails: bool = False, **options: Any) -> Engine:
    """An engine that says the line of its seed among these, or fails."""

    def say(prompt: str, sampling: Sampling) -> list[int]:
        return list(map(ord, lines[sampling.seed % len(lines)]))[: sampling.max_new_tokens]

    error = EngineError("it is gone") if fails else None
    given = {"version": 7, "max_tokens": 1000, "decode": CharTokenizer().decode, "error": error}
    return Engine(say, **{**given, **options})
