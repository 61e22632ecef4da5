"""Redistribute packed rows over the ranks that train, by FLOPs, because the slowest rank sets the
step time.

A row travels once, from the rank that sampled it to the rank that trains it. Ranks walk through
their rows side by side, because every row takes collectives of all. So a pass costs what its
dearest row costs, and the sum is least when rows of like cost share a pass: in order of cost, rank
r of R trains the rows r, r + R, r + 2 R and so on. That is also the fewest passes. The gradient is
the sum over all rows, no matter which rank trains them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from flowtrain.training.tree import PackedRow
from flowtrain.training.world import World
from flowtrain.types import SampleId

T = TypeVar("T")


def balance(
    minibatches: Sequence[Sequence[PackedRow]],
    cost: Callable[[PackedRow], float],
    world: World,
    num_takers: int,
) -> list[list[PackedRow]]:
    """Return the rows of each mini-batch that this rank trains; collective.

    Every rank gives the rows that it sampled; the first `num_takers` ranks get them. Rows are on
    the CPU before and after.
    """
    if world.size == 1:
        return [list(rows) for rows in minibatches]
    costs = world.gather([[cost(row) for row in rows] for rows in minibatches])
    plans = [assign(of_ranks, num_takers) for of_ranks in zip(*costs, strict=True)]
    sent: list[dict[tuple[int, int], PackedRow]] = [{} for _ in range(world.size)]
    for number, plan in enumerate(plans):
        for taker, places in enumerate(plan):
            for place, (giver, index) in enumerate(places):
                if giver == world.rank:
                    sent[taker][number, place] = minibatches[number][index]
    mine = {key: row for rows in _exchange(sent, world) for key, row in rows.items()}
    return [
        [mine[number, place] for place in range(len(plan[world.rank]))]
        for number, plan in enumerate(plans)
    ]


def return_logprobs(
    logprobs: Mapping[SampleId, Sequence[float]], sample_ids: Sequence[SampleId], world: World
) -> dict[SampleId, tuple[float, ...]]:
    """Return the log-probs of the samples that this rank gave; collective.

    Args:
        logprobs: those of the samples that this rank trained.
        sample_ids: the samples that it gave.
    """
    sent = [
        {sample_id: tuple(logprobs[sample_id]) for sample_id in wanted if sample_id in logprobs}
        for wanted in world.gather(list(sample_ids))
    ]
    return {key: found for part in _exchange(sent, world) for key, found in part.items()}


def assign(costs: Sequence[Sequence[float]], num_takers: int) -> list[list[tuple[int, int]]]:
    """Return for each rank the rows that it trains, as (rank that gives it, index there).

    `costs` are those of the rows that each rank gives. A single taker waits for nobody and keeps
    their order.
    """
    places = [(rank, index) for rank, own in enumerate(costs) for index in range(len(own))]
    if num_takers > 1:
        places.sort(key=lambda place: -costs[place[0]][place[1]])
    return [places[rank::num_takers] if rank < num_takers else [] for rank in range(len(costs))]


def _exchange(values: Sequence[T], world: World) -> list[T]:
    """Send values[r] to rank r; return what each rank sent to this one."""
    if world.size == 1:
        return list(values)
    data = [pickle.dumps(value) for value in values]
    sizes = world.gather([len(each) for each in data])
    ours = [size[world.rank] for size in sizes]
    sending = torch.tensor(bytearray(b"".join(data)), dtype=torch.uint8, device=world.device)
    receiving = torch.empty(sum(ours), dtype=torch.uint8, device=world.device)
    dist.all_to_all_single(receiving, sending, ours, sizes[world.rank], group=world.group)
    return [pickle.loads(part.numpy().tobytes()) for part in receiving.cpu().split(ours)]
