"""Coroutines in virtual time: where nothing is ready, the clock jumps to the next timer. What
takes a minute by its timers takes no time, and a busy machine changes no number.

For code that waits for timers and for functions in executors alone. While such a function runs the
clock stands still. Sockets and other processes have a time of their own, so they are refused.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")


@dataclass
class Clock:
    """Seconds that only the timers of its loops move."""

    now: float = 1000.0


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, as `asyncio.run` does, in virtual time."""
    with clock():
        return asyncio.run(main)


@contextmanager
def clock() -> Iterator[Clock]:
    """New event loops, one per `run_to_end`, and the clocks of `time` have one virtual time; not
    for threads that were there before, whose loops would sleep until it has come.
    """
    shared, others = Clock(), {*threading.enumerate()} - {threading.current_thread()}

    def own(real: Callable[[], float]) -> Callable[[], float]:
        return lambda: real() if threading.current_thread() in others else shared.now

    with (
        patch("asyncio.events.new_event_loop", lambda: _Loop(shared)),
        patch("flowtrain.utils.event_loop._shared.run", lambda work, _: asyncio.run(work)),
        patch("time.monotonic", own(time.monotonic)),
        patch("time.perf_counter", own(time.perf_counter)),
    ):
        yield shared


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_working = 0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        self._num_working += 1
        working = super().run_in_executor(executor, func, *args)
        working.add_done_callback(self._worked)
        return working

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._num_working += 1
        await super().shutdown_default_executor(*args)
        self._num_working -= 1

    def _worked(self, _: asyncio.Future[Any]) -> None:
        self._num_working -= 1

    def jump(self, seconds: float | None) -> bool:
        """Let time pass, unless a function runs in an executor; tell whether it passed."""
        if self._num_working:
            return False
        assert seconds is not None, "all wait for what no timer and no executor brings"
        self._clock.now += seconds
        return True


class _Jumping(selectors.DefaultSelector):
    """Waits for executors alone; they wake the loop through its own pipe."""

    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert len(self.get_map()) <= 1, "sockets know nothing of virtual time"
        if (ready := super().select(0)) or timeout == 0:
            return ready
        return [] if self._loop.jump(timeout) else super().select(None)
