"""Siblings in a row: the largest first, which changes nothing but the order."""

from __future__ import annotations

import torch
from forests import is_valid_tree, random_forest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowtrain.records import Sample
from flowtrain.records.sampling import Routes
from flowtrain.trainer.packing import pack_row
from flowtrain.trainer.tree_shape import heaviest_first


def sees(subtree_end_N: Tensor) -> Tensor:
    """Who sees whom, bool [N, N]."""
    place_N = torch.arange(len(subtree_end_N))
    return (place_N <= place_N[:, None]) & (place_N[:, None] < subtree_end_N)


def children_sizes(subtree_end: list[int], start: int, stop: int) -> list[int]:
    """The sizes of the subtrees side by side in a part of a row."""
    sizes = []
    while start < stop:
        sizes.append(subtree_end[start] - start)
        start = subtree_end[start]
    return sizes


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_heaviest_first_keeps_who_sees_whom(seed: int) -> None:
    ends_N = random_forest(60, seed, 0.3)
    order_N = heaviest_first(ends_N.tolist())
    place_N = torch.arange(len(ends_N))
    new_ends_N = place_N + (ends_N - place_N)[order_N]
    assert sorted(order_N.tolist()) == list(range(len(ends_N)))
    assert is_valid_tree(new_ends_N)
    assert torch.equal(sees(new_ends_N), sees(ends_N)[order_N][:, order_N])
    new_ends = new_ends_N.tolist()
    for start, stop in [(0, len(new_ends)), *((i + 1, end) for i, end in enumerate(new_ends))]:
        sizes = children_sizes(new_ends, start, stop)
        assert sizes == sorted(sizes, reverse=True)


def test_a_row_that_is_laid_out_so_stays_as_it_is() -> None:
    for ends in ([4, 4, 3, 4], [2, 2, 4, 4], [1, 2, 3]):  # of equals the first stays first
        assert heaviest_first(ends).tolist() == list(range(len(ends)))


def test_packing_lays_the_largest_of_siblings_first() -> None:
    """Targets and routes follow their tokens; samples stay in their order."""

    def sample(first: int, *experts: int) -> Sample:
        zeros = (0.0,) * (len(experts) - 1)
        routes = Routes(bytes(experts), num_layers=1, num_chosen=1)
        return Sample((5, first), (8,) * len(zeros), zeros, zeros, zeros, routes=routes)

    row = pack_row([sample(1, 9, 1), sample(2, 9, 2, 3, 4)])
    assert row.input_ids_N.tolist() == [5, 2, 8, 8, 1]
    assert row.position_ids_N.tolist() == [0, 1, 2, 3, 1]
    assert row.subtree_end_N.tolist() == [5, 4, 4, 4, 5]
    assert row.target_row_T.tolist() == [4, 1, 2, 3]
    assert row.routes_NLC is not None
    assert row.routes_NLC.flatten().tolist() == [9, 2, 3, 4, 1]
