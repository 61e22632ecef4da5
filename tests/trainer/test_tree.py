"""Packing: nothing lost, nothing twice, rows of like size, and every array is right."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from forests import is_valid_tree, tree_bounds
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.agentflow_shape import agentflow_samples
from flowtrain.records import Sample, SampleId
from flowtrain.trainer import packing as tree
from flowtrain.trainer.cost import ForwardCost
from flowtrain.trainer.packing import PackedRow, empty_row, pack, pack_row, pack_rows
from tests.long_histories import Token, counted, history


@st.composite
def sample_lists(draw: st.DrawFn) -> list[Sample]:
    """Samples of three tokens, so that many begin alike; each can be told by its advantages."""
    token, samples = st.integers(0, 2), []
    shapes = draw(
        st.lists(
            st.tuples(
                st.lists(token, min_size=1, max_size=6), st.lists(token, min_size=1, max_size=4)
            ),
            max_size=12,
        )
    )
    for number, (prompt, response) in enumerate(shapes):
        logprobs = tuple(-x - number / 8 for x in response)
        weights = tuple(x + 0.25 * number for x in response)
        samples.append(
            Sample(
                tuple(prompt),
                tuple(response),
                logprobs,
                tuple(-number - x / 4 for x in response),
                weights,
                minibatch=number % 3,
            )
        )
    return samples


def unpack(row: PackedRow) -> list[Sample]:
    """The samples of a row, from its arrays alone."""
    ends, ids = row.subtree_end_N.tolist(), row.input_ids_N.tolist()
    samples = []
    for start, end in pairwise(row.cu_targets_S1.tolist()):
        targets, rows = row.target_ids_T[start:end].tolist(), row.target_row_T[start:end].tolist()
        path = [i for i in range(rows[-1] + 1) if ends[i] > rows[-1]]
        assert row.position_ids_N[path].tolist() == list(range(len(path)))
        inputs = [ids[i] for i in path]
        prompt = inputs[: len(inputs) - len(targets) + 1]
        assert path[len(prompt) - 1 :] == rows, "each target is predicted by the token before it"
        assert inputs[len(prompt) :] == targets[:-1], (
            "the inputs after the prompt are the response without its last token"
        )
        logprobs, advantages, weights = (
            tuple(x[start:end].tolist())
            for x in (row.sampler_logprob_T, row.advantage_T, row.loss_weight_T)
        )
        samples.append(Sample(tuple(prompt), tuple(targets), logprobs, advantages, weights))
    assert torch.equal(row.old_logprob_T, row.sampler_logprob_T) and row.ref_logprob_T is None
    return samples


def key(sample: Sample) -> tuple[object, ...]:
    ids, weights = (sample.prompt_ids, sample.response_ids), sample.loss_weights
    return (*ids, sample.logprobs, sample.advantages, weights)


def prefixes(samples: list[Sample]) -> set[tuple[int, ...]]:
    """One for each token that a row of them needs."""
    inputs = [s.prompt_ids + s.response_ids[:-1] for s in samples]
    return {sequence[:size] for sequence in inputs for size in range(1, len(sequence) + 1)}


@settings(derandomize=True, deadline=None, max_examples=300)
@given(sample_lists(), st.integers(1, 40), st.integers(1, 5))
def test_rows_hold_every_sample_once_and_share_what_can_be_shared(
    samples: list[Sample], num_rows: int, num_questions: int
) -> None:
    """All samples of a question are in one row."""
    named = [replace(s, sample_id=SampleId(n % num_questions, 0, n)) for n, s in enumerate(samples)]
    for every in (samples, named):
        rows = pack_rows(every, num_rows)
        unpacked = [unpack(row) for row in rows]
        assert sorted(key(s) for row in unpacked for s in row) == sorted(key(s) for s in samples)
        places: dict[int, set[int]] = {}
        for place, row in enumerate(rows):
            for sample_id in row.sample_ids:
                places.setdefault(sample_id.group, set()).add(place)
        assert all(len(found) == 1 for found in places.values())
    sizes = [len(row.input_ids_N) for row in rows]
    of_question = [
        len(prefixes([s for s in named if s.sample_id is not None and s.sample_id.group == n]))
        for n in range(num_questions)
    ]
    limit = max(1, -(-sum(of_question) // num_rows))
    assert all(size <= max(limit, *of_question) for size in sizes)
    assert len(rows) <= 2 * num_rows, "two that are side by side are over the limit together"


@settings(derandomize=True, deadline=None, max_examples=100)
@given(sample_lists(), st.integers(1, 40))
def test_arrays_of_rows(samples: list[Sample], num_rows: int) -> None:
    rows = pack_rows(samples, num_rows)
    for row, members in zip(rows, map(unpack, rows), strict=True):
        assert len(row.input_ids_N) == len(prefixes(members))
        assert row.num_unshared_tokens == sum(
            len(s.prompt_ids) + len(s.response_ids) - 1 for s in members
        )
        assert is_valid_tree(row.subtree_end_N)
        of_tokens = row.input_ids_N, row.position_ids_N, row.subtree_end_N
        of_targets = row.target_row_T, row.target_ids_T
        assert {tensor.dtype for tensor in (*of_tokens, *of_targets)} == {torch.int64}
        values = row.advantage_T, row.loss_weight_T, row.old_logprob_T
        assert {tensor.dtype for tensor in values} == {torch.float32}
    # Samples without ids are cut in the order of their tokens, so that is all that is repeated.
    repeated = sum(row.num_repeated_tokens for row in rows)
    assert sum(len(row.input_ids_N) for row in rows) - repeated == len(prefixes(samples))
    cost = ForwardCost(2.0, 3.0, 5.0, 1.0, per_near_pair=((2, 7.0), (4, 11.0)))
    whole = [pack_row(samples)] if samples else []
    places = [p for row in whole for p in row.position_ids_N.tolist()]
    pairs = sum(3 * (p + 1) + 7 * min(p + 1, 2) + 11 * min(p + 1, 4) for p in places)
    of_targets = 5 * sum(len(row.target_ids_T) for row in whole)
    assert sum(map(cost.flops, whole)) == 2 * len(places) + pairs + of_targets
    once = sum(map(cost.training_flops, rows))
    assert once == sum(map(cost.training_flops, whole)), "whatever was cut"
    assert sum(map(cost.flops, rows)) >= sum(map(cost.flops, whole)) + 2 * repeated


def test_rows_are_of_like_size_and_no_question_is_cut() -> None:
    """Groups of AgentFlow's shape, each with 900 tokens that its rollouts have in common."""
    samples = [
        replace(s, prompt_ids=(n, *s.prompt_ids), sample_id=SampleId(n, 0, k))
        for n, size in enumerate([2, 3, 2, 4, 1, 2, 2, 3, 1, 2])
        for k, s in enumerate(agentflow_samples(3, 0.3, size))
    ]
    sizes = [len(row.input_ids_N) for row in pack_rows(samples, 4)]
    assert sum(sizes) == len(prefixes(samples)), "nothing is repeated"
    assert 4 <= len(sizes) <= 6
    assert max(sizes) <= -(-sum(sizes) // 4)
    (row,) = pack(samples, 1)[0]
    assert len(row.input_ids_N) == sum(sizes)
    assert len(pack(samples, 1, num_takers=3)[0]) > 4


@settings(derandomize=True, deadline=None)
@given(sample_lists())
def test_targets_keep_the_order_of_the_samples(samples: list[Sample]) -> None:
    assert not samples or [key(s) for s in unpack(pack_row(samples))] == [key(s) for s in samples]


def test_the_example_of_a_row() -> None:
    """Prompts (1, 2) and (1,) share a token, as do responses (3, 4) and (3, 5)."""
    samples = [
        Sample((1, 2), (3, 4), (-0.1, -0.2), (1.5, 1.25), (0.25, 0.5)),
        Sample((5,), (6,), (-0.3,), (-1.0,), (0.75,)),
        Sample((1, 2), (3, 5), (-0.4, -0.5), (0.5, 0.5), (1.0, 1.25)),
        Sample((1,), (7, 8), (-0.6, -0.7), (2.0, 2.0), (1.5, 1.75)),
    ]
    row = pack_row(samples)
    assert row.input_ids_N.tolist() == [1, 2, 3, 7, 5]
    assert row.position_ids_N.tolist() == [0, 1, 2, 1, 0]
    assert row.subtree_end_N.tolist() == [4, 3, 3, 4, 5]
    assert row.target_row_T.tolist() == [1, 2, 4, 1, 2, 0, 3]
    assert row.target_ids_T.tolist() == [3, 4, 6, 3, 5, 7, 8]
    assert row.cu_targets_S1.tolist() == [0, 2, 3, 5, 7]
    found = row.sampler_logprob_T.tolist()
    assert found == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7])
    assert row.advantage_T.tolist() == [1.5, 1.25, -1.0, 0.5, 0.5, 2.0, 2.0]
    assert row.loss_weight_T.tolist() == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]


