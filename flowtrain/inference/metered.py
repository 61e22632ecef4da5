"""An engine that counts the tokens it returns, for the account of a run's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowtrain.inference.protocol import Engine
from flowtrain.records import Completion, Sample, Sampling


@dataclass(slots=True)
class MeteredEngine:
    """Another engine as it is, and the number of tokens that it has returned to those who sample
    through this one. What a request had sampled when it was given up is not returned.
    """

    engine: Engine
    num_tokens: int = 0

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def max_tokens(self) -> int:
        return self.engine.max_tokens

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        completion = await self.engine.generate(prompt_ids, sampling)
        self.num_tokens += len(completion.ids)
        return completion

    async def score(
        self, samples: Sequence[Sample], temperature: float
    ) -> tuple[int, list[tuple[float, ...]]]:
        return await self.engine.score(samples, temperature)

    def load(self, version: int) -> None:
        self.engine.load(version)

    def sleep(self) -> None:
        self.engine.sleep()

    def metrics(self) -> dict[str, float]:
        return self.engine.metrics()

    def close(self) -> None:
        self.engine.close()


@dataclass(frozen=True, slots=True)
class Meter:
    """The counts of several engines, by policy."""

    engines: Mapping[str, MeteredEngine]

    @classmethod
    def of(cls, engines: Mapping[str, Engine]) -> Meter:
        return cls({name: MeteredEngine(engine) for name, engine in engines.items()})

    def read(self) -> dict[str, int]:
        """Return the tokens that each policy has sampled so far."""
        return {name: engine.num_tokens for name, engine in self.engines.items()}

    def take(self, policy: str) -> int:
        """Return the tokens that a policy has sampled since the last call."""
        engine = self.engines[policy]
        num_tokens, engine.num_tokens = engine.num_tokens, 0
        return num_tokens
