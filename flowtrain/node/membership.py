"""A node's membership of a dataflow: its requests, on threads so that the event loop goes on, and
its renewals from a thread of their own, so that a busy event loop loses no lease.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from flowtrain.dataflow.contract import (
    Dataflow,
    Join,
    Joined,
    Lease,
    LeaseRequest,
    Leases,
    Push,
    Pushed,
    Release,
    Renewal,
    Renewed,
)
from flowtrain.utils.threads import settle

_Q = TypeVar("_Q")
_A = TypeVar("_A")
_NUM_THREADS = 32
_MAX_REASON = 500

LeaseKey = tuple[int, int]
"""(work item, attempt)"""


def key_of(lease: Lease) -> LeaseKey:
    return lease.work_item, lease.attempt


class Membership:
    """The dataflow as one node sees it. Coroutines raise Refused and Unavailable."""

    def __init__(
        self,
        dataflow: Dataflow,
        request: Join,
        joined: Joined,
        sampled: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`sampled` counts the tokens that this process has sampled, by policy."""
        self.joined = joined
        self._dataflow = dataflow
        self._sampled = sampled
        self._request = request
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "dataflow")
        self._sent: list[float] = []
        """When the requests without an answer were sent."""

    @classmethod
    def join(
        cls,
        dataflow: Dataflow,
        name: str,
        layouts: Mapping[str, str],
        sampled: Callable[[], Mapping[str, int]] = dict,
    ) -> Membership:
        """Join as a new process: the dataflow keeps the layouts that a process announced first."""
        request = Join(name, uuid.uuid4().hex, layouts)
        return cls(dataflow, request, dataflow.join(request), sampled)

    @property
    def silent_s(self) -> float:
        """Seconds that the oldest request has waited for its answer; below 0 if none waits."""
        return time.monotonic() - min(self._sent, default=math.inf)

    async def lease(
        self, num: int, versions: Mapping[str, int], busy_s: float, waited_s: float
    ) -> Leases:
        request = LeaseRequest(
            self._request.node,
            self._request.life,
            num,
            versions=versions,
            busy_s=busy_s,
            waited_s=waited_s,
            key=uuid.uuid4().hex,
            sampled=self._sampled(),
        )
        return await self._ask(self._dataflow.lease, request)

    async def renewals(self, held: Callable[[], Collection[LeaseKey]]) -> AsyncIterator[Renewed]:
        """Renew the leases that are held, at a third of their time, and yield the answers; without
        any lease, ask for news of the policies. `held` is called on another thread.
        """
        loop = asyncio.get_running_loop()
        answers: asyncio.Queue[Future[Renewed]] = asyncio.Queue()
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(self.joined.lease_s / 3):
                answer: Future[Renewed] = Future()
                settle(answer, lambda: self._renew(held()))
                with suppress(RuntimeError):  # the loop has ended meanwhile
                    loop.call_soon_threadsafe(answers.put_nowait, answer)
                if answer.exception() is not None:
                    return

        threading.Thread(target=renew, name="renewals", daemon=True).start()
        try:
            while True:
                yield (await answers.get()).result()
        finally:
            ended.set()

    def _renew(self, leases: Collection[LeaseKey]) -> Renewed:
        sent = time.monotonic()
        self._sent.append(sent)
        try:
            if not leases:
                return Renewed((), self._dataflow.join(self._request).policies)
            own = (self._request.node, self._request.life)
            request = Renewal(*own, tuple(leases), self._sampled())
            return self._dataflow.renew(request)
        finally:
            self._sent.remove(sent)

    async def push(self, lease: Lease, payload: bytes) -> Pushed:
        request = Push(self._request.node, *key_of(lease), payload, sampled=self._sampled())
        return await self._ask(self._dataflow.push, request)

    async def release(
        self, leases: Iterable[LeaseKey], reason: str, is_failure: bool = False
    ) -> None:
        why = (reason[:_MAX_REASON], is_failure)
        request = Release(self._request.node, tuple(leases), *why, sampled=self._sampled())
        await self._ask(self._dataflow.release, request)

    def close(self) -> None:
        """Wait for nothing: requests under way end by their own deadlines."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _ask(self, call: Callable[[_Q], _A], request: _Q) -> _A:
        sent = time.monotonic()
        self._sent.append(sent)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call, request)
        finally:
            self._sent.remove(sent)
