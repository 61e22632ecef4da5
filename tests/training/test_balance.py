"""Rows are spread over ranks: each once, in the order that makes ranks wait least, unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.training.balance import assign, balance, return_logprobs
from flowtrain.training.tree import pack_rows
from flowtrain.training.world import World
from flowtrain.types import Sample, SampleId

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


def test_one_rank_keeps_its_rows(random_samples: Callable[..., list[Sample]], alone: World) -> None:
    rows = pack_rows(random_samples(9), 20)
    (found,) = balance([rows], lambda row: pytest.fail("nothing to weigh"), alone, num_takers=1)
    assert all(a is b for a, b in zip(found, rows, strict=True))


def test_one_rank_keeps_its_logprobs(alone: World) -> None:
    logprobs = {SampleId(0, 1, 2): (-0.5, -1.0)}
    assert return_logprobs(logprobs, [SampleId(0, 1, 2)], alone) == logprobs
