"""Packing: nothing lost, nothing twice, nothing over budget, and every array of a row says what it should."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.training.tree import Row, empty_row, is_valid_tree, pack, pack_row, pack_rows, tree_bounds
from flowtrain.types import Sample


@st.composite
def sample_lists(draw: st.DrawFn) -> list[Sample]:
    """Samples whose numbers all differ, so that each token can be traced."""
    samples, number = [], 0
    for size, length in draw(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 6)), max_size=12)):
        ids = tuple(range(number, number + size + length))
        number += len(ids)
        response = ids[size:]
        logprobs, weights = tuple(-x - 0.5 for x in response), tuple(x + 0.25 for x in response)
        samples.append(Sample(ids[:size], response, logprobs, float(-number), weights, minibatch=number % 3))
    return samples


def unpack(row: Row) -> list[Sample]:
    """The samples of a row, from its arrays alone."""
    bounds, samples = tree_bounds(row.subtree_end_N), []
    for start, end in pairwise(bounds):
        here = (row.target_row_T >= start) & (row.target_row_T < end)
        targets = row.target_ids_T[here].tolist()
        inputs = row.input_ids_N[start:end].tolist()
        prompt = inputs[: len(inputs) - len(targets) + 1]
        assert inputs[len(prompt) :] == targets[:-1], "the inputs after the prompt are the response without its last token"
        assert row.target_row_T[here].tolist() == list(range(end - len(targets), end)), "each target is predicted by the token before it"
        assert row.position_ids_N[start:end].tolist() == list(range(end - start))
        assert row.subtree_end_N[start:end].tolist() == [end] * (end - start)
        assert torch.equal(row.old_logprob_T, row.sampler_logprob_T) and row.ref_logprob_T is None
        (advantage,) = set(row.advantage_T[here].tolist())
        logprobs, weights = tuple(row.sampler_logprob_T[here].tolist()), tuple(row.weight_T[here].tolist())
        samples.append(Sample(tuple(prompt), tuple(targets), logprobs, advantage, weights))
    return samples


def key(sample: Sample) -> tuple[object, ...]:
    return sample.prompt_ids, sample.response_ids, sample.logprobs, sample.advantage, sample.weights


@settings(derandomize=True, deadline=None)
@given(sample_lists(), st.integers(1, 40))
def test_rows_hold_every_sample_once_within_the_budget(samples: list[Sample], budget: int) -> None:
    rows = pack_rows(samples, budget)
    unpacked = [unpack(row) for row in rows]
    assert sorted(key(s) for row in unpacked for s in row) == sorted(key(s) for s in samples)
    for row, members in zip(rows, unpacked, strict=True):
        assert len(row.input_ids_N) <= budget or len(members) == 1
        assert len(row.input_ids_N) == sum(len(s.prompt_ids) + len(s.response_ids) - 1 for s in members)
        assert is_valid_tree(row.subtree_end_N)
        dtypes = [tensor.dtype for tensor in (row.input_ids_N, row.position_ids_N, row.subtree_end_N, row.target_row_T, row.target_ids_T)]
        assert set(dtypes) == {torch.int64}
        assert {row.advantage_T.dtype, row.weight_T.dtype, row.old_logprob_T.dtype} == {torch.float32}


@settings(derandomize=True, deadline=None)
@given(sample_lists(), st.integers(1, 40))
def test_rows_are_as_full_as_any_pair_allows(samples: list[Sample], budget: int) -> None:
    """No two rows could be one."""
    sizes = sorted(len(row.input_ids_N) for row in pack_rows(samples, budget))
    assert all(a + b > budget for a, b in pairwise(sizes))


def of_size(size: int) -> Sample:
    return Sample((1,) * size, (1,), (-1.0,), 1.0, (1.0,))


def test_each_sample_goes_into_the_fullest_row_that_takes_it() -> None:
    """Budget 20: 14, 12 open rows with room 6 and 8; 7 joins the 12 (room 1); 1 goes there, not into the room of 6."""
    rows = pack_rows([of_size(size) for size in (1, 7, 14, 12)], 20)
    assert [len(row.input_ids_N) for row in rows] == [14, 20]


def test_a_sample_over_the_budget_gets_a_row_of_its_own() -> None:
    rows = pack_rows([of_size(3), of_size(30), of_size(4)], 10)
    assert [len(row.input_ids_N) for row in rows] == [30, 7]


def test_the_example_of_a_row() -> None:
    """Prompt (1, 2), response (3, 4) and prompt (5,), response (6, 7): inputs are all but the last response token."""
    first = Sample((1, 2), (3, 4), (-0.1, -0.2), 1.5, (0.25, 0.5))
    row = pack_row([first, Sample((5,), (6, 7), (-0.3, -0.4), -1.0, (0.75, 1.0))])
    assert row.input_ids_N.tolist() == [1, 2, 3, 5, 6]
    assert row.position_ids_N.tolist() == [0, 1, 2, 0, 1]
    assert row.subtree_end_N.tolist() == [3, 3, 3, 5, 5]
    assert row.target_row_T.tolist() == [1, 2, 3, 4]
    assert row.target_ids_T.tolist() == [3, 4, 6, 7]
    assert row.sampler_logprob_T.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert row.advantage_T.tolist() == [1.5, 1.5, -1.0, -1.0]
    assert row.weight_T.tolist() == [0.25, 0.5, 0.75, 1.0]


def test_no_samples_make_no_rows() -> None:
    assert pack_rows([], 10) == []
    assert pack([], 3, 10) == [[], [], []]


@settings(derandomize=True, deadline=None)
@given(sample_lists())
def test_minibatches_get_their_own_samples(samples: list[Sample]) -> None:
    minibatches = pack(samples, 3, 16)
    assert len(minibatches) == 3
    for index, rows in enumerate(minibatches):
        assert sorted(key(s) for row in rows for s in unpack(row)) == sorted(key(s) for s in samples if s.minibatch == index)


def test_an_empty_row_trains_nothing() -> None:
    row = empty_row()
    assert row.weight_T.tolist() == [0] and is_valid_tree(row.subtree_end_N)
    assert len(row.input_ids_N) == len(row.target_ids_T) == 1
    assert row.ref_logprob_T is not None, "a loss with a KL term must take it"


@pytest.mark.parametrize(
    ("subtree_end", "bounds"),
    [([3, 3, 3, 5, 5], [0, 3, 5]), ([6, 3, 3, 6, 5, 6], [0, 6]), ([1, 2, 3], [0, 1, 2, 3]), ([4, 4, 3, 4, 5], [0, 4, 5]), ([], [0])],
)
def test_bounds_of_trees(subtree_end: list[int], bounds: list[int]) -> None:
    assert tree_bounds(torch.tensor(subtree_end, dtype=torch.int64)) == bounds
    assert is_valid_tree(torch.tensor(subtree_end, dtype=torch.int64))


@settings(derandomize=True, deadline=None, max_examples=500)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_a_tree_is_valid_iff_subtrees_nest(ends: list[int]) -> None:
    num_tokens = len(ends)
    nests = all(i < end <= num_tokens for i, end in enumerate(ends))
    nests = nests and all(ends[k] <= ends[j] for j in range(num_tokens) for k in range(j + 1, ends[j]))
    assert is_valid_tree(torch.tensor(ends)) is nests
