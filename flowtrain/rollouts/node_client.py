"""Requests of a node to a dataflow, and renewals from a thread of their own, so that a busy event
loop loses no lease.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from flowtrain.rollouts.contract import (
    WAITING,
    Dataflow,
    Disown,
    Join,
    Lease,
    LeaseRequest,
    Leases,
    PolicyState,
    Push,
    Pushed,
    Release,
    Renewal,
    Renewed,
)
from flowtrain.rollouts.wire import MAX_WAIT_S
from flowtrain.utils.threads import settle

_MAX_REASON = 500

LeaseKey = tuple[int, int]
"""(work item, attempt)"""


def key_of(lease: Lease) -> LeaseKey:
    return lease.work_item, lease.attempt


class AsyncDataflow(Dataflow, Protocol):
    """A dataflow that coroutines ask, too."""

    async def ask(self, name: str, request: Any) -> Any: ...


class NodeClient:
    """The dataflow as one process of a node sees it. Coroutines raise Refused and Unavailable."""

    def __init__(
        self, dataflow: AsyncDataflow, name: str, layouts: Mapping[str, str] | None = None
    ) -> None:
        """Join, as a new process; `layouts`: see `announce`."""
        self._dataflow = dataflow
        self._request = Join(name, uuid.uuid4().hex, layouts or {})
        self.joined = dataflow.join(self._request)
        self._policies = self.joined.policies
        self._sampled: Callable[[], Mapping[str, int]] = dict
        self._reason = ""
        """Why the last answer had no more leases."""
        self._pending: LeaseRequest | None = None
        """The request for leases that has no answer yet."""
        self._sent: list[float] = []
        """When the requests without an answer were sent."""

    def announce(
        self, layouts: Mapping[str, str], sampled: Callable[[], Mapping[str, int]]
    ) -> None:
        """Say with which models this process samples; `sampled` counts the tokens that it has
        sampled, by policy.
        """
        self._request, self._sampled = replace(self._request, layouts=layouts), sampled
        self._policies = self._dataflow.join(self._request).policies

    @property
    def policies(self) -> Mapping[str, PolicyState]:
        """Return the policies as the last answer described them."""
        return self._policies

    @property
    def silent_s(self) -> float:
        """Return the seconds that the oldest request has waited for its answer; below 0 if none
        waits, or may wait for something to lease.
        """
        return time.monotonic() - min(self._sent, default=math.inf)

    async def lease(
        self, num: int, versions: Mapping[str, int], busy_s: float, waited_s: float
    ) -> Leases:
        """Ask for work items. Where there was none before, the answer waits until there is."""
        began, wait_s = time.monotonic(), self._patience_s(versions)
        self._pending = LeaseRequest(
            self._request.node,
            self._request.life,
            num,
            versions=versions,
            busy_s=busy_s,
            waited_s=waited_s,
            key=uuid.uuid4().hex,
            sampled=self._sampled(),
            wait_s=wait_s,
            heard={name: state.version for name, state in self._policies.items()},
        )
        answer = await self._ask("lease", self._pending, wait_s)
        self._pending, self._policies, self._reason = None, answer.policies, answer.reason
        # The next request is held until there is something, so it need not come later.
        has_begun_to_wait = not wait_s and self._patience_s(versions)
        left_s = answer.retry_after_s - (time.monotonic() - began)
        return replace(answer, retry_after_s=0.0 if has_begun_to_wait else max(0.0, left_s))

    def _patience_s(self, versions: Mapping[str, int]) -> float:
        """Return how long the answer to a request may wait: not at all while there are newer
        weights to load, with which another answer would come.
        """
        is_behind = any(
            state.version != versions.get(name, state.version)
            for name, state in self._policies.items()
        )
        if is_behind or self._reason not in WAITING:
            return 0.0
        # Not all nodes the same, or those that began to wait together would ask again together.
        return min(MAX_WAIT_S, self.joined.lease_s / 2) * random.uniform(0.7, 1.0)

    async def late_leases(self) -> Sequence[Lease]:
        """End the request for leases that has no answer yet, and return those that it got."""
        if self._pending is None:
            return ()
        return (await self._ask("lease", replace(self._pending, wait_s=0.0))).leases

    async def renewals(self, held: Callable[[], Collection[LeaseKey]]) -> AsyncIterator[Renewed]:
        """Renew the leases that are held, at a third of their time, and yield the answers; without
        any, ask for news of the policies, unless a request for leases does. `held` is called on
        another thread.
        """
        loop = asyncio.get_running_loop()
        answers: asyncio.Queue[Future[Renewed]] = asyncio.Queue()
        stopped = threading.Event()

        def renew() -> None:
            while not stopped.wait(self.joined.lease_s / 3):
                leases = held()
                if not leases and self._pending is not None:
                    continue
                answer: Future[Renewed] = Future()
                settle(answer, partial(self.renew, leases))
                with suppress(RuntimeError):  # the loop has ended meanwhile
                    loop.call_soon_threadsafe(answers.put_nowait, answer)
                if answer.exception() is not None:
                    return

        threading.Thread(target=renew, name="renewals", daemon=True).start()
        try:
            while True:
                yield (await answers.get()).result()
        finally:
            stopped.set()

    def renew(self, leases: Collection[LeaseKey] = ()) -> Renewed:
        """Renew the leases, and learn how the policies are."""
        sent_s = time.monotonic()
        self._sent.append(sent_s)
        try:
            identity = (self._request.node, self._request.life)
            answer = self._dataflow.renew(Renewal(*identity, tuple(leases), self._sampled()))
        finally:
            self._sent.remove(sent_s)
        self._policies = answer.policies
        return answer

    async def push(self, lease: Lease, payload: bytes) -> Pushed:
        request = Push(self._request.node, *key_of(lease), payload, sampled=self._sampled())
        return await self._ask("push", request)

    async def release(
        self, leases: Iterable[LeaseKey], reason: str, is_failure: bool = False
    ) -> None:
        await self._release(leases, reason[:_MAX_REASON], is_failure)

    async def leave(self, leases: Iterable[LeaseKey], reason: str) -> None:
        """Say that this node ends, and give back what it has left."""
        await self._release(leases, reason[:_MAX_REASON], life=self._request.life)

    async def disown(self) -> None:
        """Say that damaged weights have made what this process has pushed, and that it ends."""
        await self._ask("disown", Disown(self._request.node, self._request.life))

    async def _release(
        self, leases: Iterable[LeaseKey], reason: str, is_failure: bool = False, life: str = ""
    ) -> None:
        request = Release(
            self._request.node, tuple(leases), reason, is_failure, self._sampled(), life
        )
        await self._ask("release", request)

    async def _ask(self, name: str, request: Any, wait_s: float = 0.0) -> Any:
        sent_s = time.monotonic() + wait_s
        self._sent.append(sent_s)
        try:
            return await self._dataflow.ask(name, request)
        finally:
            self._sent.remove(sent_s)
