"""Rows spread over the ranks so that all are busy: what each rolled out differs in length, and a
rank that is done waits for the others.

Ranks walk through their rows side by side, because every row takes collectives of all. So a pass
costs what its dearest row costs, and the sum is least when rows of like cost share a pass: in order
of cost, rank r of R trains the rows r, r + R, r + 2 R and so on. That is also the fewest passes.
The gradient is the sum over all rows, whoever trains them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save

from flowtrain.training.tree import PackedRow
from flowtrain.training.world import World
from flowtrain.types import SampleId


def balance(
    rows: Sequence[PackedRow], cost: Callable[[PackedRow], float], world: World
) -> list[PackedRow]:
    """The rows that this rank trains, dearest first; collective. Rows are on the CPU before and
    after.
    """
    if world.size == 1:
        return list(rows)
    costs: list[list[float]] = [
        json.loads(text) for text in world.gather_text(json.dumps([cost(row) for row in rows]))
    ]
    plan = assign(costs)
    sent: list[dict[int, PackedRow]] = [{} for _ in range(world.size)]
    for taker, places in enumerate(plan):
        sent[taker] = {
            place: rows[index] for place, (giver, index) in enumerate(places) if giver == world.rank
        }
    received = _exchange([_encode(by_place) for by_place in sent], world)
    mine = {place: row for data in received for place, row in _decode(data).items()}
    return [mine[place] for place in range(len(plan[world.rank]))]


def return_logprobs(
    scores: Mapping[SampleId, Sequence[float]], sample_ids: Sequence[SampleId], world: World
) -> dict[SampleId, tuple[float, ...]]:
    """The scores of `sample_ids`, of those that all ranks have; collective. One rank has no others."""
    if world.size == 1:
        return {sample_id: tuple(score) for sample_id, score in scores.items()}
    wanted = [
        [SampleId(*each) for each in json.loads(text)]
        for text in world.gather_text(json.dumps(sample_ids))
    ]
    sent = [
        save(
            {
                json.dumps(o): torch.tensor(scores[o], dtype=torch.float64)
                for o in each
                if o in scores
            }
        )
        for each in wanted
    ]
    received = _exchange(sent, world)
    return {
        SampleId(*json.loads(key)): tuple(score.tolist())
        for data in received
        for key, score in load(data).items()
    }


def assign(costs: Sequence[Sequence[float]]) -> list[list[tuple[int, int]]]:
    """For each rank the rows it trains, as (rank that has it, index there). `costs`: of the rows
    that each rank has.
    """
    order = sorted(
        (-cost, rank, index) for rank, own in enumerate(costs) for index, cost in enumerate(own)
    )
    return [
        [(giver, index) for _, giver, index in order[rank :: len(costs)]]
        for rank in range(len(costs))
    ]


def _exchange(data: Sequence[bytes], world: World) -> list[bytes]:
    """data[r] goes to rank r; what each rank had for this one."""
    sizes: list[list[int]] = [
        json.loads(text) for text in world.gather_text(json.dumps([len(each) for each in data]))
    ]
    ours = [size[world.rank] for size in sizes]
    sending = torch.tensor(bytearray(b"".join(data)), dtype=torch.uint8, device=world.device)
    receiving = torch.empty(sum(ours), dtype=torch.uint8, device=world.device)
    dist.all_to_all_single(receiving, sending, ours, sizes[world.rank], group=world.group)
    return [part.numpy().tobytes() for part in receiving.cpu().split(ours)]


def _encode(rows: dict[int, PackedRow]) -> bytes:
    """Tensors under "<place>/<field>"; None as nothing, a number or ids as a tensor."""
    values = {
        f"{place}/{f.name}": getattr(row, f.name)
        for place, row in rows.items()
        for f in fields(row)
    }
    # Copies, because safetensors refuses tensors that share memory.
    return save(
        {key: torch.as_tensor(value).clone() for key, value in values.items() if value is not None}
    )


def _decode(data: bytes) -> dict[int, PackedRow]:
    found: dict[int, dict[str, Any]] = {}
    for key, tensor in load(data).items():
        place, name = key.split("/")
        found.setdefault(int(place), {})[name] = tensor if tensor.dim() else int(tensor)
    for values in found.values():
        values["sample_ids"] = tuple(SampleId(*each) for each in values["sample_ids"].tolist())
    return {place: PackedRow(**values) for place, values in found.items()}
