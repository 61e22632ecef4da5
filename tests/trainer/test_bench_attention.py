"""The ways of `bench.attention` agree with the trainer's: in their outputs, and in the gradients,
which FlexAttention has on a CPU where the check that refuses them is taken out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from forests import is_valid_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention

from bench import attention as bench
from bench import tree_attention
from bench.attention import Case, cases, measure_way, way_of
from bench.tree_attention import RootTree, SplitTree, heavy_first
from flowtrain.records import Sample
from flowtrain.trainer.attention.flex import BLOCK, FlexTree, padded
from flowtrain.trainer.attention.forest import Forest
from flowtrain.trainer.packing import PackedRow, pack_row

CPU = torch.device("cpu")
SHAPE = (4, 2, 16)
"""Heads, key heads and their size."""


@pytest.fixture
def backward() -> Iterator[None]:
    """Gradients of FlexAttention on a CPU."""
    with patch.object(flex_attention, "_validate_device", lambda *_: None):
        yield


def random_row(seed: int) -> PackedRow:
    """Up to three trees of a few words, so that samples fork anywhere; one is the heaviest."""
    rng = random.Random(seed)

    def ids(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2) for _ in range(rng.randint(least, most)))

    samples = []
    for tree in range(3):
        constant = (tree + 2,) * rng.randint(1, 40)
        for _ in range(rng.randint(3, 6)):
            response = ids(1, 20)
            zeros = (0.0,) * len(response)
            samples.append(Sample(constant + ids(0, 9), response, zeros, zeros, zeros))
    return pack_row(samples)


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
    ends_N = random_row(seed).subtree_end_N
    order_N, new_ends_N = heavy_first(ends_N)
    assert sorted(order_N.tolist()) == list(range(len(ends_N)))
    assert is_valid_tree(new_ends_N)
    assert torch.equal(sees(new_ends_N), sees(ends_N)[order_N][:, order_N])
    new_ends = new_ends_N.tolist()
    for start, stop in [(0, len(new_ends)), *((i + 1, end) for i, end in enumerate(new_ends))]:
        sizes = children_sizes(new_ends, start, stop)
        assert sizes == sorted(sizes, reverse=True)


def test_a_row_that_is_laid_out_so_stays_as_it_is() -> None:
    for ends in ([4, 4, 3, 4], [2, 2, 4, 4], [1, 2, 3]):  # of equals the first stays first
        order_N, new_ends_N = heavy_first(torch.tensor(ends))
        assert (order_N.tolist(), new_ends_N.tolist()) == (list(range(len(ends))), ends)


@pytest.mark.parametrize(("seed", "num_kv_heads"), [(0, 1), (1, 2), (2, 4), (3, 2)])
def test_the_root_by_a_library_is_the_attention_of_the_forest(
    backward: None, seed: int, num_kv_heads: int
) -> None:
    ends_N = padded(random_row(seed)).subtree_end_N
    rng = torch.Generator().manual_seed(seed)
    shapes = [(1, number, len(ends_N), 16) for number in (4, num_kv_heads, num_kv_heads)]
    inputs = [torch.randn(shape, generator=rng).requires_grad_() for shape in shapes]
    upstream = torch.randn(1, len(ends_N), 4, 16, generator=rng)
    tree = RootTree.of(ends_N)
    assert 0 < tree.start < tree.stop < len(ends_N)  # a rectangle, and what is behind its tree
    found = []
    for own in (tree, FlexTree.of(ends_N), Forest.of(ends_N)):
        out = own.attend(*inputs, scaling=0.3)
        found.append([out, *torch.autograd.grad(out, inputs, upstream)])
    for truth in found[1:]:
        for ours, theirs in zip(found[0], truth, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_chain_has_no_rectangle_of_a_root() -> None:
    ends_N = torch.full((BLOCK,), BLOCK)
    inputs = torch.randn(3, 1, 2, BLOCK, 16)
    outs = [kind.of(ends_N).attend(*inputs, scaling=0.3) for kind in (RootTree, FlexTree)]
    assert torch.equal(*outs)


@pytest.fixture
def case(backward: None) -> Case:
    """Two turns of two rollouts with the results of flex."""
    return with_truth(next(cases(0.012, SHAPE, CPU, layouts=["3 turns"])))


def with_truth(case: Case) -> Case:
    measure_way(case, "flex", "", 1)
    return case


@pytest.mark.parametrize("kind", ["flex", "heavy first", "split", "root", "trl"])
def test_a_way_has_the_results_of_flex_and_a_row_that_says_so(case: Case, kind: str) -> None:
    """Gradients too: of tokens in another order, and of copies, which are summed up."""
    if kind == "trl":
        pytest.importorskip("trl")
    row = measure_way(case, kind, "tiny", 1)
    assert (row["heads"], row["layout"], row["way"]) == ("tiny", "3 turns", kind)
    assert row["max_diff"] < 1e-5
    assert {"forward_ms", "forward_tflops", "backward_ms", "backward_tflops"} <= row.keys()
    if kind == "trl":
        # One more for each sample's last response token, and for each fork before which it splits.
        assert row["tokens"] >= len(case.row.input_ids_N) + len(case.samples)
        assert row["kernel"].startswith("torch's SDPA")


def test_a_difference_is_seen_in_any_of_the_results(case: Case) -> None:
    assert case.truth is not None
    for number, truth in enumerate(case.truth):
        found = [x.clone() for x in case.truth]
        found[number][0, 1, 1, 1] += truth.abs().max()
        assert bench.max_diff(case, tuple(found)) > 0.9


def test_trl_has_the_tokens_of_ours_and_copies_of_them(case: Case) -> None:
    """Its path to a token reads what ours does; what ours lacks ends a response."""
    pytest.importorskip("trl")
    packed = tree_attention.trl_row(case.samples)
    place_M, first_N = tree_attention.trl_places(packed, case.row)
    assert torch.equal(place_M[first_N], torch.arange(len(case.row.input_ids_N)))
    assert torch.equal(packed["input_ids"][first_N], case.row.input_ids_N)
    assert torch.equal(packed["position_ids"][first_N], case.row.position_ids_N)
    deeper = packed["position_ids"] - case.row.position_ids_N[place_M]
    lacking = deeper == 1  # counted as their parents
    assert torch.equal(deeper, lacking.long())
    ends = {sample.response_ids[-1] for sample in case.samples}
    assert 0 < int(lacking.sum()) <= len(case.samples)
    assert set(packed["input_ids"][lacking].tolist()) <= ends


def test_without_trl_its_way_says_which_package_it_lacks(case: Case) -> None:
    tree_attention.trl_packing.cache_clear()
    with (
        patch("importlib.util.find_spec", lambda _: None),
        pytest.raises(ModuleNotFoundError) as error,
    ):
        measure_way(case, "trl", "", 1)
    assert error.value.name == "trl"


def test_a_chain_runs_by_the_kernel_that_torch_chooses_and_others_need_a_gpu(
    backward: None,
) -> None:
    case = with_truth(next(cases(0.01, SHAPE, CPU, layouts=["chain"])))
    assert case.subtree_end_N.tolist() == [128] * 128
    row = measure_way(case, "causal", "", 1)
    assert row["max_diff"] < 1e-5
    assert row["kernel"] == "torch's FLASH_ATTENTION"
    forced = [kind for kind in bench.ways_of("chain") if kind.startswith("causal ")]
    assert len(forced) == 3 and set(forced) == set(bench.GPU_WAYS)
    for kind in forced:
        with pytest.raises(RuntimeError, match="a GPU is needed"):
            measure_way(case, kind, "0.5b", 1)


@pytest.mark.parametrize("kind", ["causal cudnn", "causal flash", "causal efficient"])
def test_a_forced_kernel_is_named_and_the_only_one_allowed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = []

    def attend(query: Tensor, *_: Tensor, **options: object) -> Tensor:
        flags = torch.backends.cuda
        names = ("cudnn", "flash", "mem_efficient", "math")
        on = [name for name in names if getattr(flags, f"{name}_sdp_enabled")()]
        allowed.append((on, options["enable_gqa"]))
        return query

    case = next(cases(0.01, SHAPE, CPU, False, ["chain"]))
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", attend)
    case = replace(case, subtree_end_N=case.subtree_end_N.to("meta"))  # as if not on a CPU
    way = way_of(kind, case)
    way.attend(*case.inputs, scaling=0.3)
    word = kind.split()[1]
    assert word.upper() in way.kernel
    assert allowed == [([{"efficient": "mem_efficient"}.get(word, word)], word != "efficient")]


def test_the_lists_of_split_groups_are_made_once_per_row() -> None:
    """With the values of the tree that is not split."""
    case = next(cases(0.012, SHAPE, CPU, has_backward=False))
    tree = SplitTree.of(case.subtree_end_N)
    first = tree.attend(*case.inputs, scaling=0.25)
    lists = tree.batched
    assert torch.equal(tree.attend(*case.inputs, scaling=0.25), first)
    assert tree.batched is lists
