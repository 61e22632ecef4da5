"""Let callers side by side share calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Together(Generic[K, V]):
    """A function of many keys for callers with one each.

    Callers within one turn of the event loop share its calls, of at most `size` keys. A pending key
    is not requested again.
    """

    def __init__(
        self, function: Callable[[Sequence[K]], Awaitable[Sequence[V]]], size: int = 1
    ) -> None:
        """`function` returns a value per key; what it raises, all of its callers do."""
        self._function, self._size = function, size
        self._answers: dict[K, asyncio.Future[V]] = {}
        """Answers to keys that wait or are under way."""
        self._waiting: list[K] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, key: K) -> V:
        """Return the value of a key."""
        if key not in self._answers:
            loop = asyncio.get_running_loop()
            self._answers[key] = loop.create_future()
            self._waiting.append(key)
            if len(self._waiting) == 1:
                loop.call_soon(self._start)
        return await asyncio.shield(self._answers[key])

    def _start(self) -> None:
        keys, self._waiting = self._waiting, []
        for first in range(0, len(keys), self._size):
            task = asyncio.ensure_future(self._run(keys[first : first + self._size]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, keys: Sequence[K]) -> None:
        futures = [self._answers[key] for key in keys]
        try:
            values = await self._function(keys)
        except asyncio.CancelledError:
            for future in futures:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001  # it is for those who asked
            for future in futures:
                future.set_exception(error)
                future.exception()  # they may be gone, and then it is no news to the loop
        else:
            for future, value in zip(futures, values, strict=True):
                future.set_result(value)
        finally:
            for key in keys:
                del self._answers[key]
