"""A rollout node: leases work items, makes the G rollouts of each, many at once on one event loop,
and pushes the groups.

    lease --> rollouts under way --> group --> kept until it is pushed --> forgotten
                 |  renewed with the group at a third of lease_s  |
                 +-- lost: abandoned

The node keeps finished groups while the dataflow does not answer. A work item counts as under way
until it is pushed, so a node that cannot push its groups soon leases no more. A question of an
evaluation is a work item, too: another agent makes its rollouts, by the evaluation's settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from flowtrain.agents.collect import missing
from flowtrain.inference.protocol import EngineError
from flowtrain.records import BranchPoint, BranchStart, Group, Task, Trajectory, UserError
from flowtrain.rollouts.codec import pack_group
from flowtrain.rollouts.contract import (
    EvalSettings,
    Lease,
    Leases,
    NotAllowed,
    Pushed,
    Refused,
    Unavailable,
)
from flowtrain.rollouts.node.progress import BusyClock, NodeProgress
from flowtrain.rollouts.node.weight_syncer import WeightSyncer
from flowtrain.rollouts.node_client import LeaseKey, NodeClient, key_of
from flowtrain.utils.seeds import derive_seed

_log = logging.getLogger(__name__)
_NUM_PUSHING = 4
_SILENT_S = 10.0
"""Seconds without an answer until the progress bar says so."""
_LEAVE_S = 10.0
"""Seconds for the last pushes and releases."""
_MAX_FAILURES = 8
"""Work items in a row that fail or are refused until the node counts as broken."""
_MAX_LEASES = 1024
_TICK_S = 0.5
_LOOK_S = 0.1
"""Between two looks whether other weights are there, during a pause."""
_SHORTEST_WAIT_S = 0.05
_LONGEST_WAIT_S = 60.0
"""Bounds for the dataflow's answer when to ask again."""


class Rollout(Protocol):
    """Makes one rollout: a scored trajectory, or one that failed. With `start` it is a branch."""

    async def __call__(
        self, task: Task, seed: int, start: BranchStart | None = None
    ) -> Trajectory: ...


Answer = Callable[[Task, int, EvalSettings], Awaitable[Trajectory]]
"""Makes one rollout for an evaluation from its question, its seed and how it is asked."""


@dataclass(frozen=True, slots=True)
class Branching:
    """How some rollouts of a work item leave others of it (`Algorithm.node_points`)."""

    num_roots: int
    """Rollouts that begin with the task."""
    points: Callable[[Group, int], Awaitable[list[BranchPoint]]]
    """(the roots, the work item's seed) -> where the others leave them."""


@dataclass(slots=True, eq=False)
class _WorkItem:
    """A work item that this node has leased."""

    lease: Lease
    num_left: int
    """Rollouts under way."""
    task: asyncio.Task[None] | None = None
    payload: bytes = b""
    """The packed group, once it is made."""
    size: int = 0
    """Rollouts of its group."""

    def __post_init__(self) -> None:
        self.size = self.num_left


