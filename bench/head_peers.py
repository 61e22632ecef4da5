"""Heads of other projects: log-probs of targets straight from hidden states, called as their
sources have it.

TRL 1.16's chunked head and Liger 0.8.5's `FusedLinearScaledCrossEntropy` (CuTe on sm_90, chunks of
512 tokens in torch elsewhere) give a number per token, on which any loss can be put. Liger's
`FusedLinearGRPOLoss` is the same loss whole: sequence by sequence, in chunks of 2048 tokens and
4096 ids. PyTorch's `linear_cross_entropy` sums a cross entropy: another loss, the same three
products. All are compared with torch on a CPU, in value and both gradients
(`tests/kernels/test_head_peers.py`).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

NEEDS_GPU = ("liger",)
MODULES = {
    "trl": "trl.kernels",
    "liger": "liger_kernel.transformers.grpo_loss",
    "liger_grpo": "liger_kernel.chunked_loss",
}


def missing(peer: str, device: str) -> str | None:
    """Why a peer cannot be measured; None if it can."""
    if peer in NEEDS_GPU and device == "cpu":
        return "its kernels need a GPU"
    if peer == "linear_cross_entropy" and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        return f"torch {torch.__version__} has none"
    if peer in MODULES:
        try:
            importlib.import_module(MODULES[peer])
        except Exception as error:  # noqa: BLE001  # foreign code may fail in any way
            return f"{MODULES[peer]} cannot be imported: {error}"
    return None


def trl(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction

    logprob_T: Tensor = ChunkedLogProbFunction.apply(
        hidden_TD, weight_VD, None, targets_T, 1.0, 8192, None, 1.0, ("entropy",)
    )[0]
    return logprob_T


def liger(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
        LigerFusedLinearScaledCrossEntropyFunction,
    )

    loss_T: Tensor = LigerFusedLinearScaledCrossEntropyFunction.apply(
        hidden_TD, weight_VD, targets_T
    )
    return -loss_T


LOGPROBS = {"trl": trl, "liger": liger}


def liger_grpo(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    advantage_T: Tensor,
    old_T: Tensor,
    length: int,
    clip: tuple[float, float],
    compiled: bool = True,
) -> Tensor:
    """Takes sequences of equal length with an advantage each, and of weights 1 / T: "dapo" divides
    by the number of tokens.
    """
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    size = len(targets_T) // length
    options: dict[str, Any] = {
        "beta": 0.0,
        "compiled": compiled,
        "use_ref_model": False,
        "loss_type": "dapo",
        "epsilon_low": clip[0],
        "epsilon_high": clip[1],
    }
    ids, old, advantage = (
        targets_T.view(size, length),
        old_T.view(size, length),
        advantage_T[::length].contiguous(),
    )
    hidden, mask = hidden_TD.view(size, length, -1), torch.ones_like(ids)
    loss: Tensor = LigerFusedLinearGRPOLoss(**options)(
        hidden, weight_VD, ids, mask, advantage, old_per_token_logps=old
    )[0]
    return loss


def torch_cross_entropy(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """Another loss, the same three products."""
    function, options = (
        torch.nn.functional.linear_cross_entropy,
        torch.nn.LinearCrossEntropyOptions(),
    )
    loss: Tensor = function(hidden_TD, weight_VD, targets_T, options=options)
    return loss
