"""Attention over packed rows, for any Hugging Face decoder through its attention interface.

A row of N tokens is a forest (see `tree.py`). Attention alone is computed on the trees side by side, padded to the longest, so that no
N x N mask exists and no FLOP is spent between trees; everything else in the model runs on the row without padding.

S: trees of the row, L: tokens of the longest tree, H: heads, D: head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from flowtrain.training.tree import tree_bounds

NAME = "flowtrain_forest"


@dataclass(frozen=True, slots=True)
class Forest:
    """Where each token of a row goes when its trees are laid side by side. Made once per row, used by every layer."""

    slot_N: Tensor
    """int64, index of token i in the flattened [S * L] layout."""
    shape: tuple[int, int]
    """(S, L)"""
    mask_SLL: Tensor
    """bool [S, 1, L, L]: query sees key. Padding sees itself, so that no row of the softmax is empty."""

    @classmethod
    def of(cls, subtree_end_N: Tensor) -> Forest:
        device = subtree_end_N.device
        bounds = torch.tensor(tree_bounds(subtree_end_N), device=device)
        starts_S, sizes_S = bounds[:-1], bounds.diff()
        num_trees, longest = len(sizes_S), int(sizes_S.max())
        tree_N = torch.repeat_interleave(torch.arange(num_trees, device=device), sizes_S)
        offset_N = torch.arange(len(subtree_end_N), device=device) - starts_S[tree_N]
        slot_N = tree_N * longest + offset_N
        place_L = torch.arange(longest, device=device)
        # Padding "ends" right after itself, which makes it visible to itself alone.
        end_SL = (place_L + 1).repeat(num_trees, 1)
        end_SL.view(-1)[slot_N] = subtree_end_N - starts_S[tree_N]
        mask_SLL = (place_L[:, None] >= place_L) & (place_L[:, None] < end_SL[:, None, :])
        return cls(slot_N, (num_trees, longest), mask_SLL[:, None])


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
    query, key, value = (_side_by_side(x, forest) for x in (query_1HND, key_1HND, value_1HND))
    out_SHLD = F.scaled_dot_product_attention(
        query, key, value, forest.mask_SLL, dropout_p=dropout, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    out = out_SHLD.transpose(1, 2).flatten(0, 1)
    return out[forest.slot_N].unsqueeze(0), None


def _side_by_side(x_1HND: Tensor, forest: Forest) -> Tensor:
    """[1, H, N, D] -> [S, H, L, D], zeros where a tree has ended."""
    x_NHD = x_1HND[0].transpose(0, 1)
    padded = x_NHD.new_zeros(forest.shape[0] * forest.shape[1], *x_NHD.shape[1:])
    padded = padded.index_copy(0, forest.slot_N, x_NHD)
    return padded.view(*forest.shape, *x_NHD.shape[1:]).transpose(1, 2)


AttentionInterface.register(NAME, forest_attention)
