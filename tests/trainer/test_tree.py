"""Packing: nothing lost, nothing twice, nothing over budget, and every array is right."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from forests import is_valid_tree, tree_bounds
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.agentflow_shape import agentflow_samples
from flowtrain.records import Sample
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


def num_repeated_in_filled_rows(samples: list[Sample], budget: int) -> int:
    """Tokens that rows repeat where each is filled before the next begins."""
    rows: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda s: s.prompt_ids + s.response_ids[:-1]):
        if rows and len(prefixes([*rows[-1], sample])) <= budget:
            rows[-1].append(sample)
        else:
            rows.append([sample])
    return sum(len(prefixes(row)) for row in rows) - len(prefixes(samples))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(sample_lists(), st.integers(1, 40))
def test_rows_hold_every_sample_once_within_the_budget_and_share_what_can_be_shared(
    samples: list[Sample], budget: int
) -> None:
    rows = pack_rows(samples, budget)
    unpacked = [unpack(row) for row in rows]
    assert sorted(key(s) for row in unpacked for s in row) == sorted(key(s) for s in samples)
    for row, members in zip(rows, unpacked, strict=True):
        assert len(row.input_ids_N) <= budget or len(members) == 1
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
    repeated = sum(row.num_repeated_tokens for row in rows)
    assert sum(len(row.input_ids_N) for row in rows) - repeated == len(prefixes(samples))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "_EVENNESS", 0.0)
        uneven = pack_rows(samples, budget)
    filled = num_repeated_in_filled_rows(samples, budget)
    assert sum(row.num_repeated_tokens for row in uneven) <= filled
    assert repeated <= filled + tree._EVENNESS * tree._ROW_TOKENS * len(rows), "for evenness' sake"
    cost = ForwardCost(2.0, 3.0, 5.0, 1.0, per_near_pair=((2, 7.0), (4, 11.0)))
    whole = pack_rows(samples, 1000)
    places = [p for row in whole for p in row.position_ids_N.tolist()]
    pairs = sum(3 * (p + 1) + 7 * min(p + 1, 2) + 11 * min(p + 1, 4) for p in places)
    of_targets = 5 * sum(len(row.target_ids_T) for row in whole)
    assert sum(map(cost.flops, whole)) == 2 * len(places) + pairs + of_targets
    once = sum(map(cost.training_flops, rows))
    assert once == sum(map(cost.training_flops, whole)), "whatever was cut"
    assert sum(map(cost.flops, rows)) >= sum(map(cost.flops, whole)) + 2 * repeated


@settings(derandomize=True, deadline=None, max_examples=100)
@given(sample_lists(), st.integers(1, 40))
def test_no_other_cuts_cost_less(samples: list[Sample], budget: int) -> None:
    """Against all of them, without what every one repeats."""
    samples = sorted(samples, key=lambda s: s.prompt_ids + s.response_ids[:-1])[:7]
    costs = []
    for cuts in product((False, True), repeat=max(len(samples) - 1, 0)):
        inner = [place for place, is_cut in enumerate(cuts, 1) if is_cut]
        parts = [samples[a:b] for a, b in pairwise([0, *inner, len(samples)])]
        if all(len(part) <= 1 or len(prefixes(part)) <= budget for part in parts):
            costs.append(cost_of([len(prefixes(part)) for part in parts if part], budget))
    found = [len(row.input_ids_N) for row in pack_rows(samples, budget)]
    assert cost_of(found, budget) == pytest.approx(min(costs))


def cost_of(sizes: list[int], budget: int) -> float:
    return sum(size + 512 * (1 + (size / budget) ** 2 / 2) for size in sizes)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1000, 6000))
def test_a_group_that_fits_in_a_row_is_not_cut(sizes: list[int], budget: int) -> None:
    """Groups of AgentFlow's shape, each with 900 tokens that its rollouts have in common."""
    groups = [
        [
            replace(s, prompt_ids=(n, *s.prompt_ids), advantages=(float(n),) * len(s.response_ids))
            for s in agentflow_samples(3, 0.3, size)
        ]
        for n, size in enumerate(sizes)
    ]
    rows = pack_rows([s for group in groups for s in group], budget)
    for n, group in enumerate(groups):
        num_rows = sum(bool((row.advantage_T == n).any()) for row in rows)
        assert num_rows == 1 or len(pack_row(group).input_ids_N) > budget


def test_cuts_fall_between_rollouts_and_leave_no_short_row() -> None:
    rows = pack_rows(agentflow_samples(4, 0.3), 6000)
    assert [row.num_repeated_tokens for row in rows] == [0, 900], "what a group has in common"
    assert all(len(row.input_ids_N) > 3500 for row in rows)
    chains = [Sample((7,) * (n % 3) + (9, n) * 50, (1,), *[(0.0,)] * 3) for n in range(10)]
    assert [len(row.cu_targets_S1) - 1 for row in pack_rows(chains, 900)] == [5, 5]


@settings(derandomize=True, deadline=None)
@given(sample_lists())
def test_targets_keep_the_order_of_the_samples(samples: list[Sample]) -> None:
    assert not samples or [key(s) for s in unpack(pack_row(samples))] == [key(s) for s in samples]


def of_size(size: int, token: int = 1) -> Sample:
    return Sample((token,) * size, (1,), (-1.0,), (1.0,), (1.0,))


def test_a_sample_over_the_budget_gets_a_row_of_its_own() -> None:
    rows = pack_rows([of_size(3, 5), of_size(30, 6), of_size(4, 7)], 10)
    assert [len(row.input_ids_N) for row in rows] == [3, 30, 4]


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
@given(sample_lists(), st.integers(1, 40))
def test_without_sharing_each_sample_is_a_tree_of_its_own(
    samples: list[Sample], budget: int
) -> None:
    rows = pack_rows(samples, budget, share=False)
    assert sorted(key(s) for row in rows for s in unpack(row)) == sorted(key(s) for s in samples)
    for row in rows:
        num_samples = len(row.cu_targets_S1) - 1
        assert len(tree_bounds(row.subtree_end_N)) == num_samples + 1
        assert len(row.input_ids_N) == row.num_unshared_tokens


@settings(derandomize=True, deadline=None)
@given(sample_lists())
def test_minibatches_get_their_own_samples(samples: list[Sample]) -> None:
    minibatches = pack(samples, 3, 16)
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
    expected = tree.pack_rows(samples, 20)
    monkeypatch.setattr(tree, "_inputs", made)
    rows = tree.pack_rows(samples, 20)
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
    (row,) = pack_rows(samples, 1000)
    assert len(row.input_ids_N) == len(pairs[-1][0]) + len(pairs[-1][1]) - 1
    assert Token.num_compared <= 2 * sum(len(prompt) + len(said) for prompt, said in pairs)
