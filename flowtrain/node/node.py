"""A rollout node: leases work items, makes the G rollouts of each, many at once on one event loop,
and pushes the groups.

    lease --> rollouts under way --> group --> kept until it is pushed --> forgotten
                 |  renewed with the group at a third of lease_s  |
                 +-- lost: abandoned

A finished group is kept while the dataflow does not answer. A work item counts as under way until
it is pushed, so a node that cannot get rid of its groups soon leases no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from flowtrain.dataflow.codec import pack_group
from flowtrain.dataflow.contract import (
    Dataflow,
    Join,
    Joined,
    Lease,
    LeaseRequest,
    Leases,
    Push,
    Pushed,
    Refused,
    Release,
    Renewal,
)
from flowtrain.engines.protocol import EngineError
from flowtrain.node.progress import NodeProgress
from flowtrain.node.weight_syncer import WeightSyncer
from flowtrain.types import Group, Task, Trajectory, UserError
from flowtrain.utils.seeds import derive_seed

_log = logging.getLogger(__name__)
_Q = TypeVar("_Q")
_A = TypeVar("_A")
_NUM_PUSHING, _NUM_THREADS = 4, 32
_SILENT_S = 10.0
"""Without an answer, before the person who looks on is told."""
_LAST_S = 10.0
"""For the last words: groups that are done, and leases that go back."""
_MAX_FAILURES = 8
"""Work items in a row that could not be made or were refused; then it is the node that is wrong."""
_MAX_LEASES = 1024
_MAX_REASON = 500
_TICK_S = 0.5
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.05, 60.0
"""Bounds for what the dataflow says about when to ask again."""

Rollout = Callable[[Task, int], Awaitable[Trajectory]]
"""(task, seed) -> a scored trajectory, or one that failed."""


@dataclass(frozen=True, slots=True)
class Membership:
    """A node as the dataflow knows it."""

    request: Join
    joined: Joined

    @property
    def node(self) -> str:
        return self.request.node

    @property
    def life(self) -> str:
        return self.request.life


@dataclass(frozen=True, slots=True)
class Limits:
    max_in_flight: int
    """Rollouts under way at a time."""
    max_staleness: int
    """Versions that the weights may be behind the trainer's."""
    num_groups: int = 0
    """Groups to push, then it ends; 0: any number."""


@dataclass(slots=True, eq=False)
class _WorkItem:
    """A work item that this node holds the lease of."""

    lease: Lease
    num_left: int
    """Rollouts under way."""
    task: asyncio.Task[None] | None = None
    payload: bytes = b""
    """The group, once it is made."""


