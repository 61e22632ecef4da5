"""What all of the queries see goes to a library: outputs and gradients are those of the forest.

FlexAttention has gradients on a CPU where the check that refuses them is taken out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from forests import random_forest, tree_bounds
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention import flex_attention

from flowtrain.trainer.attention import flex, rectangles
from flowtrain.trainer.attention.flex import BLOCK, FlexTree
from flowtrain.trainer.attention.forest import Forest


@pytest.fixture(autouse=True)
def backward(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flex, "_MIN_PAIRS", 1)
    with patch.object(flex_attention, "_validate_device", lambda *_: None):
        yield


def results(
    structure: Any, seed: int, num_before: int, num_kv_heads: int, **options: Any
) -> list[Tensor]:
    """The output, and the gradients of all that attention is given."""
    rng = torch.Generator().manual_seed(seed)
    num = len(structure.subtree_end_N) if isinstance(structure, FlexTree) else options.pop("num")

    def normal(heads: int, tokens: int) -> Tensor:
        x = torch.randn(1, heads, tokens, 16, generator=rng, dtype=torch.float64)
        return x.requires_grad_()

    inputs = [normal(heads, num) for heads in (4, num_kv_heads, num_kv_heads)]
    parts = [num_before // 3, num_before - num_before // 3] if num_before else []
    before = [(normal(num_kv_heads, n), normal(num_kv_heads, n)) for n in parts]
    out = structure.attend(*inputs, scaling=0.3, before=before, **options)
    flat = [*inputs, *(x for pair in before for x in pair)]
    upstream = torch.randn(out.shape, generator=rng, dtype=torch.float64)
    return [out, *torch.autograd.grad(out, flat, upstream)]


@pytest.mark.parametrize("num_before", [0, 7, 256])
@pytest.mark.parametrize(("seed", "deep", "num_kv_heads"), [(0, 0.005, 1), (1, 0.1, 2), (2, 1, 4)])
def test_it_is_the_attention_of_the_forest(
    seed: int, deep: float, num_kv_heads: int, num_before: int
) -> None:
    ends_N = random_forest(2 * BLOCK, seed, deep)
    tree = FlexTree.of(ends_N, num_before, rectangles=True)
    assert len(tree.roots) <= len(tree_bounds(ends_N)) - 1
    assert bool(tree.roots) == (not num_before)
    ours = results(tree, seed, num_before, num_kv_heads)
    truth = results(Forest.of(ends_N), seed, num_before, num_kv_heads, num=len(ends_N))
    for own, other in zip(ours, truth, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


def test_roots_are_those_that_others_see() -> None:
    """Of each tree the first run, without trees of one run."""
    ends = [9, 9, 5, 5, 5, 9, 9, 9, 9, 10, 13, 13, 13, 17, 17, 16, 17]
    roots = flex._large_roots(torch.tensor(ends))
    assert [tuple(root) for root in roots] == [(0, 2, 9), (13, 15, 17)]


@pytest.mark.parametrize("num_before", [0, 7])
def test_windows_and_sinks_have_the_whole_mask(num_before: int) -> None:
    ends_N = random_forest(BLOCK, 1, 0.1)
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64)
    for options in ({"window": 9}, {"sink_H": sinks}):
        tree = FlexTree.of(ends_N, num_before, rectangles=True)
        ours = results(tree, 0, num_before, 2, **options)
        truth = results(Forest.of(ends_N), 0, num_before, 2, num=BLOCK, **options)
        torch.testing.assert_close(ours[0], truth[0], rtol=1e-6, atol=1e-6)


def test_cudnn_is_called_as_torch_declares_it() -> None:
    """Shapes alone: only a GPU shows values."""
    with FakeTensorMode():
        query, key, value = (
            torch.empty(1, heads, num, 64, device="cuda", dtype=torch.bfloat16)
            for heads, num in ((8, 256), (2, 384), (2, 384))
        )
        out, lse, state = rectangles._attend(query, key, value, 0.1)
        assert (out.shape, out.dtype) == (query.shape, query.dtype)
        assert (lse.shape, lse.dtype) == (query.shape[:3], torch.float32)
        given = torch.empty_like(out), query, key, value, out, lse
        gradients = rectangles._attend_backward(given, state, 0.1)
        assert [x.shape for x in gradients] == [x.shape for x in (query, key, value)]