class Node:
    """Serves for one `run`."""

    def __init__(
        self,
        member: NodeClient,
        rollout: Rollout,
        answer: Answer,
        syncer: WeightSyncer,
        *,
        max_in_flight: int,
        max_staleness: int,
        num_groups: int = 0,
        branching: Branching | None = None,
    ) -> None:
        """
        Args:
            rollout: makes rollouts to train, `answer` those of evaluations.
            max_in_flight: rollouts under way at a time.
            max_staleness: versions that the weights may be behind the trainer's.
            num_groups: groups to push until the node ends; 0: no end.
            branching: None: every rollout begins with the task.
        """
        self._member = member
        self._rollout = rollout
        self._answer = answer
        self._syncer = syncer
        self._max_in_flight = max_in_flight
        self._max_staleness = max_staleness
        self._num_groups = num_groups
        self._branching = branching
        self._progress = NodeProgress(num_groups)
        self._items: dict[LeaseKey, _WorkItem] = {}
        """Work items under way, or made and not pushed yet."""
        self._to_push: asyncio.Queue[_WorkItem] = asyncio.Queue()
        self._slots = asyncio.Semaphore(max_in_flight)
        self._num_pushed = 0
        self._num_failures = 0
        self._pending_leases: asyncio.Future[Leases] | None = None
        self._has_room = asyncio.Event()
        """Set when a rollout or a push has ended."""
        self._stopped = asyncio.Event()
        self._clock = BusyClock()
        self.waiting = ""
        """Why the node leases nothing, for the progress bar."""

    def stop(self) -> None:
        """Push what is done, give the other leases back and end."""
        self._stopped.set()

    async def run(self) -> int:
        """Serve until `stop`, `num_groups`, or the end of training; returns the number of groups
        pushed.

        Raises an ExceptionGroup with UserError, Refused, Unavailable, EngineError, PoliciesChanged,
        or an unforeseen error, after giving the leases back.
        """
        reason = "the node failed"
        try:
            async with asyncio.TaskGroup() as tasks:
                pushing = [self._push] * _NUM_PUSHING
                works = (self._lease, self._renew, self._show, self._syncer.run, *pushing)
                under_way = [tasks.create_task(work()) for work in works]
                await self._stopped.wait()
                reason = "the node has ended"
                for task in under_way:
                    task.cancel()
        finally:
            await self._leave(reason)
            self._progress.close()
        return self._num_pushed

    async def _lease(self) -> None:
        async with asyncio.TaskGroup() as rollouts:
            while True:
                num = self._num_wanted()
                obstacle = self._syncer.obstacle(self._max_staleness)
                if obstacle:
                    self._clock.discard_idle()
                if num < 1 or obstacle:
                    self.waiting = obstacle
                    await self._wait_for_room()
                    continue
                request = self._member.lease(num, self._syncer.versions, *self._clock.read())
                self._pending_leases = asyncio.ensure_future(request)
                # Shielded, or leases could arrive that `_leave` does not know and give back.
                answer = await asyncio.shield(self._pending_leases)
                self._pending_leases = None
                for lease in answer.leases:
                    item = _WorkItem(lease, self._size_of(lease))
                    self._items[key_of(lease)] = item
                    item.task = rollouts.create_task(self._make(item))
                self._syncer.on_policy_state(answer.policies)
                if len(answer.leases) == num:
                    self.waiting = ""
                    continue
                if answer.reason == "done" and not self._items:
                    self.stop()
                self.waiting = answer.reason
                pause_s = max(answer.retry_after_s, _SHORTEST_WAIT_S)
                await self._pause(min(pause_s, _LONGEST_WAIT_S))

    async def _pause(self, longest_s: float) -> None:
        """Wait, or until other weights are there."""
        end, versions = time.monotonic() + longest_s, self._syncer.versions
        while (left_s := end - time.monotonic()) > 0 and self._syncer.versions == versions:
            await asyncio.sleep(min(left_s, _LOOK_S))

    def _size_of(self, lease: Lease) -> int:
        if lease.evaluation is None:
            return self._member.joined.group_size
        return lease.evaluation.trials

    @property
    def _num_rollouts(self) -> int:
        return sum(item.num_left for item in self._items.values())

    def _num_wanted(self) -> int:
        """Return how many work items to lease: enough for the idle slots, but at most twice as many
        as can be under way are held at a time.
        """
        size = self._member.joined.group_size
        capacity = max(1, self._max_in_flight // size)
        free = capacity
        if self._num_rollouts:
            free = (self._max_in_flight - self._num_rollouts) // size
        num_held = -(-sum(item.size for item in self._items.values()) // size)
        num_wanted = min(free, 2 * capacity - num_held, _MAX_LEASES - len(self._items))
        if self._num_groups:
            num_groups = sum(item.lease.evaluation is None for item in self._items.values())
            num_wanted = min(num_wanted, self._num_groups - self._num_pushed - num_groups)
        return num_wanted

    async def _wait_for_room(self) -> None:
        """Wait until a rollout or a push has ended, or a moment has passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TICK_S):
                await self._has_room.wait()
        self._has_room.clear()

    async def _make(self, item: _WorkItem) -> None:
        lease = item.lease
        self._clock.set_busy(True)
        try:
            group = await self._group(item)
            item.payload = await asyncio.to_thread(pack_group, group)
            self._to_push.put_nowait(item)
        except Exception as failure:
            failures = (
                failure if isinstance(failure, ExceptionGroup) else ExceptionGroup("", [failure])
            )
            if failures.subgroup((EngineError, UserError)) is not None:
                raise
            _log.exception(
                "work item %d (task %s) failed and is returned to the service",
                lease.work_item,
                lease.task.id,
            )
            cause = failures.exceptions[0]
            await self._give_up(item, f"{type(cause).__name__}: {cause}")
        finally:
            item.num_left = 0
            if not self._num_rollouts:
                self._clock.set_busy(False)
            self._has_room.set()

    async def _group(self, item: _WorkItem) -> Group:
        lease, size, branching = item.lease, item.size, self._branching
        if branching is None or lease.evaluation is not None:
            return Group(lease.index, await self._roll_out(item, ((n, None) for n in range(size))))
        numbers = range(branching.num_roots)
        roots = Group(lease.index, await self._roll_out(item, ((n, None) for n in numbers)))
        points = await branching.points(roots, lease.seed)
        branches = [(request.number, request.start) for request in missing(roots, points, size)]
        return Group(lease.index, roots.trajectories + await self._roll_out(item, branches))

    async def _roll_out(
        self, item: _WorkItem, starts: Iterable[tuple[int, BranchStart | None]]
    ) -> tuple[Trajectory, ...]:
        """Make rollouts of a work item, each by its number in the group and where it branches."""

        lease, settings = item.lease, item.lease.evaluation

        async def make(number: int, start: BranchStart | None) -> Trajectory:
            if settings is not None:  # as `collect` does
                seed = derive_seed(lease.seed, lease.index, lease.task.id, number)
                return await self._answer(lease.task, seed, settings)
            branch = () if start is None else (start,)
            return await self._rollout(lease.task, derive_seed(lease.seed, number), *branch)

        async def in_slot(number: int, start: BranchStart | None) -> Trajectory:
            async with self._slots:
                trajectory = await make(number, start)
            item.num_left -= 1
            self._has_room.set()
            return trajectory

        async with asyncio.TaskGroup() as group:
            rollouts = [group.create_task(in_slot(*numbered_start)) for numbered_start in starts]
        return tuple(rollout.result() for rollout in rollouts)

    async def _push(self) -> None:
        while True:
            item = await self._to_push.get()
            try:
                await self._member.push(item.lease, item.payload)
            except NotAllowed:
                raise  # no other group would be taken either
            except Refused as refusal:
                _log.error(
                    "the service rejected the group of work item %d: %s",
                    item.lease.work_item,
                    refusal,
                )
                await self._give_up(item, f"the service rejected its group: {refusal}")
            else:
                self._forget(item)
                self._num_failures = 0
                if item.lease.evaluation is None:
                    self._num_pushed += 1
                    self._progress.pushed()
            if self._num_pushed == self._num_groups > 0:
                self.stop()

    async def _give_up(self, item: _WorkItem, reason: str) -> None:
        """Give the lease back, so that another node may try."""
        self._num_failures += 1
        await self._member.release([key_of(item.lease)], reason, is_failure=True)
        self._forget(item)
        if self._num_failures >= _MAX_FAILURES:
            raise UserError(f"{self._num_failures} work items in a row failed; the last: {reason}")

    def _forget(self, item: _WorkItem) -> None:
        del self._items[key_of(item.lease)]
        self._has_room.set()

    async def _renew(self) -> None:
        """End the rollouts of leases that turn out to be lost when they are renewed."""
        lease_s, heard = self._member.joined.lease_s, time.monotonic()
        async for answer in self._member.renewals(lambda: tuple(self._items)):
            heard, silent_s = time.monotonic(), time.monotonic() - heard
            self._syncer.on_policy_state(answer.policies)
            for key, item in list(self._items.items()):
                # A finished group is pushed all the same: the node that has the lease now may be
                # slower.
                if key[0] in answer.lost and not item.payload:
                    _log.warning(
                        "the lease of work item %d is lost, so its rollouts are cancelled; the "
                        "last renewals were answered %.1f s apart, and dataflow.lease_s=%g should "
                        "be at least 3 times as long",
                        *(key[0], silent_s, lease_s),
                    )
                    assert item.task is not None, "set when it began"
                    item.task.cancel()
                    self._forget(item)

    async def _show(self) -> None:
        while True:
            waiting = self.waiting
            if (silent_s := self._member.silent_s) > _SILENT_S:
                waiting = f"the dataflow has not answered for {silent_s:.0f} s"
            self._progress.show(self._syncer.versions, self._num_rollouts, waiting)
            await asyncio.sleep(_TICK_S)

    async def _leave(self, reason: str) -> None:
        """Push finished groups and give the other leases back, if the dataflow answers in time."""
        if self._syncer.is_damaged:
            await self._disown()
            return
        finished_items = [item for item in self._items.values() if item.payload]
        pushes = [self._member.push(item.lease, item.payload) for item in finished_items]
        work = asyncio.gather(self._release_rest(reason), *pushes, return_exceptions=True)
        try:
            answers = await asyncio.wait_for(work, _LEAVE_S)
        except TimeoutError:
            _log.error("%d work items could not be returned: no answer", len(self._items))
            return
        self._num_pushed += sum(
            isinstance(answer, Pushed) and item.lease.evaluation is None
            for item, answer in zip(finished_items, answers[1:], strict=True)
        )
        for error in (answer for answer in answers if isinstance(answer, Exception)):
            if isinstance(error, NotAllowed):
                continue  # the error that ends the node says so
            _log.error("a work item could not be returned: %s", error)

    async def _disown(self) -> None:
        try:
            await asyncio.wait_for(self._member.disown(), _LEAVE_S)
        except (TimeoutError, Refused, Unavailable) as error:
            _log.error("groups of damaged weights may be trained: the dataflow says %r", error)

    async def _release_rest(self, reason: str) -> None:
        """Give back leases without a group, and leases that arrived too late to begin."""
        keys = [key for key, item in self._items.items() if not item.payload]
        if (pending := self._pending_leases) is not None:
            with contextlib.suppress(Refused, Unavailable):
                is_there = pending.done()
                leases = pending.result().leases if is_there else await self._member.late_leases()
                keys += map(key_of, leases)
        # Of a node that failed without a lease the dataflow may have refused the token.
        if keys or self._stopped.is_set():
            await self._member.leave(keys, reason)
