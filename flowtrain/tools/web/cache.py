"""The answers of services and pages in this process, kept so that equal queries get equal results
and are paid for once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from flowtrain.tools.retrieval.passages import Passage, Source

T = TypeVar("T")
CACHE_MB = 64
"""MiB of hits, or of pages, that a tool keeps in a process."""


class Cache(Generic[T]):
    """Keeps results by key; the least recently used go first."""

    def __init__(self, max_mb: int) -> None:
        """Keep about `max_mb` MiB of text."""
        self._room = max_mb << 20
        self._entries: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._pending: dict[str, asyncio.Task[T]] = {}
        self._waiting: Counter[asyncio.Task[T]] = Counter()

    async def get(self, key: str, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the cached value, or else the result of `ask`, which concurrent callers share.
        Errors are shared but not cached. Cancelling all callers cancels the request.
        """
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key][0]
        if key not in self._pending:
            task = asyncio.create_task(ask())
            self._pending[key] = task
            task.add_done_callback(partial(self._keep, key))
        task = self._pending[key]
        self._waiting[task] += 1
        try:
            # Shielded: a caller that is cancelled does not take the answer from the others.
            return await asyncio.shield(task)
        finally:
            self._waiting[task] -= 1
            if not self._waiting[task]:
                del self._waiting[task]
                self._forget(key, task)  # whoever asks next gets a task of his own
                task.cancel()  # which does nothing once it is done

    def _keep(self, key: str, task: asyncio.Task[T]) -> None:
        self._forget(key, task)
        if task.cancelled() or task.exception() is not None:
            return
        result = task.result()
        size = len(key) + len(repr(result))
        self._entries[key] = (result, size)
        self._room -= size
        while self._room < 0:
            self._room += self._entries.popitem(last=False)[1][1]

    def _forget(self, key: str, task: asyncio.Task[T]) -> None:
        if self._pending.get(key) is task:
            del self._pending[key]


def cached(source: Source) -> Source:
    """Return the source behind a cache."""
    cache: Cache[Sequence[Passage]] = Cache(CACHE_MB)

    async def search(query: str, deadline_s: float) -> Sequence[Passage]:
        return await cache.get(query, lambda: source(query, deadline_s))

    return search
