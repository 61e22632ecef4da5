"""M2PO: a trust region by the second moment of the log-ratios (arXiv 2510.01161), as bounds of
PPO's clip.

Maths, over all tokens of a mini-batch, with d = logp - old: a token whose update moves the policy
further away has A d > 0. Of these, the ones with the largest d^2 lose their gradient until the mean
d^2 of the others is at most tau_M2. PPO's clip to [e^-tau, e^tau] zeroes the gradient of exactly
the tokens with A d > 0 and |d| > tau, so any tau between the largest |d| that stays and the
smallest that goes performs the masking. Cost: one sort of T numbers.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from flowkernels.loss_spec import LossSpec


def divergent_log_ratios(log_ratio_T: Tensor, advantage_T: Tensor, weight_T: Tensor) -> Tensor:
    """Return |d| of the tokens with weight and A d > 0. `m2po_clip` takes these sizes from all
    micro-batches and ranks.
    """
    return log_ratio_T[(weight_T != 0) & (advantage_T * log_ratio_T > 0)].abs()


def m2po_clip(spec: LossSpec, size_M: Tensor, threshold: float) -> LossSpec:
    """Return the loss with its clip narrowed until the mean square of `size_M` within it is at most
    `threshold`; never widens the clip of `spec`.
    """
    bound = min(second_moment_bound(size_M, threshold), spec.log_ratio_limit)
    return replace(
        spec,
        clip_low=min(spec.clip_low, -math.expm1(-bound)),
        clip_high=min(spec.clip_high, math.expm1(bound)),
    )


def second_moment_bound(size_M: Tensor, threshold: float) -> float:
    """Return tau, or inf if no token has to be masked. Equal sizes stay or go together.

    Example: sizes 0.1, 0.2, 0.3 and 0.4 have the cumulative mean squares 0.01, 0.025, 0.047 and
    0.075; a threshold of 0.05 masks the last one, and tau is 0.35.
    """
    size_M = size_M.double().sort().values
    mean_M = size_M.square().cumsum(0) / torch.arange(1, len(size_M) + 1, device=size_M.device)
    num_kept = int((mean_M <= threshold).sum())  # a mean of ascending numbers ascends
    if num_kept == len(size_M):
        return math.inf
    # Equal sizes go together, so the largest that stays is below the first that goes.
    smaller_M = size_M[size_M < size_M[num_kept]]
    return (float(size_M[num_kept]) + (float(smaller_M[-1]) if len(smaller_M) else 0.0)) / 2
