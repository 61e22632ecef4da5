"""Rows are spread over ranks: each once, in the order that makes ranks wait least, unchanged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from batches import random_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowtrain.records import SampleId, SamplingMask
from flowtrain.trainer import balance as balancing
from flowtrain.trainer.balance import assign, balance
from flowtrain.trainer.distributed import World
from flowtrain.trainer.packing import PackedRow, empty_row, pack_row, pack_rows

costs_of_ranks = st.lists(st.lists(st.integers(1, 100), max_size=5), min_size=1, max_size=4)


def lock_step(costs: Sequence[Sequence[float]]) -> float:
    """Sum the passes' costs when each takes as long as its dearest row."""
    return sum(max(row) for row in itertools.zip_longest(*costs, fillvalue=0))


@settings(derandomize=True, deadline=None)
@given(costs_of_ranks, st.data())
def test_every_row_is_trained_once_in_the_fewest_passes(
    costs: list[list[int]], data: st.DataObject
) -> None:
    num_takers = data.draw(st.integers(1, len(costs)))
    plan = assign(costs, num_takers)
    assert len(plan) == len(costs) and not any(plan[num_takers:])
    everything = [(rank, index) for rank, own in enumerate(costs) for index in range(len(own))]
    assert sorted(itertools.chain(*plan)) == everything
    assert max(map(len, plan)) == -(-len(everything) // num_takers)
    for places in plan:
        dear = [costs[rank][index] for rank, index in places]
        assert num_takers == 1 or dear == sorted(dear, reverse=True)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_no_other_deal_makes_two_ranks_wait_less(costs: list[int]) -> None:
    """Against every way to deal the rows out and to order them."""
    plan = assign([costs, []], 2)
    ours = lock_step([[costs[index] for _, index in places] for places in plan])
    best = min(
        lock_step([order[:cut], order[cut:]])
        for order in itertools.permutations(costs)
        for cut in range((len(costs) + 1) // 2, len(costs) + 1)
    )
    assert ours == best


def test_rows_of_equal_cost_are_assigned_in_one_way() -> None:
    assert assign([[5, 5], [5]], 2) == [[(0, 0), (1, 0)], [(0, 1)]]


def same(ours: PackedRow, theirs: PackedRow) -> bool:
    pairs = [(getattr(ours, f.name), getattr(theirs, f.name)) for f in fields(PackedRow)]
    return all(
        torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9)) and a.dtype == b.dtype
        if isinstance(a, Tensor)
        else a == b
        for a, b in pairs
    )


def test_row_codec_roundtrip() -> None:
    samples = [replace(s, sample_id=SampleId(n, 2, 3)) for n, s in enumerate(random_samples(9))]
    masks = [
        SamplingMask.of([(token, 7), (token,)][n % 2] for n, token in enumerate(s.response_ids))
        for s in samples
    ]
    masked = [replace(s, sampling_mask=mask) for s, mask in zip(samples, masks, strict=True)]
    whole = pack_rows(samples, 4)
    rows = [*whole, empty_row(), pack_row(masked), pack_row([samples[0], masked[1]])]
    rows[1] = replace(rows[1], ref_logprob_T=rows[1].old_logprob_T * 2, num_repeated_tokens=3)
    rows[2] = replace(rows[2], advantage_T=rows[2].advantage_T * math.nan)
    given = {f"0.{place}": row for place, row in enumerate(rows)}
    found = balancing._DECODER.decode(balancing._ENCODER.encode(given))
    assert found.keys() == given.keys() and len(rows) > 5
    assert all(same(found[key], row) for key, row in given.items())


def test_one_rank_keeps_its_rows(alone: World) -> None:
    rows = pack_rows(random_samples(9), 4)
    (found,) = balance([rows], lambda row: pytest.fail("nothing to weigh"), alone, num_takers=1)
    assert all(a is b for a, b in zip(found, rows, strict=True))
