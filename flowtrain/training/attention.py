"""Attention over packed rows, for any Hugging Face decoder through its attention interface.

A row of N tokens is a forest (see `tree.py`). Attention alone is computed on the trees side by side, in blocks of trees of similar length
padded to the longest of the block, so that no N x N mask exists and hardly a FLOP is spent on padding or between trees; everything else
in the model runs on the row as it is.

S: trees of a block, L: tokens of its longest tree, H: heads, D: head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from flowtrain.training.tree import tree_bounds

NAME = "flowtrain_forest"
_SIMILAR = 0.75
"""A tree shorter than this share of a block's longest starts the next block: more blocks mean less padding and more calls."""


@dataclass(frozen=True, slots=True)
class Block:
    """Trees of similar length, side by side."""

    token_SL: Tensor
    """int64 [S * L], the token of the row in each slot; padding repeats the first token of its tree."""
    mask_SLL: Tensor
    """bool [S, 1, L, L]: query sees key. Padding sees and is seen by itself alone, so that no row of the softmax is empty."""


@dataclass(frozen=True, slots=True)
class Forest:
    """How a row falls into blocks. Made once per row, used by every layer."""

    blocks: tuple[Block, ...]
    slot_N: Tensor
    """int64, where token i is among the slots of all blocks, one after another."""

    @classmethod
    def of(cls, subtree_end_N: Tensor) -> Forest:
        trees = sorted(pairwise(tree_bounds(subtree_end_N)), key=lambda tree: tree[0] - tree[1])
        slot_N = torch.empty_like(subtree_end_N)
        blocks, num_slots = [], 0
        for members in _similar(trees):
            block, is_token_SL = _block(members, subtree_end_N)
            slots = torch.arange(num_slots, num_slots + len(is_token_SL), device=subtree_end_N.device)
            slot_N[block.token_SL[is_token_SL]] = slots[is_token_SL]
            num_slots += len(is_token_SL)
            blocks.append(block)
        return cls(tuple(blocks), slot_N)


def _similar(trees: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cut trees, longest first, into blocks."""
    blocks: list[list[tuple[int, int]]] = []
    longest = 0
    for start, end in trees:
        if end - start < _SIMILAR * longest or not blocks:
            blocks.append([])
            longest = end - start
        blocks[-1].append((start, end))
    return blocks


def _block(trees: Sequence[tuple[int, int]], subtree_end_N: Tensor) -> tuple[Block, Tensor]:
    """The block of these trees, and which of its slots hold a token."""
    bounds_S2 = torch.tensor(trees, device=subtree_end_N.device)
    start_S1, size_S1 = bounds_S2[:, :1], bounds_S2.diff(dim=1)
    place_L = torch.arange(int(size_S1.max()), device=subtree_end_N.device)
    is_token_SL = place_L < size_S1
    token_SL = start_S1 + torch.where(is_token_SL, place_L, 0)
    # Padding "ends" right after itself, which makes it visible to itself alone.
    end_SL = torch.where(is_token_SL, subtree_end_N[token_SL] - start_S1, place_L + 1)
    mask_SLL = (place_L[:, None] >= place_L) & (place_L[:, None] < end_SL[:, None, :])
    return Block(token_SL.flatten(), mask_SLL[:, None]), is_token_SL.flatten()


def forest_attention(
    module: nn.Module,
    query_1HND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    attention_mask: Tensor | None,
    *,
    forest: Forest,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function that Hugging Face calls in every layer; returns [1, N, H, D]."""
    assert attention_mask is None, "packed rows carry their structure in `forest`"
    query_NHD, key_NHD, value_NHD = (x[0].transpose(0, 1) for x in (query_1HND, key_1HND, value_1HND))
    outs = []
    for block in forest.blocks:
        query, key, value = (_side_by_side(x, block) for x in (query_NHD, key_NHD, value_NHD))
        out_SHLD = F.scaled_dot_product_attention(
            query, key, value, block.mask_SLL, dropout_p=dropout, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        outs.append(out_SHLD.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).index_select(0, forest.slot_N).unsqueeze(0), None


def _side_by_side(x_NHD: Tensor, block: Block) -> Tensor:
    """[N, H, D] -> [S, H, L, D]"""
    num_trees, _, length, _ = block.mask_SLL.shape
    return x_NHD.index_select(0, block.token_SL).view(num_trees, length, *x_NHD.shape[1:]).transpose(1, 2)


AttentionInterface.register(NAME, forest_attention)
