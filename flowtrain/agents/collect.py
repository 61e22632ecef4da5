"""Drive many rollouts over one event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest

from flowtrain.agents.cutoff import Cutoff
from flowtrain.agents.flow import BranchStart, Flow
from flowtrain.types import BranchPoint, Group, Task, Trajectory, UserError
from flowtrain.utils.seeds import derive_seed


def collect(
    flow: Flow,
    tasks: Sequence[Task],
    *,
    group_size: int,
    seed: int,
    max_in_flight: int = 512,
    rank: int = 0,
    num_ranks: int = 1,
    straggler_share: float = 1.0,
    straggler_s: float = 60.0,
) -> list[Group]:
    """G rollouts of each task that falls to this rank (task i falls to rank i mod num_ranks; none
    to rank -1), all under way at once.

    `seed` is the step's: the same tasks and seed give the same rollouts, on any number of ranks.
    Once the share `straggler_share` of them is done, the turns of the others end `straggler_s`
    seconds later.

    Raises UserError when a frozen module's engine refuses all requests; ExceptionGroup for what
    nobody foresaw.
    """
    mine = [(index, task) for index, task in enumerate(tasks) if index % num_ranks == rank]
    begins = [
        RolloutRequest(index, task, number) for index, task in mine for number in range(group_size)
    ]
    done = iter(_run(flow, begins, seed, max_in_flight, straggler_share, straggler_s))
    return [Group(index, tuple(islice(done, group_size))) for index, _ in mine]


def collect_branches(
    flow: Flow,
    groups: Sequence[Group],
    points: Sequence[Sequence[BranchPoint]],
    *,
    group_size: int,
    seed: int,
    max_in_flight: int = 512,
    straggler_share: float = 1.0,
    straggler_s: float = 60.0,
) -> list[Group]:
    """The groups filled up to `group_size` rollouts: one branch from each of a group's points, and
    whole rollouts for what is missing.

    `points`: of each group, at most as many as are missing. Otherwise as `collect`.
    """
    begins = [
        begin
        for group, at in zip(groups, points, strict=True)
        for begin in _missing(group, at, group_size)
    ]
    done = (
        iter(_run(flow, begins, seed, max_in_flight, straggler_share, straggler_s))
        if begins
        else iter(())
    )
    return [
        replace(g, trajectories=(*g.trajectories, *islice(done, group_size - len(g.trajectories))))
        for g in groups
    ]


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One rollout to make."""

    index: int
    """Of its group."""
    task: Task
    number: int
    """Within its group."""
    start: BranchStart | None = None


def _missing(group: Group, points: Sequence[BranchPoint], group_size: int) -> list[RolloutRequest]:
    """What the group is short of."""
    numbers, task = range(len(group.trajectories), group_size), group.trajectories[0].task
    starts = [BranchStart(group.trajectories[point.parent], point) for point in points]
    return [
        RolloutRequest(group.index, task, number, start)
        for number, start in zip_longest(numbers, starts)
    ]


def _run(
    flow: Flow,
    begins: Sequence[RolloutRequest],
    seed: int,
    max_in_flight: int,
    share: float,
    straggler_s: float,
) -> list[Trajectory]:
    try:
        return asyncio.run(
            _collect(flow, begins, seed, max_in_flight, math.ceil(share * len(begins)), straggler_s)
        )
    except ExceptionGroup as failures:
        if mistake := next(user_errors(failures), None):
            raise mistake from None
        raise


async def _collect(
    flow: Flow,
    begins: Sequence[RolloutRequest],
    seed: int,
    max_in_flight: int,
    enough: int,
    straggler_s: float,
) -> list[Trajectory]:
    """`enough`: rollouts that must be done before the others are stragglers."""
    free, cutoff, num_done = asyncio.Semaphore(max_in_flight), Cutoff(), 0

    async def rollout(begin: RolloutRequest) -> Trajectory:
        nonlocal num_done
        async with free:
            # The place counts too: a task that is drawn twice is sampled anew.
            rollout_seed = derive_seed(seed, begin.index, begin.task.id, begin.number)
            trajectory = await flow.run(begin.task, rollout_seed, cutoff, begin.start)
        num_done += 1
        if num_done == enough:
            cutoff.set(asyncio.get_running_loop().time() + straggler_s)
        return trajectory

    async with asyncio.TaskGroup() as running:
        rollouts = [running.create_task(rollout(begin)) for begin in begins]
    return [rollout.result() for rollout in rollouts]


def user_errors(failures: BaseExceptionGroup[BaseException]) -> Iterator[UserError]:
    """Those among the failures of a task group."""
    for failure in failures.exceptions:
        if isinstance(failure, BaseExceptionGroup):
            yield from user_errors(failure)
        elif isinstance(failure, UserError):
            yield failure
