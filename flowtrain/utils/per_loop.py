"""Keep for each event loop what belongs to it: every `asyncio.run` makes a loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Closes(Protocol):
    async def aclose(self) -> None: ...


T = TypeVar("T", bound=Closes)


class Gate:
    """Lets a number of callers in at a time: `async with gate(): ...`."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._of_loops = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

    def __call__(self) -> asyncio.Semaphore:
        """Return the semaphore of the event loop that runs."""
        loop = asyncio.get_running_loop()
        return self._of_loops.setdefault(loop, asyncio.Semaphore(self._number))


@dataclass
class _Asked(Generic[K, V]):
    answers: dict[K, asyncio.Future[V]] = field(default_factory=dict)
    """Of keys that wait or are under way."""
    waiting: list[K] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class Together(Generic[K, V]):
    """A function of many keys for callers with one each.

    Those that call within one turn of the event loop share its calls, of at most `size` keys. A key
    that is under way is not asked again.
    """

    def __init__(
        self, function: Callable[[Sequence[K]], Awaitable[Sequence[V]]], size: int = 1
    ) -> None:
        """`function` returns a value per key; what it raises, all of its callers do."""
        self._function, self._size = function, size
        self._of_loops = WeakKeyDictionary[asyncio.AbstractEventLoop, _Asked[K, V]]()

    async def __call__(self, key: K) -> V:
        """Return the value of a key."""
        loop = asyncio.get_running_loop()
        asked = self._of_loops.setdefault(loop, _Asked())
        if key not in asked.answers:
            asked.answers[key] = loop.create_future()
            asked.waiting.append(key)
            if len(asked.waiting) == 1:
                loop.call_soon(self._start, asked)
        return await asyncio.shield(asked.answers[key])

    def _start(self, asked: _Asked[K, V]) -> None:
        keys, asked.waiting = asked.waiting, []
        for first in range(0, len(keys), self._size):
            task = asyncio.ensure_future(self._run(asked, keys[first : first + self._size]))
            asked.tasks.add(task)
            task.add_done_callback(asked.tasks.discard)

    async def _run(self, asked: _Asked[K, V], keys: Sequence[K]) -> None:
        futures = [asked.answers[key] for key in keys]
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
                del asked.answers[key]


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
