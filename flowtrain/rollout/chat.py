"""What frozen modules, tools and the judge ask of a language model: text in, text out."""

from __future__ import annotations

from typing import Protocol


class ChatEngine(Protocol):
    """A model that is not trained here, or the policy where its tokens are not."""

    @property
    def name(self) -> str:
        """Engine, model and settings: the key of caches and what a manifest says."""

    async def ask(self, prompt: str, *, seed: int = 0, deadline_s: float = 60.0) -> str:
        """The reply to one user message. Raises EngineError when there is none by the deadline, or at all."""
