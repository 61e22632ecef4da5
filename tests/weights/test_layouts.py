"""Deltas of experts whose rows a kernel reads in blocks, on one rank and on two."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from test_strided_view import layout_of, on_ranks
from torch import Tensor
from weight_samples import same_bits

from flowtrain.engines.vllm.layouts import in_blocks, loader
from flowtrain.engines.vllm.plan import make_plan, memories_of, prove
from flowtrain.engines.vllm.sharded_target import LoadPlan, ShardedTarget
from flowtrain.weights import Publisher, SnapshotPolicy, WeightReader, WeightStore
from flowtrain.weights.load.strided_view import StridedView
from flowtrain.weights.ranks import Alone, Ranks

NUM_EXPERTS, ROWS, COLUMNS = 3, 64, 10


def packed(plain: Tensor) -> Tensor:
    """The memory of experts' weights for a kernel that reads 16 rows together."""
    num_experts, rows, columns = plain.shape
    out = torch.empty(num_experts, rows // 16, columns, 16, dtype=plain.dtype)
    for row in range(rows):
        out[:, row // 16, :, row % 16] = plain[:, row]
    return out.view(plain.shape)


class Mixture:
    """Gate and up projections cut by rows, down projections by columns, an expert at a time; and a
    router that is cast.
    """

    def __init__(self, ranks: Ranks, dtype: torch.dtype) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self.held = {
            "up": torch.zeros(NUM_EXPERTS, ROWS // self.size, COLUMNS, dtype=dtype),
            "down": torch.zeros(NUM_EXPERTS, ROWS, COLUMNS // self.size, dtype=dtype),
            "router": torch.zeros(NUM_EXPERTS, 4, dtype=torch.float64),
        }

    def load_weights(self, found: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in found:
            getattr(self, f"load_{name}")(tensor)

    def load_router(self, tensor: Tensor) -> None:
        self.held["router"].copy_(tensor)

    def load_up(self, tensor: Tensor) -> None:
        num = ROWS // 2 // self.size
        for there, expert in zip(self.held["up"], tensor, strict=True):
            for half in range(2):
                start = half * ROWS // 2 + self.rank * num
                there[half * num : (half + 1) * num].copy_(expert[start : start + num])

    def load_down(self, tensor: Tensor) -> None:
        for there, expert in zip(self.held["down"], tensor, strict=True):
            there.copy_(expert.chunk(self.size, 1)[self.rank])


def weights(version: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Each version changes a few words of each tensor."""
    rng = torch.Generator().manual_seed(0)
    shapes = {"up": (ROWS, COLUMNS), "down": (ROWS, COLUMNS), "router": (4,)}
    found = {n: torch.randn(NUM_EXPERTS, *s, generator=rng).to(dtype) for n, s in shapes.items()}
    for _ in range(version):
        for tensor in found.values():
            at = torch.randint(0, tensor.numel(), (9,), generator=rng)
            tensor.view(-1)[at] = torch.randn(9, generator=rng).to(dtype)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_experts_in_blocks_of_rows_take_versions_in_place(
    store: WeightStore, size: int, dtype: torch.dtype
) -> None:
    publisher = Publisher(store, policy=SnapshotPolicy(max_deltas=100))
    for version in range(1, 6):
        publisher.publish(weights(version, dtype), version)

    def run(ranks: Ranks) -> list[str]:
        model = Mixture(ranks, dtype)
        for tensor in model.held.values():
            tensor.copy_(torch.randn_like(tensor))
        before = {name: tensor.clone() for name, tensor in model.held.items()}
        all_held, blocked = model.held.values(), [model.held["up"], model.held["down"]]
        watched = make_plan(layout_of(weights(1, dtype)), model.load_weights, all_held, ranks)
        assert {name: len(views) for name, views in watched.views.items()} == {"up": 1, "down": 1}
        plan = in_blocks(watched, blocked)
        load = loader(model.load_weights, plan, blocked)
        prove(plan, load, all_held, ranks)
        assert same_bits(model.held, before)
        with pytest.raises(ValueError, match="its words are not where its loader seemed to put"):
            prove(watched, load, all_held, ranks)
        reader = WeightReader(store, ShardedTarget(plan, ranks, lambda whole: load(whole.items())))
        modes = []
        for version in (1, 2, 3, 5):
            modes.append(reader.load(version).mode)
            plain = Mixture(ranks, dtype)
            plain.load_weights(weights(version, dtype).items())
            wanted = plain.held | {name: packed(plain.held[name]) for name in ("up", "down")}
            assert same_bits(model.held, wanted) and not reader.damaged(), version
        return modes

    assert on_ranks(size, run) == [["snapshot", "delta", "delta", "delta"]] * size


def test_a_view_that_ends_within_a_block_is_refused() -> None:
    parameter = torch.zeros(NUM_EXPERTS, ROWS, COLUMNS, dtype=torch.bfloat16)
    (memory,) = memories_of([parameter]).values()
    rows = StridedView(memory, 0, 0, sizes=(24 * COLUMNS,), strides=(1,), to_strides=(1,))
    with pytest.raises(ValueError, match="cut within a block of 16 rows"):
        in_blocks(LoadPlan({}, {"gate": [rows]}, {}), [parameter])


class Shuffled(Mixture):
    """Its experts stand in another order, or are cut unequally."""

    places = (0, 2, 1)

    def load_down(self, tensor: Tensor) -> None:
        for place, expert in zip(self.places, tensor, strict=True):
            self.held["down"][place].copy_(expert)

    def load_up(self, tensor: Tensor) -> None:
        for start, stop in ((0, 16), (16, 32), (32, 64)):
            self.held["up"][:, start:stop].copy_(tensor[:, start:stop])


def test_views_that_do_not_follow_each_other_evenly_stay_apart() -> None:
    model, found = Shuffled(Alone(), torch.bfloat16), weights(1, torch.bfloat16)
    plan = make_plan(layout_of(found), model.load_weights, model.held.values(), Alone())
    assert {name: len(views) for name, views in plan.views.items()} == {"up": 3, "down": 3}
    prove(plan, model.load_weights, model.held.values(), Alone())
