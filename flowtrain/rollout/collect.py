"""Drive many rollouts over one event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence

from flowtrain.agents.cutoff import Cutoff
from flowtrain.agents.flow import Flow
from flowtrain.seeds import derive_seed
from flowtrain.types import Group, Task, Trajectory, UserError


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
    """G rollouts of each task that falls to this rank (task i falls to rank i mod num_ranks; none to rank -1), all under way at once.

    `seed` is the step's: the same tasks and seed give the same rollouts, on any number of ranks. Once the share `straggler_share` of
    them is done, the turns of the others end `straggler_s` seconds later.

    Raises UserError when a frozen module's engine refuses all requests; ExceptionGroup for what nobody foresaw.
    """
    mine = [(index, task) for index, task in enumerate(tasks) if index % num_ranks == rank]
    patience = math.ceil(straggler_share * len(mine) * group_size), straggler_s
    try:
        return asyncio.run(_collect(flow, mine, group_size, seed, max_in_flight, *patience))
    except ExceptionGroup as failures:
        if mistake := next(_user_errors(failures), None):
            raise mistake from None
        raise


async def _collect(
    flow: Flow, tasks: Sequence[tuple[int, Task]], group_size: int, seed: int, max_in_flight: int, enough: int, straggler_s: float
) -> list[Group]:
    """`enough`: rollouts that must be done before the others are stragglers."""
    free, cutoff, num_done = asyncio.Semaphore(max_in_flight), Cutoff(), 0

    async def rollout(index: int, task: Task, number: int) -> Trajectory:
        nonlocal num_done
        async with free:
            # The place counts too: a task that is drawn twice is sampled anew.
            trajectory = await flow.run(task, derive_seed(seed, index, task.id, number), cutoff)
        num_done += 1
        if num_done == enough:
            cutoff.set(asyncio.get_running_loop().time() + straggler_s)
        return trajectory

    async with asyncio.TaskGroup() as running:
        groups = [(index, [running.create_task(rollout(index, task, n)) for n in range(group_size)]) for index, task in tasks]
    return [Group(index, tuple(task.result() for task in members)) for index, members in groups]


def _user_errors(failures: BaseExceptionGroup[BaseException]) -> Iterator[UserError]:
    for failure in failures.exceptions:
        if isinstance(failure, BaseExceptionGroup):
            yield from _user_errors(failure)
        elif isinstance(failure, UserError):
            yield failure
