"""Rollout nodes in virtual time around a real ledger: what they wait for is simulated, what the
ledger answers is not. `simulated_trainer.py` has the trainer that they feed.

A rollout's calls take what `bench.flow` draws for them, from its seed alone, so every arrangement
waits for the same calls. A node takes leases while it has slots for a whole group, renews them and
loads each new version a while after it hears of it; rollouts go on meanwhile, and their turns say
which version sampled them. A message to the ledger takes half a round trip, as does its answer.
"""

from __future__ import annotations

import heapq
import itertools
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.flow import MAX_TURNS, ROLLOUT_TIMEOUT_S, STOP_SHARE, TOOL_TIMEOUT_S, Latencies
from flowtrain.dataflow.codec import pack_group
from flowtrain.dataflow.contract import (
    Dataflow,
    Join,
    Lease,
    LeaseRequest,
    Leases,
    PolicyState,
    Push,
    Release,
    Renewal,
    Renewed,
)
from flowtrain.types import (
    Call,
    FinishReason,
    Group,
    Task,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
    VersionSpan,
)
from flowtrain.utils.seeds import derive_seed

POLICY = "planner"
RETRY_S = 5.0
"""Between requests of a node that gets no lease, at least: the ledger would let it ask sooner,
which takes the simulation longer."""
TOKENS = 8
"""Tokens of a response; the ledger counts them, the simulated trainer ignores them."""