class Node:
    """Lives as long as one `run`."""

    def __init__(
        self,
        dataflow: Dataflow,
        member: Membership,
        rollout: Rollout,
        syncer: WeightSyncer,
        limits: Limits,
        progress_bar: NodeProgress | None = None,
    ) -> None:
        self._dataflow, self._member, self._rollout, self._syncer, self._limits = (
            dataflow,
            member,
            rollout,
            syncer,
            limits,
        )
        self._progress_bar = progress_bar or NodeProgress(limits.num_groups)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "dataflow")
        self._asked: list[float] = []
        """When the calls that are not answered yet were made."""
        self._work_items: dict[tuple[int, int], _WorkItem] = {}
        """By work item and attempt: under way, or made and not pushed yet."""
        self._to_push: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self._idle = asyncio.Semaphore(limits.max_in_flight)
        self._num_pushed, self._num_failures = 0, 0
        self._asked_for: asyncio.Future[Leases] | None = None
        self._place, self._end = asyncio.Event(), asyncio.Event()
        self._waiting = ""
        self._clock = _BusyClock()

    def stop(self) -> None:
        """Push what is done, give the other leases back and end."""
        self._end.set()

    async def run(self) -> int:
        """Until `stop`, `num_groups`, or the end of training. Returns the number of groups that it
        has pushed.

        Raises an ExceptionGroup with what ended it: UserError, Refused, Unavailable, EngineError,
        PoliciesChanged, or what nobody foresaw. Its leases have gone back then.
        """
        reason = "the node failed"
        try:
            async with asyncio.TaskGroup() as tasks:
                works = (
                    self._lease,
                    self._renew,
                    self._show,
                    self._syncer.run,
                    *[self._push] * _NUM_PUSHING,
                )
                under_way = [tasks.create_task(work()) for work in works]
                await self._end.wait()
                reason = "the node has ended"
                for task in under_way:
                    task.cancel()
        finally:
            await self._leave(reason)
            self._threads.shutdown(
                wait=False, cancel_futures=True
            )  # calls under way end by their own deadlines
            self._progress_bar.close()
        return self._num_pushed

    async def _lease(self) -> None:
        async with asyncio.TaskGroup() as rollouts:
            while True:
                num, self._waiting = (
                    self._num_wanted(),
                    self._syncer.obstacle(self._limits.max_staleness),
                )
                if self._waiting:
                    self._clock.forgive()
                if num < 1 or self._waiting:
                    await self._for_a_place()
                    continue
                member, seconds = self._member, self._clock.read()
                request = LeaseRequest(
                    member.node,
                    member.life,
                    num,
                    self._syncer.versions,
                    *seconds,
                    key=uuid.uuid4().hex,
                )
                self._asked_for = asyncio.ensure_future(self._ask(self._dataflow.lease, request))
                answer = await asyncio.shield(
                    self._asked_for
                )  # or leases would come that nobody knows to give back
                self._asked_for = None
                for lease in answer.leases:
                    work_item = self._work_items[_key(lease)] = _WorkItem(
                        lease, member.joined.group_size
                    )
                    work_item.task = rollouts.create_task(self._make(work_item))
                self._syncer.on_policy_state(answer.policies)
                if len(answer.leases) == num:
                    continue
                if answer.reason == "done" and not self._work_items:
                    self.stop()
                self._waiting = answer.reason
                await asyncio.sleep(
                    min(max(answer.retry_after_s, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)
                )

    @property
    def _num_rollouts(self) -> int:
        return sum(work_item.num_left for work_item in self._work_items.values())

    def _num_wanted(self) -> int:
        """Number of work items to lease for idle rollouts; the node holds no more than twice of what can
        be under way.
        """
        size, num_rollouts, num_held = (
            self._member.joined.group_size,
            self._num_rollouts,
            len(self._work_items),
        )
        most = max(1, self._limits.max_in_flight // size)
        free = (self._limits.max_in_flight - num_rollouts) // size if num_rollouts else most
        wanted = min(free, min(2 * most, _MAX_LEASES) - num_held)
        return (
            min(wanted, self._limits.num_groups - self._num_pushed - num_held)
            if self._limits.num_groups
            else wanted
        )

    async def _for_a_place(self) -> None:
        """Until a rollout or a push has ended, or a moment has passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TICK_S):
                await self._place.wait()
        self._place.clear()

    async def _make(self, work_item: _WorkItem) -> None:
        lease = work_item.lease
        self._clock.begin()
        try:
            async with asyncio.TaskGroup() as group:
                rollouts = [
                    group.create_task(self._roll_out(work_item, number))
                    for number in range(work_item.num_left)
                ]
            members = tuple(rollout.result() for rollout in rollouts)
            work_item.payload = await asyncio.to_thread(pack_group, Group(lease.index, members))
            self._to_push.put_nowait(_key(lease))
        except ExceptionGroup as failures:
            if failures.subgroup((EngineError, UserError)) is not None:
                raise
            _log.exception(
                "work item %d (task %s) failed and goes back", lease.work_item, lease.task.id
            )
            await self._give_up(
                lease, f"{type(failures.exceptions[0]).__name__}: {failures.exceptions[0]}"
            )
        finally:
            work_item.num_left = 0
            if not self._num_rollouts:
                self._clock.end()
            self._place.set()

    async def _roll_out(self, work_item: _WorkItem, number: int) -> Trajectory:
        async with self._idle:
            trajectory = await self._rollout(
                work_item.lease.task, derive_seed(work_item.lease.seed, number)
            )
        work_item.num_left -= 1
        self._place.set()
        return trajectory

    async def _push(self) -> None:
        while True:
            work_item = self._work_items[await self._to_push.get()]
            try:
                await self._ask(self._dataflow.push, self._as_push(work_item))
            except Refused as refusal:
                _log.error(
                    "the group of work item %d is refused: %s", work_item.lease.work_item, refusal
                )
                await self._give_up(work_item.lease, f"its group was refused: {refusal}")
            else:
                self._forget(work_item.lease)
                self._num_failures = 0
                self._num_pushed += 1
                self._progress_bar.pushed()
            if self._num_pushed == self._limits.num_groups:
                self.stop()

    def _as_push(self, work_item: _WorkItem) -> Push:
        return Push(
            self._member.node, work_item.lease.work_item, work_item.lease.attempt, work_item.payload
        )

    async def _give_up(self, lease: Lease, reason: str) -> None:
        """For another node, perhaps."""
        self._num_failures += 1
        await self._ask(
            self._dataflow.release, Release(self._member.node, (_key(lease),), reason[:_MAX_REASON])
        )
        self._forget(lease)
        if self._num_failures >= _MAX_FAILURES:
            raise UserError(
                f"{self._num_failures} work items in a row could not be done; the last: {reason}"
            )

    def _forget(self, lease: Lease) -> None:
        del self._work_items[_key(lease)]
        self._place.set()

    async def _renew(self) -> None:
        """With nothing to renew it still asks for news of the policies."""
        while True:
            await asyncio.sleep(self._member.joined.lease_s / 3)
            if not (held := dict(self._work_items)):
                self._syncer.on_policy_state(
                    (await self._ask(self._dataflow.join, self._member.request)).policies
                )
                continue
            answer = await self._ask(
                self._dataflow.renew, Renewal(self._member.node, self._member.life, tuple(held))
            )
            self._syncer.on_policy_state(answer.policies)
            for key, work_item in held.items():
                # A group that is made is pushed all the same: who has the work item now need not be
                # faster.
                if key[0] in answer.lost and key in self._work_items and not work_item.payload:
                    _log.warning("the lease of work item %d is lost: its rollouts end", key[0])
                    assert work_item.task is not None, "set when it began"
                    work_item.task.cancel()
                    self._forget(work_item.lease)

    async def _show(self) -> None:
        while True:
            silent_s = time.monotonic() - min(self._asked, default=math.inf)
            waiting = (
                f"the dataflow has not answered for {silent_s:.0f} s"
                if silent_s > _SILENT_S
                else self._waiting
            )
            self._progress_bar.show(self._syncer.versions, self._num_rollouts, waiting)
            await asyncio.sleep(_TICK_S)

    async def _leave(self, reason: str) -> None:
        """Push what is done and give the rest back, as far as the dataflow answers in time."""
        made = [work_item for work_item in self._work_items.values() if work_item.payload]
        words: list[Awaitable[object]] = [
            self._ask(self._dataflow.push, self._as_push(work_item)) for work_item in made
        ]
        try:
            async with asyncio.timeout(_LAST_S):
                answers = await asyncio.gather(
                    self._release(reason), *words, return_exceptions=True
                )
        except TimeoutError:
            _log.error("%d work items could not be handed over: no answer", len(self._work_items))
            return
        self._num_pushed += sum(isinstance(answer, Pushed) for answer in answers)
        for error in (answer for answer in answers if isinstance(answer, Exception)):
            _log.error("a work item could not be handed over: %s", error)

    async def _release(self, reason: str) -> None:
        """What is not made, and what was asked for and came too late."""
        left = [key for key, work_item in self._work_items.items() if not work_item.payload]
        if self._asked_for is not None:
            await asyncio.wait({self._asked_for})
            left += (
                [] if self._asked_for.exception() else map(_key, self._asked_for.result().leases)
            )
        if left:
            await self._ask(self._dataflow.release, Release(self._member.node, tuple(left), reason))

    async def _ask(self, call: Callable[[_Q], _A], request: _Q) -> _A:
        began = time.monotonic()
        self._asked.append(began)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call, request)
        finally:
            self._asked.remove(began)


class _BusyClock:
    """Seconds with rollouts under way and without, since they were last read."""

    def __init__(self) -> None:
        self._is_busy, self._since = False, time.monotonic()
        self._seconds = {True: 0.0, False: 0.0}

    def begin(self) -> None:
        self._turn(True)

    def end(self) -> None:
        self._turn(False)

    def read(self) -> tuple[float, float]:
        """(busy, idle)"""
        self._turn(self._is_busy)
        busy, idle = self._seconds[True], self._seconds[False]
        self._seconds = {True: 0.0, False: 0.0}
        return busy, idle

    def forgive(self) -> None:
        """Forget what was idle so far: it had other reasons."""
        self._turn(self._is_busy)
        self._seconds[False] = 0.0

    def _turn(self, is_busy: bool) -> None:
        now = time.monotonic()
        self._seconds[self._is_busy] += now - self._since
        self._is_busy, self._since = is_busy, now


def _key(lease: Lease) -> tuple[int, int]:
    return lease.work_item, lease.attempt
