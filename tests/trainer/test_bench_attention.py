"""The ways of `bench.attention` agree with the trainer's: in their outputs, and in the gradients,
which FlexAttention has on a CPU where the check that refuses them is taken out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from bench import attention as bench
from bench import tree_attention
from bench.attention import Case, cases, measure_way, way_of
from bench.tree_attention import SplitTree
from flowtrain.trainer.attention import flex

CPU = torch.device("cpu")
SHAPE = (4, 2, 16)
"""Heads, key heads and their size."""


@pytest.fixture
def backward() -> Iterator[None]:
    """Gradients of FlexAttention on a CPU."""
    with patch.object(flex_attention, "_validate_device", lambda *_: None):
        yield


@pytest.fixture
def case(backward: None) -> Case:
    """Two turns of two rollouts with the results of flex."""
    return with_truth(next(cases(0.012, SHAPE, CPU, layouts=["3 turns"])))


def with_truth(case: Case) -> Case:
    measure_way(case, "flex", "", 1)
    return case


@pytest.mark.parametrize("kind", ["flex", "rectangles", "split", "trl"])
def test_a_way_has_the_results_of_flex_and_a_row_that_says_so(
    case: Case, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients too: those of copies are summed up."""
    monkeypatch.setattr(flex, "_MIN_PAIRS", 1)
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