class World:
    """Virtual seconds, in which things happen one after another."""

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def clock(self) -> float:
        return self.now

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._coming, (self.now + seconds, next(self._count), happens))

    def run(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self.now, _, happens = heapq.heappop(self._coming)
            happens()


# ---- a rollout


@dataclass(frozen=True, slots=True)
class Course:
    """When a rollout does what, in seconds from its beginning."""

    plans_s: tuple[float, ...]
    """When the planner samples each turn."""
    end_s: float


def course(seed: int, speed: float = 1.0) -> Course:
    """The rollout of `bench.flow` with that seed, where models answer `speed` times as fast; tools
    do not.
    """
    latencies = Latencies(1.0)
    now, plans, key = 0.0, [], ""
    for turn in range(MAX_TURNS):
        key = f"{seed} {turn}"
        now += latencies.chat_s(key, "analysis") / speed if turn == 0 else 0.0
        if now >= ROLLOUT_TIMEOUT_S:
            break
        plans.append(now)
        now += (
            sum(latencies.chat_s(key, purpose) for purpose in ("plan", "command", "verdict"))
            / speed
        )
        now += min(latencies.tool_s(key), TOOL_TIMEOUT_S)
        if random.Random(f"{key} stop").random() < STOP_SHARE:
            break
    now += latencies.chat_s(key, "answer") / speed
    return Course(tuple(plans), min(now, ROLLOUT_TIMEOUT_S))


def trajectory(task: Task, seed: int, versions: list[int]) -> Trajectory:
    """One turn per version; half of all succeed."""
    turns = tuple(
        Turn(
            calls={"planner": _call(version)},
            action=None,
            command="",
            result=ToolResult("result"),
            verdict=Verdict.CONTINUE,
            seconds=0.0,
        )
        for version in versions
    )
    return Trajectory(task, turns, "", 0.0, seed, reward=float(random.Random(seed).random() < 0.5))


def _call(version: int) -> Call:
    spans = (VersionSpan(0, TOKENS, version),)
    return Call((1, 2), (3,) * TOKENS, (-1.0,) * TOKENS, spans, FinishReason.STOP)


def rollout_seeds(lease_seed: int, group_size: int) -> list[int]:
    return [derive_seed(lease_seed, number) for number in range(group_size)]


# ---- a node


@dataclass(frozen=True, slots=True)
class Site:
    """The place of a node, and its speed."""

    name: str
    slots: int = 32
    """Rollouts at a time."""
    speed: float = 1.0
    """Speed of the node's models."""
    round_trip_s: float = 0.0
    load_s: float = 2.0
    """To fetch a new version and load it."""


@dataclass(slots=True)
class _Made:
    """A group that is under way."""

    lease: Lease
    rollouts: list[Trajectory] = field(default_factory=list)


class Node:
    """Joins when it is made."""

    def __init__(
        self,
        world: World,
        ledger: Dataflow,
        site: Site,
        max_staleness: int,
        on_push: Callable[[], None],
    ) -> None:
        self._world, self._ledger, self._on_push, self.site = world, ledger, on_push, site
        self._max_staleness = max_staleness
        self._idle = site.slots
        self._made: dict[tuple[int, int], _Made] = {}
        self._is_asking = self._is_ended = False
        self._keys = itertools.count()
        self._since, self._seconds = world.now, {True: 0.0, False: 0.0}
        """When it was last looked, and seconds with a rollout under way (True) and without, since
        they were last told."""
        self.work_items: set[int] = set()
        """Whose groups were committed from here."""
        joined = ledger.join(Join(site.name, site.name))
        self._group_size, self._lease_s = joined.group_size, joined.lease_s
        self._known = self._loading = joined.policies[POLICY].version
        self._loads = [(world.now, self._known)]
        """(when, version) of all weights that it has had."""
        self._ask()
        world.after(self._lease_s / 3, self._renew)

    def end(self) -> None:
        """Gives its leases back; what it has under way is lost."""
        self._is_ended = True
        if self._made:
            self._ledger.release(Release(self.site.name, tuple(self._made), "the pool shrinks"))

    def _send(
        self, call: Callable[[], Any], hear: Callable[[Any], None] = lambda answer: None
    ) -> None:
        def arrives() -> None:
            if not self._is_ended:
                answer = call()
                self._world.after(self.site.round_trip_s / 2, lambda: hear(answer))

        self._world.after(self.site.round_trip_s / 2, arrives)

    @property
    def version(self) -> int:
        return self._loads[-1][1]

    def _ask(self) -> None:
        """For as many groups as there are slots for, unless its weights are too old."""
        num = self._idle // self._group_size
        if self._is_asking or num == 0 or self.version < self._known - self._max_staleness:
            return
        self._is_asking = True
        key = f"{self.site.name} {next(self._keys)}"
        self._look()
        busy_s, waited_s = self._seconds[True], self._seconds[False]
        self._seconds = {True: 0.0, False: 0.0}
        request = LeaseRequest(
            self.site.name, self.site.name, num, {POLICY: self.version}, busy_s, waited_s, key
        )
        self._send(lambda: self._ledger.lease(request), self._begin)

    def _begin(self, answer: Leases) -> None:
        self._hear(answer.policies)
        self._look()
        for lease in answer.leases:
            self._idle -= self._group_size
            self._made[lease.work_item, lease.attempt] = _Made(lease)
            for seed in rollout_seeds(lease.seed, self._group_size):
                path = course(seed, self.site.speed)
                self._world.after(path.end_s, partial(self._finish, lease, seed, path))
        self._world.after(
            max(answer.retry_after_s, RETRY_S) if answer.retry_after_s else 0.0, self._ask_again
        )

    def _ask_again(self) -> None:
        self._is_asking = False
        self._ask()

    def _look(self) -> None:
        """At what it has done until now, before that changes."""
        self._seconds[self._idle < self.site.slots] += self._world.now - self._since
        self._since = self._world.now

    def _finish(self, lease: Lease, seed: int, path: Course) -> None:
        self._look()
        self._idle += 1
        made = self._made.get((lease.work_item, lease.attempt))
        if made is None or self._is_ended:
            return
        began = self._world.now - path.end_s
        versions = [
            self._loads[bisect_right(self._loads, (began + plan_s, 1 << 62)) - 1][1]
            for plan_s in path.plans_s
        ]
        made.rollouts.append(trajectory(lease.task, seed, versions))
        if len(made.rollouts) == self._group_size:
            del self._made[lease.work_item, lease.attempt]
            push = Push(
                self.site.name,
                lease.work_item,
                lease.attempt,
                pack_group(Group(lease.index, tuple(made.rollouts))),
            )
            self._send(lambda: self._push(push))
        self._ask()

    def _push(self, push: Push) -> None:
        if self._ledger.push(push).status == "committed":
            self.work_items.add(push.work_item)
        self._on_push()

    def _renew(self) -> None:
        if not self._is_ended:
            request = Renewal(self.site.name, self.site.name, tuple(self._made)[:1024])
            if request.work_items:
                self._send(lambda: self._ledger.renew(request), self._renewed)
            self._world.after(self._lease_s / 3, self._renew)

    def _renewed(self, answer: Renewed) -> None:
        self._hear(answer.policies)
        for key in [key for key in self._made if key[0] in answer.lost]:
            del self._made[key]  # its rollouts come to their end unseen

    def _hear(self, policies: Mapping[str, PolicyState]) -> None:
        self._known = max(self._known, policies[POLICY].version)
        self._load()

    def _load(self) -> None:
        """The newest version, unless it is there or another one is on its way."""
        if self._known > self._loading == self.version:
            self._loading = version = self._known
            self._world.after(self.site.load_s, lambda: self._loaded(version))

    def _loaded(self, version: int) -> None:
        self._loads.append((self._world.now, version))
        self._load()
        self._ask()


class Nodes:
    """A pool of them that grows and shrinks: what a controller of processes sees."""

    def __init__(self, world: World, make: Callable[[str], Node]) -> None:
        self._world, self._make, self._count = world, make, itertools.count()
        self._nodes: list[Node] = []
        self.sizes: list[tuple[float, int]] = []
        """(when, how many from then on)."""

    def __len__(self) -> int:
        return len(self._nodes)

    def reap(self) -> None:
        """None ends by itself."""

    def resize(self, num: int) -> None:
        """The newest end first."""
        self._nodes += [
            self._make(f"node-{next(self._count)}") for _ in range(num - len(self._nodes))
        ]
        while len(self._nodes) > num:
            self._nodes.pop().end()
        self.sizes.append((self._world.now, num))


# ---- the synchronous loop


def collect_s(
    seeds: list[int], sites: list[Site], share: float = 1.0, patience_s: float = 0.0
) -> float:
    """Seconds until all rollouts are done, each begun when a slot is free; or `patience_s` after
    that share is, when the rest is cut.
    """
    free = [
        (0.0, number, site.speed)
        for number, site in enumerate(site for site in sites for _ in range(site.slots))
    ]
    heapq.heapify(free)
    ends = []
    for seed in seeds:
        now, number, speed = heapq.heappop(free)
        ends.append(now + course(seed, speed).end_s)
        heapq.heappush(free, (ends[-1], number, speed))
    ends.sort()
    return (
        ends[-1] if share == 1.0 else min(ends[-1], ends[int(share * len(ends)) - 1] + patience_s)
    )
