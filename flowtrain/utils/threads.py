"""An event loop on a thread of its own, and calls into it from other threads and loops."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")


class Ended(Exception):
    """The other thread's loop has ended."""


class LoopThread:
    """An event loop on a thread of its own, for connection pools and engines, which outlive the
    loops of their callers.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._lock = threading.Lock()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, coroutine: Coroutine[Any, Any, T], deadline: float) -> T:
        """Run a coroutine on the loop, with the caller's context variables, and return its result.

        Raises TimeoutError at `deadline` (of time.monotonic()), and Ended when the loop has ended
        or ends meanwhile.
        """
        return await within(self._start(coroutine), deadline)

    def run(self, coroutine: Coroutine[Any, Any, T], deadline: float) -> T:
        """Do as `call` for a caller without a loop."""
        answer = self._start(coroutine)
        try:
            return answer.result(max(0.0, deadline - time.monotonic()))
        except CancelledError:
            raise Ended("its thread has ended") from None
        finally:
            answer.cancel()  # it took too long, or Ctrl-C came; else this does nothing

    def stop(self, last: Callable[[], Awaitable[None]]) -> None:
        """Take no more calls, run `last` and end, without waiting for it; a second call does
        nothing.
        """
        with contextlib.suppress(Ended), self._lock:
            self._begin(self._end(last))
            self._is_ending = True

    def close(self, last: Callable[[], Awaitable[None]], timeout_s: float) -> None:
        """Stop and wait for the end; from any other thread."""
        self.stop(last)
        self._thread.join(timeout_s)

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            return self._begin(coroutine)

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._is_ending:
            coroutine.close()
            raise Ended("its thread has ended")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _end(self, last: Callable[[], Awaitable[None]]) -> None:
        try:
            await last()
        finally:
            self._stop.set()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop.wait())


def background(call: Callable[[], T], name: str) -> Future[T]:
    """Run a call on a thread of its own, which the end of the process does not wait for, as it does
    for those of ThreadPoolExecutor and asyncio.to_thread. None of those who wait can cancel it.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    threading.Thread(target=settle, args=(future, call), name=name, daemon=True).start()
    return future


def settle(future: Future[T], call: Callable[[], T]) -> None:
    """Give the future the result of a call, or what it raises: that is for those who wait."""
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001  # SystemExit too, or they would wait for ever
        future.set_exception(error)


async def within(future: Future[T], deadline: float) -> T:
    """Return the result of another thread's work. Raises TimeoutError at `deadline`, after which
    it cancels what can be cancelled, and Ended when somebody else has cancelled it.
    """
    if future.done():
        return future.result()
    mine = asyncio.wrap_future(future)
    try:
        done, _ = await asyncio.wait({mine}, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise TimeoutError
        if mine.cancelled():
            raise Ended("its thread has ended")
        return mine.result()
    finally:
        mine.cancel()
