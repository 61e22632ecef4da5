"""A tokenizer that tests can read."""

from __future__ import annotations

from collections.abc import Sequence


class CharTokenizer:
    """One token per character, and a chat template that is the message alone."""

    chat_template: str | None = "yes"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        return conversation[0]["content"]
