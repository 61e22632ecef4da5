"""Rows dealt out to ranks: each once, in the dearness that makes ranks wait least, and as they
were.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowtrain.training import balance as balancing
from flowtrain.training.balance import assign, balance
from flowtrain.training.tree import PackedRow, empty_row, pack_rows
from flowtrain.training.world import World
from flowtrain.types import Sample, SampleId

costs_of_ranks = st.lists(st.lists(st.integers(1, 100), max_size=5), min_size=1, max_size=4)


def lock_step(costs: Sequence[Sequence[float]]) -> float:
    """What the passes cost when each takes as long as its dearest row."""
    return sum(max(row) for row in itertools.zip_longest(*costs, fillvalue=0))


@settings(derandomize=True, deadline=None)
@given(costs_of_ranks)
def test_every_row_is_trained_once_in_the_fewest_passes(costs: list[list[int]]) -> None:
    plan = assign(costs)
    assert len(plan) == len(costs)
    everything = [(rank, index) for rank, own in enumerate(costs) for index in range(len(own))]
    assert sorted(itertools.chain(*plan)) == everything
    assert max(map(len, plan)) == -(-len(everything) // len(costs))
    for places in plan:
        dear = [costs[rank][index] for rank, index in places]
        assert dear == sorted(dear, reverse=True)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_no_other_deal_makes_two_ranks_wait_less(costs: list[int]) -> None:
    """Against every way to deal the rows out and to order them."""
    plan = assign([costs, []])
    ours = lock_step([[costs[index] for _, index in places] for places in plan])
    best = min(
        lock_step([order[:cut], order[cut:]])
        for order in itertools.permutations(costs)
        for cut in range((len(costs) + 1) // 2, len(costs) + 1)
    )
    assert ours == best


def test_alike_rows_are_dealt_out_in_one_way() -> None:
    assert assign([[5, 5], [5]]) == [[(0, 0), (1, 0)], [(0, 1)]]


def same(ours: PackedRow, theirs: PackedRow) -> bool:
    pairs = [(getattr(ours, f.name), getattr(theirs, f.name)) for f in fields(PackedRow)]
    return all(
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b
        for a, b in pairs
    )


def test_a_row_arrives_as_it_was(random_samples: Callable[..., list[Sample]]) -> None:
    samples = [replace(s, sample_id=SampleId(n, 2, 3)) for n, s in enumerate(random_samples(9))]
    rows = [*pack_rows(samples, 20), empty_row()]
    rows[1] = replace(rows[1], ref_logprob_T=rows[1].old_logprob_T * 2)
    found = balancing._decode(balancing._encode(dict(enumerate(rows))))
    assert (
        all(same(found[place], row) for place, row in enumerate(rows))
        and len(found) == len(rows) > 3
    )
    assert balancing._decode(balancing._encode({})) == {}


def test_one_rank_keeps_its_rows(random_samples: Callable[..., list[Sample]], alone: World) -> None:
    rows = pack_rows(random_samples(9), 20)
    assert all(
        a is b
        for a, b in zip(
            balance(rows, lambda row: pytest.fail("nothing to weigh"), alone), rows, strict=True
        )
    )
