"""Deadlines of one rollout, and of many rollouts together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Deadline:
    """A moment by which work is due, `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left_s(self) -> float:
        """Return the seconds that are left; 0 once the moment has passed."""
        return max(0.0, self._at - time.monotonic())


class TurnsEnded(Exception):
    """The moment of the cutoff has come."""


class Cutoff:
    """Ends the turns of many rollouts together, at a moment that is set while they run.

    Belongs to one event loop. Example: async with cutoff(): ...
    """

    def __init__(self) -> None:
        self._when: float | None = None
        self._running: set[asyncio.Timeout] = set()

    def set(self, when: float) -> None:
        """Set the moment, in terms of the loop's time()."""
        self._when = when
        for timeout in self._running:
            timeout.reschedule(when)

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        """Cancel the block at that moment and raise TurnsEnded."""
        timeout = asyncio.timeout_at(self._when)
        try:
            async with timeout:
                self._running.add(timeout)
                try:
                    yield
                finally:
                    self._running.discard(timeout)
        except TimeoutError:
            if timeout.expired():
                raise TurnsEnded from None
            raise