@settings(derandomize=True, deadline=None)
@given(sample_lists())
def test_without_sharing_each_sample_is_a_tree_of_its_own(samples: list[Sample]) -> None:
    row = pack_row(samples, share=False)
    assert sorted(key(s) for s in unpack(row)) == sorted(key(s) for s in samples)
    assert len(tree_bounds(row.subtree_end_N)) == len(samples) + 1
    assert len(row.input_ids_N) == row.num_unshared_tokens


@settings(derandomize=True, deadline=None)
@given(sample_lists())
def test_minibatches_get_their_own_samples(samples: list[Sample]) -> None:
    minibatches = pack(samples, 3)
    assert len(minibatches) == 3
    for index, rows in enumerate(minibatches):
        found = sorted(key(s) for row in rows for s in unpack(row))
        assert found == sorted(key(s) for s in samples if s.minibatch == index)


def test_an_empty_row_trains_nothing() -> None:
    row = empty_row()
    assert row.loss_weight_T.tolist() == [0] and is_valid_tree(row.subtree_end_N)
    assert len(row.input_ids_N) == len(row.target_ids_T) == 1
    assert row.ref_logprob_T is not None, "a loss with a KL term must take it"


@pytest.mark.parametrize(
    ("subtree_end", "bounds"),
    [
        ([3, 3, 3, 5, 5], [0, 3, 5]),
        ([6, 3, 3, 6, 5, 6], [0, 6]),
        ([1, 2, 3], [0, 1, 2, 3]),
        ([4, 4, 3, 4, 5], [0, 4, 5]),
        ([], [0]),
    ],
)
def test_bounds_of_trees(subtree_end: list[int], bounds: list[int]) -> None:
    assert tree_bounds(torch.tensor(subtree_end, dtype=torch.int64)) == bounds
    assert is_valid_tree(torch.tensor(subtree_end, dtype=torch.int64))


