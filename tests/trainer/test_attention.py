"""Forest attention against dense attention under the mask that `subtree_end` spells out."""

from __future__ import annotations

import math

import pytest
import torch
from forests import is_valid_tree, random_forest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flowtrain.trainer.attention.forest import Forest
from flowtrain.trainer.attention.registration import forest_attention


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    subtree_end: Tensor,
    scale: float,
    window: int | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """[H, N, D] each; token i sees j iff j <= i < subtree_end[j] and fewer than `window` tokens of
    its path lie between. Heads of keys are repeated for the queries that share them.
    """
    num_tokens, group = query.shape[1], query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    sees = [[j <= i < int(subtree_end[j]) for j in range(num_tokens)] for i in range(num_tokens)]
    for seen in sees:
        path = [j for j, is_seen in enumerate(seen) if is_seen]
        for j in [] if window is None else path[:-window]:
            seen[j] = False
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(~torch.tensor(sees), -math.inf)
    if sink_H is None:
        return scores.softmax(-1) @ value
    sinks = sink_H[:, None, None].expand(-1, num_tokens, 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value


def compare(
    subtree_end: Tensor,
    num_heads: int = 2,
    num_kv_heads: int = 2,
    scaling: float | None = None,
    window: int | None = None,
    has_sink: bool = False,
    forest: Forest | None = None,
) -> None:
    """Output and all gradients in fp64. `forest`: one that had other windows before."""
    assert is_valid_tree(subtree_end)
    num_tokens, size = len(subtree_end), 4
    rng = torch.Generator().manual_seed(1)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    ours = [
        torch.randn(1, h, num_tokens, size, generator=rng, dtype=torch.float64).requires_grad_()
        for h in heads
    ]
    theirs = [x.detach()[0].clone().requires_grad_() for x in ours]
    sinks = torch.randn(1, num_heads, generator=rng, dtype=torch.float64).requires_grad_()
    if has_sink:
        ours.append(sinks)
        theirs.append(sinks.detach()[0].clone().requires_grad_())
    out, weights = forest_attention(
        nn.Module(),
        *ours[:3],
        None,
        forest=forest or Forest.of(subtree_end),
        scaling=scaling,
        sliding_window=window,
        s_aux=sinks[0] if has_sink else None,
    )
    scale = size**-0.5 if scaling is None else scaling
    truth = dense_attention(*theirs[:3], subtree_end, scale, window, *theirs[3:])
    assert weights is None and out.shape == (1, num_tokens, num_heads, size)
    torch.testing.assert_close(out[0].transpose(0, 1), truth, rtol=1e-10, atol=1e-12)
    direction = torch.randn(truth.shape, generator=rng, dtype=torch.float64)
    (out[0].transpose(0, 1) * direction).sum().backward()
    (truth * direction).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad[0], other.grad, rtol=1e-10, atol=1e-12)


FORESTS = {
    "one chain": [6] * 6,
    "one token": [1],
    "lone tokens": [1, 2, 3],
    "two chains": [3, 3, 3, 5, 5],
    "chains of very different length": [1, 13, *[13] * 11, 15, 15, 16],
    # 0 1 is a prompt; 2 3 4 and 5 6 continue it; 7 follows the prompt's first token alone; 8 9 is
    # another tree.
    "shared prefix": [8, 7, 5, 5, 5, 7, 7, 8, 10, 10],
    "branches of branches": [9, 9, 6, 5, 5, 6, 9, 8, 9, 12, 11, 12],
}


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("name", FORESTS)
def test_forest_attention_is_dense_attention_under_the_mask(
    name: str, num_heads: int, num_kv_heads: int
) -> None:
    ends = torch.tensor(FORESTS[name])
    heads, forest = (num_heads, num_kv_heads), Forest.of(ends)
    for window, has_sink in [(None, False), (3, False), (None, True), (2, True), (2, False)]:
        compare(ends, *heads, window=window, has_sink=has_sink, forest=forest)


def test_the_scale_is_that_of_the_model() -> None:
    compare(torch.tensor(FORESTS["shared prefix"]), scaling=0.3)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.integers(1, 24),
    st.integers(0, 1000),
    st.sampled_from([0.1, 0.5, 3.0]),
    st.none() | st.integers(1, 9),
    st.booleans(),
)
def test_any_forest(
    num_tokens: int, seed: int, deep: float, window: int | None, has_sink: bool
) -> None:
    compare(random_forest(num_tokens, seed, deep), window=window, has_sink=has_sink)


def test_a_window_bounds_what_attention_reads() -> None:
    """1,000 tokens with two branches behind them: 8 keys more than queries in every piece."""
    ends = torch.tensor([1100] * 1000 + [1050] * 50 + [1100] * 50)
    forest = Forest.of(ends)
    blocks = forest.layout(window=9).blocks
    assert forest.layout(window=1050) is forest.layout() is not forest.layout(window=1049)
    assert sum(len(block.key_SK) for block in blocks) < 2 * 1100
    assert all(len(block.key_SK) <= 17 * block.num_segments for block in blocks)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_little_is_spent_on_padding(lengths: list[int]) -> None:
    """Padding adds at most a third to the tokens, whatever the lengths of the trees."""
    ends = torch.tensor(lengths).cumsum(0)
    forest = Forest.of(torch.repeat_interleave(ends, torch.tensor(lengths)))
    assert 0.75 * sum(len(block.query_SQ) for block in forest.layout().blocks) <= sum(lengths)


def test_trees_do_not_see_each_other() -> None:
    """Not even through NaN: a broken tree leaves the others alone."""
    subtree_end = torch.tensor([3, 3, 3, 5, 5, 9, 9, 9, 9])
    query, key, value = torch.randn(3, 1, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    clean, _ = forest_attention(nn.Module(), query, key, value, None, forest=Forest.of(subtree_end))
    key[:, :, 3], value[:, :, 4] = math.nan, math.inf
    broken, _ = forest_attention(
        nn.Module(), query, key, value, None, forest=Forest.of(subtree_end)
    )
    assert not broken[0, 3:5].isfinite().any()
    assert torch.equal(broken[0, :3], clean[0, :3]) and torch.equal(broken[0, 5:], clean[0, 5:])
