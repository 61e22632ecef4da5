"""What the flow and the trainer ask of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flowtrain.types import Completion, Sampling


class EngineError(RuntimeError):
    """An engine failed, and so did what was tried to mend it."""


class Engine(Protocol):
    """Tokens in, tokens out, at a known weight version."""

    @property
    def version(self) -> int:
        """The weights that sample now."""

    @property
    def max_tokens(self) -> int:
        """Prompt and response together may not be longer."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion and answer by `sampling.deadline_s`, even with part of it."""

    def load(self, version: int) -> None:
        """Sample with the weights `version` of the store from now on."""

    def sleep(self) -> None:
        """Give up memory until the next `load`, if the engine can; nothing is sampled meanwhile."""

    def metrics(self) -> dict[str, float]:
        """What the last load did, and what went wrong so far."""

    def close(self) -> None:
        """Free what the engine holds; it is not used any more."""


@dataclass(slots=True)
class NoEngine:
    """Of a rank that only trains: nobody asks it anything."""

    max_tokens: int
    version: int = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        raise AssertionError("no task falls to a rank that only trains")

    def load(self, version: int) -> None:
        self.version = version

    def sleep(self) -> None:
        """It holds nothing."""

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """It holds nothing."""
