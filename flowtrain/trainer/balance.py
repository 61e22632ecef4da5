"""Balancing of packed rows over the training ranks by FLOPs: the slowest rank sets the step time.

A row travels once, from the rank that sampled it to the rank that trains it. Ranks process their
rows in lockstep, because every row takes collectives of all ranks. So a pass costs as much as its
most expensive row, and the total is smallest when rows of similar cost share a pass: in order of
cost, rank r of R trains the rows r, r + R, r + 2 R and so on. This order also minimises the number
of passes. The gradient is the sum over all rows, whichever rank trains them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load, save

from flowtrain.trainer.distributed import World
from flowtrain.trainer.packing import PackedRow

_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda tensor: save({"": tensor.contiguous()}))
_DECODER = msgspec.msgpack.Decoder(dict[str, PackedRow], dec_hook=lambda _, data: load(data)[""])


def balance(
    minibatches: Sequence[Sequence[PackedRow]],
    cost: Callable[[PackedRow], float],
    world: World,
    num_takers: int,
) -> list[list[PackedRow]]:
    """Return the rows of each mini-batch that this rank has to train; collective.

    Every rank passes the rows that it sampled; the first `num_takers` ranks receive them. Rows are
    on the CPU before and after.
    """
    if world.size == 1:
        return [list(rows) for rows in minibatches]
    own = json.dumps([[cost(row) for row in rows] for rows in minibatches])
    costs: list[list[list[float]]] = [json.loads(text) for text in world.gather_text(own)]
    plans = [assign(of_ranks, num_takers) for of_ranks in zip(*costs, strict=True)]
    sent: list[dict[str, PackedRow]] = [{} for _ in range(world.size)]
    for number, plan in enumerate(plans):
        for taker, places in enumerate(plan):
            for place, (giver, index) in enumerate(places):
                if giver == world.rank:
                    sent[taker][f"{number}.{place}"] = minibatches[number][index]
    received = _exchange([_ENCODER.encode(rows) for rows in sent], world)
    mine = {key: row for data in received for key, row in _DECODER.decode(data).items()}
    return [
        [mine[f"{number}.{place}"] for place in range(len(plan[world.rank]))]
        for number, plan in enumerate(plans)
    ]


def assign(costs: Sequence[Sequence[float]], num_takers: int) -> list[list[tuple[int, int]]]:
    """Return for each rank the rows that it trains, as (rank that gives it, index there).

    `costs`: of the rows that each rank passes. A single taker keeps their order.
    """
    places = [(rank, index) for rank, own in enumerate(costs) for index in range(len(own))]
    if num_takers > 1:
        places.sort(key=lambda place: -costs[place[0]][place[1]])
    return [places[rank::num_takers] if rank < num_takers else [] for rank in range(len(costs))]


def _exchange(data: Sequence[bytes], world: World) -> list[bytes]:
    """Send data[r] to rank r; return what each rank sent to this one.

    From the host to the host: NCCL would take memory that no plan knows of on ranks that only
    sample, after their engine has taken its own.
    """
    sizes: list[list[int]] = [
        json.loads(text) for text in world.gather_text(json.dumps([len(each) for each in data]))
    ]
    ours = [size[world.rank] for size in sizes]
    joined = bytearray(b"".join(data))
    sending = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0).byte()
    receiving = torch.empty(sum(ours), dtype=torch.uint8)
    dist.all_to_all_single(receiving, sending, ours, sizes[world.rank], group=world.control)
    return [part.numpy().tobytes() for part in receiving.split(ours)]
