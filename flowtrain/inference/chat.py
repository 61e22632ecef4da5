"""The protocol of chat models, text in and text out, and the meter of their cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


class ChatEngine(Protocol):
    """A model for frozen modules, tools and the judge: a frozen model, or the policy without
    training its tokens.
    """

    @property
    def name(self) -> str:
        """Engine, model and settings, which identify it in caches and manifests."""

    async def ask(self, prompt: str, *, seed: int = 0, deadline_s: float = 60.0) -> str:
        """Return the reply to one user message. Raises EngineError without a reply by the
        deadline.
        """


@dataclass(slots=True)
class Usage:
    """Tokens and cost of some requests."""

    prompt_tokens: int = 0
    reply_tokens: int = 0
    cost: float = 0.0


_usage: ContextVar[Usage | None] = ContextVar("usage", default=None)


@contextmanager
def metered() -> Iterator[Usage]:
    """Accumulate the usage of all chat requests inside the block, including child tasks. Wrap the
    task of a rollout to meter it separately.
    """
    usage = Usage()
    token = _usage.set(usage)
    try:
        yield usage
    finally:
        _usage.reset(token)


@dataclass(slots=True)
class Meter:
    """Counts requests to a model since its start, and their cost."""

    price_in: float = 0.0
    """Price of a million prompt tokens."""
    price_out: float = 0.0
    """Price of a million reply tokens."""
    requests: int = 0
    retries: int = 0
    failures: int = 0
    """Requests without a reply."""
    prompt_tokens: int = 0
    reply_tokens: int = 0

    def count(self, prompt_tokens: int, reply_tokens: int) -> None:
        """Count a reply."""
        self.prompt_tokens += prompt_tokens
        self.reply_tokens += reply_tokens
        if (usage := _usage.get()) is not None:
            usage.prompt_tokens += prompt_tokens
            usage.reply_tokens += reply_tokens
            usage.cost += self._cost(prompt_tokens, reply_tokens)

    def metrics(self) -> dict[str, float]:
        """Return the counts and the cost; all of them add up over ranks."""
        names = ("requests", "retries", "failures", "prompt_tokens", "reply_tokens")
        counts = {name: getattr(self, name) for name in names}
        return {**counts, "cost": self._cost(self.prompt_tokens, self.reply_tokens)}

    def _cost(self, prompt_tokens: int, reply_tokens: int) -> float:
        return (prompt_tokens * self.price_in + reply_tokens * self.price_out) / 1e6
