"""Future-aware advantages: a token's advantage grows when the policy has raised the probability of
the tokens after it (APPO, arXiv 2606.12384, eqs. 7 and 8).

Maths, within each sequence: d_t = logp - old; P_t = [d_t <= log c] with c the dual clip; F_t = P_t
d_t + g F_{t+1}, a decayed product of ratios in log space, with g = 2^(-1/half_life); A_fut =
clip(exp(clamp(F_t, -20, 20)), low, high), held constant; A = A_base (1 + coef A_fut). A_fut is
FIPO's future-KL (arXiv 2603.19835) with "1 +". A token's advantage depends on the log-probs of
later tokens, so the loss is a function of all tokens. The only cost is a second computation of the
head's logits (four products instead of three).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowkernels.branching import discounted_reverse_scan
from flowkernels.loss_spec import LossSpec
from flowkernels.sequences import sequence_ids
from flowkernels.token_loss import TokenLoss, TokenLossFn, Tokens, token_loss

_RISKY_RATIO = 6.0
_RISKY_LOW = 0.8


@dataclass(frozen=True, slots=True)
class FutureRatio:
    """The options of A_fut and of its effect on the advantage. The defaults are APPO's."""

    coef: float = 1.0
    """b in A_base (1 + b A_fut): 1 about doubles the advantage, 0 leaves it unchanged."""
    half_life: float = 64.0
    """tau: number of tokens after which a ratio counts half."""
    low: float = 1.0
    high: float = 1.2
    """A_fut lies in [low, high]; in [0.8, 1] for a negative advantage whose ratio is above 6."""
    max_dual_clipped: int | None = 1
    """Excludes from the policy term every sequence in which the dual clip bounds more tokens than
    this; None excludes no sequence."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.coef) and 0 < self.half_life < math.inf):
            raise ValueError(
                f"coef={self.coef} must be finite and half_life={self.half_life} above 0 and finite"
            )
        if not 0 <= self.low <= self.high < math.inf:
            raise ValueError(
                f"low={self.low} and high={self.high} must be 0 <= low <= high, finite"
            )
        if self.max_dual_clipped is not None and self.max_dual_clipped < 0:
            raise ValueError(f"max_dual_clipped={self.max_dual_clipped} must be >= 0")

    @property
    def gamma(self) -> float:
        """The decay g per token."""
        return float(2 ** (-1 / self.half_life))


def future_ratio(
    log_ratio_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    cu_seqlens_S1: Tensor,
    future: FutureRatio,
    dual_clip: float | None,
    impl: str = "auto",
) -> Tensor:
    """Return A_fut [T], before the 1 + coef; anything where a token has no weight."""
    joins_T = (weight_T != 0) & (log_ratio_T <= math.log(dual_clip or math.inf))
    sum_T = discounted_reverse_scan(
        log_ratio_T, cu_seqlens_S1, gamma=future.gamma, mask_T=joins_T, impl=impl
    )
    future_T = sum_T.clamp(-20.0, 20.0).exp().clamp(future.low, future.high)
    is_risky_T = (advantage_T < 0) & (log_ratio_T > math.log(_RISKY_RATIO))
    return torch.where(is_risky_T, future_T.clamp(_RISKY_LOW, 1.0), future_T)


def future_factor(
    log_ratio_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    cu_seqlens_S1: Tensor,
    *,
    future: FutureRatio,
    dual_clip: float | None,
    leaves_mean: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Return the factor of the advantages, [T], without gradient: 1 + coef A_fut, and 0 in
    sequences excluded from the policy term; undefined where a token has weight 0.

    Args:
        log_ratio_T: [T], logp - old, in fp32, or in fp64, which makes the result fp64.
        advantage_T: [T]; only the sign is used.
        weight_T: [T].
        cu_seqlens_S1: [S + 1] int32 or int64, bounds of the sequences: turns, or whole rollouts.
        dual_clip: c of the loss; None: the loss has no dual clip, and all sequences stay in.
        leaves_mean: remove excluded sequences from the mean of the policy term too, as in APPO's
            released code. The call must then cover all tokens of the mean: the remaining factors
            grow by the sum of all weights over the sum of the remaining ones. The mean of the KL
            term is unchanged.
    """
    takes_part_T = _takes_part(log_ratio_T, advantage_T, weight_T, cu_seqlens_S1, future, dual_clip)
    ratio_T = future_ratio(
        log_ratio_T, advantage_T, weight_T, cu_seqlens_S1, future, dual_clip, impl
    )
    factor_T = (1 + future.coef * ratio_T) * takes_part_T
    if not leaves_mean:
        return factor_T
    part_weight = (weight_T * takes_part_T).sum()
    return factor_T * torch.where(part_weight > 0, weight_T.sum() / part_weight, 0.0)


def _takes_part(
    log_ratio_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    cu_seqlens_S1: Tensor,
    future: FutureRatio,
    dual_clip: float | None,
) -> Tensor:
    """Return 1 for tokens of sequences that stay in the policy term, and 0 for the others."""
    if future.max_dual_clipped is None or dual_clip is None:
        return torch.ones_like(advantage_T)
    is_bounded_T = (weight_T != 0) & (advantage_T < 0) & (log_ratio_T > math.log(dual_clip))
    sequence_T = sequence_ids(cu_seqlens_S1, len(advantage_T))
    count_S = advantage_T.new_zeros(len(cu_seqlens_S1) - 1).index_add_(
        0, sequence_T, is_bounded_T.to(advantage_T.dtype)
    )
    return (count_S <= future.max_dual_clipped).to(advantage_T.dtype)[sequence_T]


def future_aware(spec: LossSpec, future: FutureRatio, impl: str = "auto") -> TokenLossFn:
    """Return the loss of `spec` with future-aware advantages, for `policy_loss` and
    `linear_policy_loss`.

    The call then needs `old_logprob_T` and `cu_seqlens_S1` (the responses). TIS acts on the
    advantage as in `policy_loss`; MIS acts on the weights, so the caller applies
    `correct_for_sampler` first. If a sequence is spread over several calls, or if tokens have to
    leave the mean, multiply the advantages by `future_factor` instead.

    Raises:
        ValueError: the loss of `spec` has no ratio per token ("nll", "gspo"), or a tensor is
            missing.
    """
    if spec.loss_type not in ("clip", "cispo"):
        raise ValueError(
            f"loss_type={spec.loss_type!r} has no ratio of a single token, which future-aware "
            "advantages need"
        )

    def loss(tokens: Tokens) -> TokenLoss:
        if tokens.old_logprob_T is None or tokens.cu_seqlens_S1 is None:
            raise ValueError("future-aware advantages need old_logprob_T and cu_seqlens_S1")
        base_T = tokens.corrected(spec).advantage_T
        factor_T = future_factor(
            tokens.logprob_T - tokens.old_logprob_T,
            base_T,
            tokens.weight_T,
            tokens.cu_seqlens_S1,
            future=future,
            dual_clip=spec.dual_clip,
            impl=impl,
        )
        return token_loss(spec, replace(tokens, advantage_T=base_T * factor_T))

    return loss
