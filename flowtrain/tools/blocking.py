"""A fixed number of threads for tools whose libraries block, so that the event loop never waits."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from flowtrain.tools.base import ToolError
from flowtrain.utils.threads import settle

T = TypeVar("T")


class BlockingPool:
    """Runs blocking calls, `num_threads` at a time. Safe to share between event loops and threads.

    The deadline is that of the awaiting task, which `run_tool` cancels: a call that still waits is
    dropped, a call that runs keeps its thread until it returns. So give the library a timeout too,
    or that thread is lost to the pool. A lost thread does not hold up the end of the process, as
    those of `ThreadPoolExecutor` and `asyncio.to_thread` do.
    """

    def __init__(self, num_threads: int, name: str = "tool") -> None:
        """Start threads, called `name`, as they are needed."""
        assert num_threads > 0, num_threads
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._num_threads = num_threads
        self._name = name
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False

    async def run(self, call: Callable[[], T]) -> T:
        """Return or raise what the call does."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise ToolError("the tool is closed")
            self._calls.put((future, call))
            if len(self._threads) < self._num_threads:
                self._threads.append(
                    threading.Thread(target=self._work, name=self._name, daemon=True)
                )
                self._threads[-1].start()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Let the threads end after the calls that wait; may be called twice."""
        with self._lock:
            self._is_closed = True
            for _ in self._threads:
                self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                settle(future, call)
