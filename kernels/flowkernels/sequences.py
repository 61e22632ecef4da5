"""Packed sequences: sequence s owns the tokens cu_seqlens[s] to cu_seqlens[s + 1] - 1. T: tokens,
S: sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_ids(cu_seqlens_S1: Tensor, num_tokens: int) -> Tensor:
    """Return the sequence of each token, int64 [T]."""
    positions_T = torch.arange(num_tokens, device=cu_seqlens_S1.device, dtype=cu_seqlens_S1.dtype)
    return torch.searchsorted(cu_seqlens_S1, positions_T, right=True) - 1


def sequence_sum(value_T: Tensor, counts_T: Tensor, cu_seqlens_S1: Tensor) -> Tensor:
    """Return the sum of each token's sequence over its tokens that count, at every token."""
    sequence_T = sequence_ids(cu_seqlens_S1, len(value_T))
    sum_S = value_T.new_zeros(len(cu_seqlens_S1) - 1)
    return sum_S.index_add_(0, sequence_T, torch.where(counts_T, value_T, 0.0))[sequence_T]


def sequence_mean(value_T: Tensor, counts_T: Tensor, cu_seqlens_S1: Tensor) -> Tensor:
    """Return the mean of each token's sequence over its tokens that count, at every token; 0 where
    a sequence has none.
    """
    num_T = sequence_sum(torch.ones_like(value_T), counts_T, cu_seqlens_S1)
    return sequence_sum(value_T, counts_T, cu_seqlens_S1) / num_T.clamp(min=1)
