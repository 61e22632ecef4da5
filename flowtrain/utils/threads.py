"""Calls between the event loops of two threads."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Ended(Exception):
    """The other thread's loop has ended."""


class Mailbox:
    """Calls into another thread's loop, many at a time: to wake that thread for each of hundreds
    would cost more than the calls.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._is_due, self._is_closed = False, False

    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Raises Ended when nobody will take it any more."""
        with self._lock:
            if self._is_closed or self.loop.is_closed():
                raise Ended("its thread has ended")
            self._calls.append((call, args))
            if not self._is_due:
                self.loop.call_soon_threadsafe(self.take)
                self._is_due = True

    def take(self) -> None:
        """Make the calls; on the loop's own thread."""
        with self._lock:
            calls, self._calls, self._is_due = self._calls, deque(), False
        for call, args in calls:
            call(*args)

    def close(self) -> None:
        """Take no more, after what has come already."""
        with self._lock:
            self._is_closed = True
        self.take()


class Caller:
    """Runs coroutines on the loop behind `mailbox` for callers on other loops."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._replies: Mailbox | None = None

    async def call(self, coroutine: Coroutine[Any, Any, T], deadline: float) -> T:
        """Its result; the coroutine sees the caller's context variables.

        Raises TimeoutError at `deadline` (of time.monotonic()), and Ended when the other loop has
        ended or ends.
        """
        loop = asyncio.get_running_loop()
        replies = self._replies
        if replies is None or replies.loop is not loop:
            replies = self._replies = Mailbox(loop)
        answer: asyncio.Future[T] = loop.create_future()
        running: list[asyncio.Task[T]] = []
        try:
            self._mailbox.post(
                contextvars.copy_context().run,
                _run,
                coroutine,
                lambda task: _post(replies, answer, task),
                running,
            )
        except Ended:
            coroutine.close()
            raise
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await answer
        except (TimeoutError, asyncio.CancelledError):
            with contextlib.suppress(Ended):
                self._mailbox.post(lambda: running[0].cancel())
            raise


class LoopThread:
    """An event loop on a thread of its own, for what outlives the loops of its callers: connection
    pools, for one.
    """

    def __init__(self, name: str) -> None:
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        self._mailbox = Mailbox(self._loop)
        self._caller = Caller(self._mailbox)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, coroutine: Coroutine[Any, Any, T], deadline: float) -> T:
        """See `Caller.call`."""
        return await self._caller.call(coroutine, deadline)

    def run(self, coroutine: Coroutine[Any, Any, T], deadline: float) -> T:
        """`call` for a caller without a loop."""
        answer: Future[T] = Future()
        running: list[asyncio.Task[T]] = []
        try:
            self._mailbox.post(_run, coroutine, lambda task: _settle(answer, task), running)
        except Ended:
            coroutine.close()
            raise
        try:
            return answer.result(max(0.0, deadline - time.monotonic()))
        finally:
            if not answer.done():  # it took too long, or Ctrl-C came
                with contextlib.suppress(Ended):
                    self._mailbox.post(lambda: running[0].cancel())

    def close(self, last: Coroutine[Any, Any, None], timeout_s: float) -> None:
        """Run `last` and end; may be called from any thread, once."""

        async def end() -> None:
            await last
            self._stop.set()

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        await self._stop.wait()
        self._mailbox.close()


def _run(
    coroutine: Coroutine[Any, Any, T],
    reply: Callable[[asyncio.Task[T]], object],
    running: list[asyncio.Task[T]],
) -> None:
    running.append(asyncio.get_running_loop().create_task(coroutine))
    running[0].add_done_callback(reply)


def _post(replies: Mailbox, answer: asyncio.Future[T], task: asyncio.Task[T]) -> None:
    with contextlib.suppress(Ended):  # who asked has gone, and its loop with it
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
    """The result of another thread's work. Raises TimeoutError at `deadline`, and cancels what can
    be cancelled.
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
