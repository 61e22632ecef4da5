"""The engine protocol: what the flow and the trainer ask of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flowtrain.records import Call, Sample, Sampling


class EngineError(RuntimeError):
    """An engine failed for good."""


class Scorer(Protocol):
    """Tells log-probs of tokens that are there already."""

    async def score(
        self, samples: Sequence[Sample], temperature: float
    ) -> tuple[int, list[tuple[float, ...]]]:
        """Score the responses of samples, all by the same weights.

        Returns the weights' version, and a log-prob per response token of each sample, in order.
        """


class Engine(Scorer, Protocol):
    """Tokens in, tokens out, at a known weight version."""

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""

    @property
    def max_tokens(self) -> int:
        """Longest prompt and response together."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Call:
        """Sample one response and answer by `sampling.deadline_s`, even with part of it."""

    def load(self, version: int) -> None:
        """Bring the weights to a version of the store."""

    def sleep(self) -> None:
        """Give up memory until the next load or request, if the engine can; no request may be under
        way.
        """

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last load and the counts of failures so far."""

    def close(self) -> None:
        """Free what the engine holds; it is not used any more."""


@dataclass(slots=True)
class NoEngine:
    """The engine of a rank that only trains: no request comes to it."""

    max_tokens: int
    version: int = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Call:
        raise AssertionError("a rank that only trains gets no task")

    async def score(
        self, samples: Sequence[Sample], temperature: float
    ) -> tuple[int, list[tuple[float, ...]]]:
        raise AssertionError("a rank that only trains scores by its trainer")

    def load(self, version: int) -> None:
        self.version = version

    def sleep(self) -> None:
        """It holds nothing."""

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """It holds nothing."""
