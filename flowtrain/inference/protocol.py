"""The engine protocol: the interface that agents and the trainer require of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flowtrain.records import Call, Sample, Sampling


class EngineError(RuntimeError):
    """A permanent failure of an engine."""


class Scorer(Protocol):
    """Computes log-probs of given tokens."""

    async def score(
        self, samples: Sequence[Sample], temperature: float
    ) -> tuple[int, list[tuple[float, ...]]]:
        """Score the responses of samples, all under the same weights.

        Returns the version of the weights, and one log-prob in nats per response token of each
        sample, in order.
        """


class Engine(Scorer, Protocol):
    """Samples token ids from token ids, at a known weight version."""

    @property
    def version(self) -> int:
        """Version of the weights that sample currently."""

    @property
    def max_tokens(self) -> int:
        """Largest total number of prompt and response tokens."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Call:
        """Sample and return one response within `sampling.deadline_s` seconds, if necessary a
        partial one.
        """

    def load(self, version: int) -> None:
        """Update the weights to a version of the store."""

    def sleep(self) -> None:
        """Release memory until the next load or request, if the engine supports it; no request may
        be running.
        """

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last load and the number of failures so far."""

    def close(self) -> None:
        """Release the engine's resources; no call may follow."""


@dataclass(slots=True)
class NoEngine:
    """The engine of a rank that only trains and so receives no requests."""

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
        """Do nothing: there is no memory to release."""

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Do nothing: there are no resources to release."""