@settings(derandomize=True, deadline=None, max_examples=500)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_a_tree_is_valid_iff_subtrees_nest(ends: list[int]) -> None:
    num_tokens = len(ends)
    nests = all(i < end <= num_tokens for i, end in enumerate(ends))
    nests = nests and all(
        ends[k] <= ends[j] for j in range(num_tokens) for k in range(j + 1, ends[j])
    )
    assert is_valid_tree(torch.tensor(ends)) is nests


def test_inputs_are_put_together_and_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over a thousand samples of ten thousand tokens takes a quarter of a second."""
    num_made = num_compared = 0

    class Inputs(tuple[int, ...]):
        def __lt__(self, other: tuple[int, ...]) -> bool:
            nonlocal num_compared
            num_compared += 1
            return tuple(self) < tuple(other)

    def made(sample: Sample) -> Inputs:
        nonlocal num_made
        num_made += 1
        return Inputs(sample.prompt_ids + sample.response_ids[:-1])

    samples = [Sample((1, 2, n % 4), (n, 3), (0.0,) * 2, (0.0,) * 2, (1.0,) * 2) for n in range(32)]
    expected = tree.pack_rows(samples, 5)
    monkeypatch.setattr(tree, "_inputs", made)
    rows = tree.pack_rows(samples, 5)
    assert len(rows) > 1 and num_made == 32
    alone = num_compared
    sorted(map(made, samples))
    assert alone == num_compared - alone, "one sort, and no second of each row"
    for row, before in zip(rows, expected, strict=True):
        assert torch.equal(row.input_ids_N, before.input_ids_N)
        assert torch.equal(row.target_row_T, before.target_row_T)


def test_prompts_are_compared_once_to_sort_them_and_once_to_share_them() -> None:
    pairs = counted(history(num_turns=24, num_new=5))
    samples = [Sample(*pair, *[(1.0,) * len(pair[1])] * 3) for pair in pairs]
    Token.num_compared = 0
    row = pack_row(samples)
    assert len(row.input_ids_N) == len(pairs[-1][0]) + len(pairs[-1][1]) - 1
    assert Token.num_compared <= 2 * sum(len(prompt) + len(said) for prompt, said in pairs)
