"""Connections and the like belong to one event loop; every `asyncio.run` makes a new loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Generic, Protocol, TypeVar


class Closes(Protocol):
    async def aclose(self) -> None: ...


T = TypeVar("T", bound=Closes)


class PerLoop(Generic[T]):
    """One T for each running loop, made on first use and closed as its loop ends.

    An asynchronous generator holds it, because asyncio closes open generators before a loop ends.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._held: dict[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[T, None]]] = {}

    async def get(self) -> T:
        """Return the T of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._held:
            holder = self._hold(loop)
            value = await anext(holder)  # never suspends, so no other task comes in between
            self._held[loop] = (value, holder)
        return self._held[loop][0]

    async def _hold(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[T, None]:
        value = self._make()
        try:
            yield value
        finally:
            del self._held[loop]
            await value.aclose()
