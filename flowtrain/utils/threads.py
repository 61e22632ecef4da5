"""An event loop on a thread of its own, and calls into it from other threads and loops."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Ended(Exception):
    """The other thread's loop has ended."""


class Mailbox:
    """Calls into another thread's loop, many at a time: waking that thread for each of hundreds
    would cost more than the calls.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._is_due = False
        self._is_closed = False

    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Have the loop make a call. Raises Ended when the loop takes no more."""
        with self._lock:
            if self._is_closed or self.loop.is_closed():
                raise Ended("its thread has ended")
            self._calls.append((call, args))
            if not self._is_due:
                self.loop.call_soon_threadsafe(self._take)
                self._is_due = True

    def close(self) -> None:
        """Make the calls that have come and take no more; runs on the loop's own thread."""
        with self._lock:
            self._is_closed = True
        self._take()

    def _take(self) -> None:
        with self._lock:
            calls = self._calls
            self._calls = deque()
            self._is_due = False
        for call, args in calls:
            call(*args)


class LoopThread:
    """An event loop on a thread of its own, for connection pools and engines, which outlive the
    loops of their callers.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._mailbox = Mailbox(self._loop)
        self._replies: Mailbox | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, coroutine: Coroutine[Any, Any, T], deadline: float) -> T:
        """Run a coroutine on the loop, with the caller's context variables, and return its result.

        Raises TimeoutError at `deadline` (of time.monotonic()), and Ended when the loop has ended
        or ends meanwhile.
        """
        loop = asyncio.get_running_loop()
        replies = self._replies
        if replies is None or replies.loop is not loop:
            replies = self._replies = Mailbox(loop)
        answer: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()
        cancel = self._start(coroutine, lambda task: _post(replies, answer, task), context)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await answer
        except (TimeoutError, asyncio.CancelledError):
            cancel()
            raise

    def run(self, coroutine: Coroutine[Any, Any, T], deadline: float) -> T:
        """Do as `call` for a caller without a loop."""
        answer: Future[T] = Future()
        cancel = self._start(coroutine, lambda task: _settle(answer, task))
        try:
            return answer.result(max(0.0, deadline - time.monotonic()))
        finally:
            if not answer.done():  # it took too long, or Ctrl-C came
                cancel()

    def stop(self, last: Callable[[], Awaitable[None]]) -> None:
        """Take no more calls, run `last` and end, without waiting for it; a second call does
        nothing.
        """
        with contextlib.suppress(Ended):
            self._mailbox.post(lambda: self._loop.create_task(self._end(last)))

    def close(self, last: Callable[[], Awaitable[None]], timeout_s: float) -> None:
        """Stop and wait for the end; from any other thread."""
        self.stop(last)
        self._thread.join(timeout_s)

    def _start(
        self,
        coroutine: Coroutine[Any, Any, T],
        reply: Callable[[asyncio.Task[T]], object],
        context: contextvars.Context | None = None,
    ) -> Callable[[], None]:
        """Begin a task on the loop; returns what cancels it."""
        running: list[asyncio.Task[T]] = []

        def begin() -> None:
            running.append(self._loop.create_task(coroutine, context=context))
            running[0].add_done_callback(reply)

        def cancel() -> None:
            with contextlib.suppress(Ended):
                self._mailbox.post(lambda: running[0].cancel())

        try:
            self._mailbox.post(begin)
        except Ended:
            coroutine.close()
            raise
        return cancel

    async def _end(self, last: Callable[[], Awaitable[None]]) -> None:
        self._mailbox.close()
        try:
            await last()
        finally:
            self._stop.set()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop.wait())


def _post(replies: Mailbox, answer: asyncio.Future[T], task: asyncio.Task[T]) -> None:
    with contextlib.suppress(Ended):  # the caller's loop has ended
        replies.post(_settle, answer, task)


def _settle(answer: asyncio.Future[T] | Future[T], task: asyncio.Task[T]) -> None:
    error = Ended("its thread has ended") if task.cancelled() else task.exception()
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(task.result())


async def within(future: Future[T], deadline: float) -> T:
    """Return the result of another thread's work. Raises TimeoutError at `deadline`, and cancels
    what can be cancelled.
    """
    if future.done():
        return future.result()
    mine = asyncio.wrap_future(future)
    try:
        done, _ = await asyncio.wait({mine}, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise TimeoutError
        return mine.result()
    finally:
        mine.cancel()
