"""What frozen modules, tools and the judge ask of a language model: text in, text out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


class ChatEngine(Protocol):
    """A model that is not trained here, or the policy where its tokens are not."""

    @property
    def name(self) -> str:
        """Engine, model and settings: the key of caches and what a manifest says."""

    async def ask(self, prompt: str, *, seed: int = 0, deadline_s: float = 60.0) -> str:
        """The reply to one user message. Raises EngineError when there is none by the deadline, or
        at all.
        """


@dataclass(slots=True)
class Usage:
    """Tokens and money of some requests."""

    prompt_tokens: int = 0
    reply_tokens: int = 0
    cost: float = 0.0


_usage: ContextVar[Usage | None] = ContextVar("usage", default=None)


@contextmanager
def metered() -> Iterator[Usage]:
    """Adds up what is asked inside, by this task and those that it starts: with every rollout in a
    task of its own, that of each.
    """
    usage = Usage()
    token = _usage.set(usage)
    try:
        yield usage
    finally:
        _usage.reset(token)


@dataclass(slots=True)
class Meter:
    """What an engine was asked for since it started, and what that cost."""

    price_in: float = 0.0
    """Of a million prompt tokens."""
    price_out: float = 0.0
    """Of a million reply tokens."""
    requests: int = 0
    retries: int = 0
    failures: int = 0
    """Requests that got no reply."""
    prompt_tokens: int = 0
    reply_tokens: int = 0

    def count(self, prompt_tokens: int, reply_tokens: int) -> None:
        """A reply has come."""
        self.prompt_tokens += prompt_tokens
        self.reply_tokens += reply_tokens
        if (usage := _usage.get()) is not None:
            usage.prompt_tokens += prompt_tokens
            usage.reply_tokens += reply_tokens
            usage.cost += self._cost(prompt_tokens, reply_tokens)

    def metrics(self) -> dict[str, float]:
        """All of them add up over ranks."""
        counts = {
            name: getattr(self, name)
            for name in ("requests", "retries", "failures", "prompt_tokens", "reply_tokens")
        }
        return {**counts, "cost": self._cost(self.prompt_tokens, self.reply_tokens)}

    def _cost(self, prompt_tokens: int, reply_tokens: int) -> float:
        return (prompt_tokens * self.price_in + reply_tokens * self.price_out) / 1e6
