"""An event loop on a thread of its own, and calls into it from other threads and loops."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from concurrent.futures import CancelledError, Future, wait
from typing import Any, TypeVar

T = TypeVar("T")
_CLEANUP_S = 1.0
"""Seconds for the tasks that the end of the process cancels."""
_POLL_S = 0.5
"""Between two looks for a signal."""


class Ended(Exception):
    """The other thread's loop has ended."""


class LoopThread:
    """An event loop on a thread of its own, which starts with the first call."""

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._lock = threading.RLock()  # a signal's handler may come in between
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def call(self, coroutine: Coroutine[Any, Any, T], deadline: float) -> T:
        """Run a coroutine on the loop, with the caller's context variables, and return its result.

        Raises TimeoutError at `deadline` (of time.monotonic()), and Ended when the loop has ended
        or ends meanwhile.
        """
        return await within(self.start(coroutine), deadline)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Do as `call` for a caller on another thread.

        Ctrl-C cancels the coroutine and waits for its end; a second one does not wait, nor does the
        TimeoutError after `timeout_s`.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("the event loop would wait for itself: use await")
        tasks: list[asyncio.Task[Any]] = []

        async def watched() -> T:
            tasks.extend(asyncio.all_tasks() & {asyncio.current_task()})
            return await coroutine

        try:
            return _result(self.start(watched()), timeout_s)
        except (CancelledError, Ended):
            coroutine.close()  # it may not have begun
            raise Ended("its thread has ended") from None
        except BaseException as error:  # the coroutine's own, or a signal's
            cancelled = self.start(cancel(tasks))
            if not isinstance(error, TimeoutError):
                _result(cancelled)
            raise

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

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop, with the caller's context variables. Raises Ended."""
        with self._lock:
            return self._begin(coroutine)

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._is_ending:
            coroutine.close()
            raise Ended("its thread has ended")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread.start()
            atexit.register(self._cancel_all, self._loop)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _cancel_all(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel what the end of the process finds under way, so that it can clean up and nothing
        complains.
        """

        async def leave() -> None:
            await cancel(asyncio.all_tasks() - {asyncio.current_task()})

        loop.set_exception_handler(lambda *_: None)
        with contextlib.suppress(Ended, TimeoutError):
            self.run(leave(), _CLEANUP_S)

    async def _end(self, last: Callable[[], Awaitable[None]]) -> None:
        try:
            await last()
        finally:
            self._stop.set()

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            while not self._stop.is_set():
                # What ends a task is for those who wait for it, not for this thread.
                with contextlib.suppress(asyncio.CancelledError, SystemExit, KeyboardInterrupt):
                    runner.run(self._stop.wait())


async def cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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


def _result(future: Future[T], timeout_s: float | None = None) -> T:
    """Wait for a result. A signal that another thread receives, or that arrives just before the
    main one waits, does not wake it; so it looks.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while not future.done():
        if (remaining_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        wait((future,), min(remaining_s, _POLL_S))
    return future.result()


async def within(future: Future[T], deadline: float) -> T:
    """Return the result of another thread's work. Raises TimeoutError at `deadline`, after which
    it cancels what can be cancelled, and Ended when somebody else has cancelled it.
    """
    if future.done():
        return future.result()
    # Cancelled with it: the task behind `future`, but not a call of `background`, which runs.
    wrapped = asyncio.wrap_future(future)
    try:
        done, _ = await asyncio.wait({wrapped}, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise TimeoutError
        if wrapped.cancelled():
            raise Ended("its thread has ended")
        return wrapped.result()
    finally:
        wrapped.cancel()
