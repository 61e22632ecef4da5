"""Concurrent collection of rollouts on one event loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import Any

from flowtrain.agents.base import Agent
from flowtrain.agents.deadlines import Cutoff
from flowtrain.inference.protocol import EngineError
from flowtrain.records import BranchPoint, BranchStart, Group, Task, Trajectory
from flowtrain.utils.event_loop import run_to_end
from flowtrain.utils.seeds import derive_seed


def _nobody_counts() -> None:
    pass


def collect(
    agent: Agent,
    tasks: Sequence[Task],
    *,
    group_size: int,
    seed: int,
    max_in_flight: int = 512,
    rank: int = 0,
    num_ranks: int = 1,
    straggler_share: float = 1.0,
    straggler_s: float = 60.0,
    on_done: Callable[[], None] = _nobody_counts,
) -> list[Group]:
    """Roll out each task of this rank `group_size` times, up to `max_in_flight` rollouts at a time,
    and return the groups.

    Task i belongs to rank i mod num_ranks; rank -1 has none. `seed` is the seed of the step: the
    same tasks and seed give the same rollouts on any number of ranks. Once the share
    `straggler_share` of the rollouts is done, the turns of the others end `straggler_s` seconds
    later. `on_done` is called as each rollout ends.

    Raises UserError when a frozen module's engine refuses all requests, and ExceptionGroup for
    unforeseen failures.
    """
    shard = [(index, task) for index, task in enumerate(tasks) if index % num_ranks == rank]
    requests = [
        RolloutRequest(index, task, number) for index, task in shard for number in range(group_size)
    ]
    rollouts = _run(agent, requests, seed, max_in_flight, straggler_share, straggler_s, on_done)
    return [Group(index, tuple(islice(rollouts, group_size))) for index, _ in shard]


def collect_branches(
    agent: Agent,
    groups: Sequence[Group],
    points: Sequence[Sequence[BranchPoint]],
    *,
    group_size: int,
    seed: int,
    max_in_flight: int = 512,
    straggler_share: float = 1.0,
    straggler_s: float = 60.0,
) -> list[Group]:
    """Return the groups filled up to `group_size` rollouts: one branch per point, then whole
    rollouts.

    Args:
        points: branch points by group, at most one per missing rollout.

    `collect` documents the other arguments and the errors.
    """
    requests = [
        request
        for group, group_points in zip(groups, points, strict=True)
        for request in missing(group, group_points, group_size)
    ]
    rollouts = _run(
        agent, requests, seed, max_in_flight, straggler_share, straggler_s, _nobody_counts
    )
    return [
        replace(
            g, trajectories=(*g.trajectories, *islice(rollouts, group_size - len(g.trajectories)))
        )
        for g in groups
    ]


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A request for one rollout."""

    index: int
    """The group's index."""
    task: Task
    number: int
    """The rollout's number within its group."""
    start: BranchStart | None = None


def missing(group: Group, points: Sequence[BranchPoint], group_size: int) -> list[RolloutRequest]:
    """Return requests for a group's missing rollouts: a branch per point, then whole ones."""
    task = group.trajectories[0].task
    numbers = range(len(group.trajectories), group_size)
    starts = [BranchStart(group.trajectories[point.parent], point) for point in points]
    return [
        RolloutRequest(group.index, task, number, start)
        for number, start in zip_longest(numbers, starts)
    ]


def _run(agent: Agent, requests: Sequence[RolloutRequest], *options: Any) -> Iterator[Trajectory]:
    """Run `_collect` on a new event loop; yield the rollouts in the order of the requests."""
    return iter(run_to_end(_collect(agent, requests, *options)))


async def roll_out(agent: Agent, task: Task, seed: int) -> Trajectory:
    """Roll out one task; a failure of the planner's engine yields a failed rollout."""
    started = time.monotonic()
    try:
        return await agent.run(task, seed)
    except EngineError as error:
        return Trajectory(task, (), "", time.monotonic() - started, seed, error=f"planner: {error}")


async def _collect(
    agent: Agent,
    requests: Sequence[RolloutRequest],
    seed: int,
    max_in_flight: int,
    straggler_share: float,
    straggler_s: float,
    on_done: Callable[[], None],
) -> list[Trajectory]:
    num_enough = math.ceil(straggler_share * len(requests))
    num_done = 0
    free = asyncio.Semaphore(max_in_flight)
    cutoff = Cutoff()

    async def rollout(request: RolloutRequest) -> Trajectory:
        nonlocal num_done
        async with free:
            # The index counts too: a task that is drawn twice gets other samples.
            own_seed = derive_seed(seed, request.index, request.task.id, request.number)
            trajectory = await agent.run(request.task, own_seed, cutoff, request.start)
        num_done += 1
        on_done()
        if num_done == num_enough:
            cutoff.set(asyncio.get_running_loop().time() + straggler_s)
        return trajectory

    async with asyncio.TaskGroup() as running:
        rollouts = [running.create_task(rollout(request)) for request in requests]
    return [rollout.result() for rollout in rollouts]
