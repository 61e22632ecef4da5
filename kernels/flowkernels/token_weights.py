"""Averaging rules as weights per token; `policy_loss` itself only computes sums."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowkernels.arguments import check_sequences, check_tokens
from flowkernels.sequences import sequence_ids

Averaging = Literal["token", "sequence", "constant"]


def token_weights(
    cu_seqlens_S1: Tensor,
    num_tokens: int,
    averaging: Averaging,
    *,
    mask_T: Tensor | None = None,
    length: int | None = None,
) -> Tensor:
    """Return the weights, fp32 [T], that turn a sum over tokens into the chosen average; 0 where
    `mask_T` is false.

    Args:
        cu_seqlens_S1: [S + 1] int32 or int64, bounds of the sequences.
        num_tokens: T, the last of these bounds.
        averaging: "token": the mean over all tokens (DAPO, arXiv 2503.14476). "sequence": the mean
            over sequences of their token means (GRPO, arXiv 2402.03300). "constant": the sum over
            tokens divided by S * length (Dr.GRPO, arXiv 2503.20783).
        mask_T: [T] bool, tokens to train on; all by default. Sequences without such tokens still
            count in S.
        length: the constant divisor of "constant", usually the longest response allowed.

    Raises:
        ValueError: an argument that does not fit, with its name and value.

    The averages cover the tokens of one call. Over several micro-batches or ranks, weigh each token
    by 1 (or 1 / tokens of its sequence) and divide by the sum of these weights over the whole
    batch.
    """
    device = cu_seqlens_S1.device
    check_sequences(cu_seqlens_S1, num_tokens, device)
    if averaging not in ("token", "sequence", "constant"):
        raise ValueError(f"averaging={averaging!r} must be 'token', 'sequence' or 'constant'")
    if (averaging == "constant") != (length is not None) or (
        length is not None and not length >= 1
    ):
        raise ValueError(
            f"length={length} must be a number >= 1 for averaging 'constant' and None for the "
            f"others, got {averaging!r}"
        )
    if mask_T is None:
        mask_T = torch.ones(num_tokens, dtype=torch.bool, device=device)
    check_tokens("mask_T", mask_T, (num_tokens,), (torch.bool,), device)
    weight_T, num_sequences = mask_T.float(), max(len(cu_seqlens_S1) - 1, 1)
    if averaging == "token":
        return weight_T / weight_T.sum().clamp(min=1)
    if length is not None:
        return weight_T / (num_sequences * length)
    sequence_T = sequence_ids(cu_seqlens_S1, num_tokens)
    num_S = weight_T.new_zeros(num_sequences).index_add_(0, sequence_T, weight_T)
    return weight_T / (num_sequences * num_S.clamp(min=1))[sequence_T]
