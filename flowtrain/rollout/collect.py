"""Drive many rollouts over one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from flowtrain.agents.flow import Flow
from flowtrain.seeds import derive_seed
from flowtrain.types import Group, Task, Trajectory


def collect(
    flow: Flow, tasks: Sequence[Task], *, group_size: int, seed: int, max_in_flight: int = 512, rank: int = 0, num_ranks: int = 1
) -> list[Group]:
    """G rollouts of each task that falls to this rank (task i falls to rank i mod num_ranks), all under way at once.

    `seed` is the step's: the same tasks and seed give the same rollouts, on any number of ranks.
    """
    mine = [(index, task) for index, task in enumerate(tasks) if index % num_ranks == rank]
    return asyncio.run(_collect(flow, mine, group_size, seed, max_in_flight))


async def _collect(flow: Flow, tasks: Sequence[tuple[int, Task]], group_size: int, seed: int, max_in_flight: int) -> list[Group]:
    free = asyncio.Semaphore(max_in_flight)

    async def rollout(index: int, task: Task, number: int) -> Trajectory:
        async with free:
            # The place counts too: a task that is drawn twice is sampled anew.
            return await flow.run(task, derive_seed(seed, index, task.id, number))

    async with asyncio.TaskGroup() as running:
        groups = [(index, [running.create_task(rollout(index, task, n)) for n in range(group_size)]) for index, task in tasks]
    return [Group(index, tuple(task.result() for task in members)) for index, members in groups]
