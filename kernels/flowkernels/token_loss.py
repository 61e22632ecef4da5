"""Token losses: [T]-sized functions of the log-probability and the entropy, and their derivatives by hand.

For every loss of one row, L(logp, H), the gradient with respect to the logits is rank structured,

    dz_j = a p_j - b [j = y] + c p_j (log p_j + H),   a = b = -dL/dlogp,  c = -dL/dH,

so a loss type is nothing but the three numbers returned here, and one row kernel serves them all. T: target tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Which token loss. Averaging is not part of it: it comes in as `weight_T`.

    Example: LossSpec(clip_low=0.2, clip_high=0.3, dual_clip=3.0, kl_coef=0.001) is the loss of AgentFlow's released code.
    """

    policy: Literal["clip", "nll"] = "clip"
    """"clip": PPO/GRPO, -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logp - old). "nll": -A logp (supervised)."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """c > 1 bounds the loss of negative advantages: for A < 0, loss <= -c A (Ye et al., arXiv 1912.09729)."""
    kl_coef: float = 0.0
    """beta of the KL term to the reference; 0 leaves it out."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator with u = logp_ref - logp: k1 = -u, k2 = u^2 / 2, k3 = exp(u) - u - 1 (Schulman, "Approximating KL divergence")."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus, which is subtracted from the loss."""
    log_ratio_limit: float = 20.0
    """Log-ratios (of old and of reference) are clamped to +-this before exp; no gradient flows through a clamped one."""

    def __post_init__(self) -> None:
        if self.policy not in ("clip", "nll"):
            raise ValueError(f"policy={self.policy!r} must be 'clip' or 'nll'")
        if self.kl not in ("k1", "k2", "k3"):
            raise ValueError(f"kl={self.kl!r} must be 'k1', 'k2' or 'k3'")
        if not (0 <= self.clip_low <= 1 and self.clip_high >= 0):
            raise ValueError(f"clip_low={self.clip_low} must be in [0, 1] and clip_high={self.clip_high} must be >= 0")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip={self.dual_clip} must be above 1")
        if self.kl_coef < 0:
            raise ValueError(f"kl_coef={self.kl_coef} must be >= 0")


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """One entry per target token, fp32 [T]."""

    loss_T: Tensor
    dlogprob_T: Tensor
    """dL/dlogp."""
    dentropy_T: Tensor | None
    """dL/dH; None when it is zero everywhere, which spares the row kernel a term."""
    log_ratio_T: Tensor
    """logp - old before any clamp."""
    is_clipped_T: Tensor
    """bool: the clip (or the dual clip) took this token's policy gradient away."""
    kl_T: Tensor
    """The KL estimate to the reference where there is one, else k3 of old against new."""


def token_loss(
    spec: LossSpec,
    logprob_T: Tensor,
    entropy_T: Tensor,
    advantage_T: Tensor,
    old_logprob_T: Tensor | None = None,
    ref_logprob_T: Tensor | None = None,
) -> TokenLoss:
    """The loss of each token and its derivatives. All tensors fp32 [T].

    Raises:
        ValueError: policy "clip" without `old_logprob_T`, or kl_coef > 0 without `ref_logprob_T`.
    """
    old_T = logprob_T if old_logprob_T is None else old_logprob_T
    log_ratio_T = logprob_T - old_T
    if spec.policy == "nll":
        loss_T, dlogprob_T = -advantage_T * logprob_T, -advantage_T
        is_clipped_T = torch.zeros_like(logprob_T, dtype=torch.bool)
    else:
        if old_logprob_T is None:
            raise ValueError("policy='clip' needs old_logprob_T")
        loss_T, dlogprob_T, is_clipped_T = _clipped_ratio(spec, log_ratio_T, advantage_T)

    kl_T, dkl_T = _kl(spec, logprob_T, ref_logprob_T) if ref_logprob_T is not None else _kl(spec, logprob_T, old_T, "k3")
    if spec.kl_coef > 0:
        if ref_logprob_T is None:
            raise ValueError(f"kl_coef={spec.kl_coef} needs ref_logprob_T")
        loss_T = loss_T + spec.kl_coef * kl_T
        dlogprob_T = dlogprob_T + spec.kl_coef * dkl_T
    dentropy_T = None
    if spec.entropy_coef != 0:
        loss_T = loss_T - spec.entropy_coef * entropy_T
        dentropy_T = torch.full_like(logprob_T, -spec.entropy_coef)
    return TokenLoss(loss_T, dlogprob_T, dentropy_T, log_ratio_T, is_clipped_T, kl_T)


def _clipped_ratio(spec: LossSpec, log_ratio_T: Tensor, advantage_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-min(r A, clip(r) A), at most -c A where A < 0; its derivative by logp; where that derivative was clipped away."""
    limit = spec.log_ratio_limit
    ratio_T = log_ratio_T.clamp(-limit, limit).exp()
    unclipped_T = ratio_T * advantage_T
    clipped_T = ratio_T.clamp(1 - spec.clip_low, 1 + spec.clip_high) * advantage_T
    loss_T = -torch.minimum(unclipped_T, clipped_T)
    # The two are equal inside the clip range, where the gradient is that of r A.
    is_clipped_T = unclipped_T > clipped_T
    if spec.dual_clip is not None:
        bound_T = -spec.dual_clip * advantage_T
        is_dual_T = (advantage_T < 0) & (loss_T > bound_T)
        loss_T = torch.where(is_dual_T, bound_T, loss_T)
        is_clipped_T = is_clipped_T | is_dual_T
    has_gradient_T = ~is_clipped_T & (log_ratio_T.abs() <= limit)
    return loss_T, torch.where(has_gradient_T, -unclipped_T, 0.0), is_clipped_T


def _kl(spec: LossSpec, logprob_T: Tensor, other_T: Tensor, estimator: str | None = None) -> tuple[Tensor, Tensor]:
    """The KL estimate against `other` and its derivative by logp."""
    raw_T = other_T - logprob_T
    u_T = raw_T.clamp(-spec.log_ratio_limit, spec.log_ratio_limit)
    match estimator or spec.kl:
        case "k1":
            kl_T, dkl_T = -u_T, torch.ones_like(u_T)
        case "k2":
            kl_T, dkl_T = u_T.square() / 2, -u_T
        case _:
            kl_T, dkl_T = u_T.expm1() - u_T, -u_T.expm1()
    return kl_T, torch.where(raw_T == u_T, dkl_T, 0.0)
