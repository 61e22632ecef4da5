"""A tokenizer that tests can read, and an engine that says what they want in its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowtrain.engines.protocol import EngineError
from flowtrain.types import Completion, FinishReason, Sampling, SamplingMask, VersionSpan


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


@dataclass
class Says:
    """An engine that says one line with the weights of version 7, or fails; it notes prompts."""

    line: str = ""
    max_tokens: int = 1000
    reason: FinishReason = FinishReason.STOP
    mask: SamplingMask | None = None
    fails: bool = False
    version: int = 7
    asked: list[tuple[str, Sampling]] = field(default_factory=list)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.asked.append(("".join(map(chr, prompt_ids)), sampling))
        if self.fails:
            raise EngineError("it is gone")
        ids = tuple(map(ord, self.line))
        spans = (VersionSpan(0, len(ids), self.version),) if ids else ()
        return Completion(ids, (-0.5,) * len(ids), spans, self.reason, self.mask)
