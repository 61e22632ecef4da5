"""End the turns of many rollouts together, at a moment that nobody knows yet when they start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TurnsEnded(Exception):
    """The moment has come."""


class Cutoff:
    """Belongs to one event loop. Example: async with cutoff(): ..."""

    def __init__(self) -> None:
        self._when: float | None = None
        self._running: set[asyncio.Timeout] = set()

    def set(self, when: float) -> None:
        """`when`: of the loop's time()."""
        self._when = when
        for timeout in self._running:
            timeout.reschedule(when)

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        """What runs inside is cancelled at that moment, and TurnsEnded raised."""
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
