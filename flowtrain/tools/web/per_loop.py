"""What belongs to an event loop, such as connections, in objects that live through many: every
`asyncio.run` brings a new loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Generic, Protocol, TypeVar


class Closes(Protocol):
    async def aclose(self) -> None: ...


T = TypeVar("T", bound=Closes)


class PerLoop(Generic[T]):
    """One T for each running loop, made when it is first asked for and closed as its loop ends.

    The generator that holds it is what makes that so: asyncio closes the asynchronous generators
    that are still open before a loop goes.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._held: dict[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[T, None]]] = {}

    async def get(self) -> T:
        """The present loop's."""
        loop = asyncio.get_running_loop()
        if loop not in self._held:
            holder = self._hold(loop)
            self._held[loop] = (
                await anext(holder),
                holder,
            )  # nothing is waited for, so nobody comes in between
        return self._held[loop][0]

    async def _hold(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[T, None]:
        value = self._make()
        try:
            yield value
        finally:
            del self._held[loop]
            await value.aclose()
