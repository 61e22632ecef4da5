"""Token losses: [T]-sized functions of the log-probability and the entropy, and their derivatives
by hand.

For every loss of one row, L(logp, H, lse), the gradient with respect to the logits is rank
structured,

    dz_j = (a + d) p_j - a [j = y] + c p_j (log p_j + H),

    a = -dL/dlogp,  c = -dL/dH,  d = dL/dlse,

so a loss type is defined by the numbers returned here, and one row kernel serves all of them. T:
target tokens, S: sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowkernels.loss_spec import KL, LossSpec, decode
from flowkernels.sequences import sequence_mean, sequence_sum
from flowkernels.targets import Slopes

_PER_TOKEN = ("advantage_T", "weight_T", "old_logprob_T", "ref_logprob_T", "sampler_logprob_T")
KL_BOUND = 10.0
"""The bound of "low_var_kl"."""
_FLAT = (*_PER_TOKEN[:4], "cu_seqlens_S1")
INPUTS = (
    "Tensor advantage, Tensor token_weight, Tensor? old, Tensor? ref, Tensor? cu_seqlens, str spec"
)
"""`TokenInputs.flat` and `LossSpec.encoded` in the schema of an operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """The inputs of a token loss: [T] each, in fp32 (fp64 for fp64 logits), without gradient.
    Tokens of weight 0 are ignored, whatever their values.
    """

    advantage_T: Tensor
    weight_T: Tensor
    old_logprob_T: Tensor | None = None
    ref_logprob_T: Tensor | None = None
    sampler_logprob_T: Tensor | None = None
    cu_seqlens_S1: Tensor | None = None
    """int32 or int64 [S + 1]: sequence s owns the tokens cu_seqlens[s] to cu_seqlens[s + 1] - 1."""

    def __getitem__(self, block: slice) -> TokenInputs:
        """Return the inputs of consecutive tokens; sequences outside the block become empty."""
        bounds_S1 = self.cu_seqlens_S1
        if bounds_S1 is not None:  # a clamp takes no look at the values
            bounds_S1 = bounds_S1.clamp(block.start, block.stop) - block.start
        return self._indexed(block, bounds_S1)

    def at(self, is_chosen_T: Tensor, index_A: Tensor) -> TokenInputs:
        """Return the inputs of the chosen tokens, given as mask and indices; sequences shrink."""
        bounds_S1 = self.cu_seqlens_S1
        if bounds_S1 is not None:
            zero = is_chosen_T.new_zeros(1, dtype=torch.int64)
            bounds_S1 = torch.cat([zero, is_chosen_T.cumsum(0)])[bounds_S1.long()]
        return self._indexed(index_A, bounds_S1)

    def _indexed(self, index: slice | Tensor, cu_seqlens_S1: Tensor | None) -> TokenInputs:
        parts: dict[str, Any] = {
            name: x if x is None else x[index] for name, x in self.per_token().items()
        }
        return replace(self, **parts, cu_seqlens_S1=cu_seqlens_S1)

    def per_token(self) -> dict[str, Any]:
        """Return the tensors [T] by name, including the ones that are None."""
        return {name: getattr(self, name) for name in _PER_TOKEN}

    def flat(self) -> tuple[Tensor | None, ...]:
        """Return the fields that an operator takes, in the order of `INPUTS`, without the sampler's
        log-probs, which are corrected for beforehand.
        """
        return tuple(getattr(self, name) for name in _FLAT)

    def corrected(self, spec: LossSpec) -> TokenInputs:
        """Return the inputs with the spec's TIS on the advantages and its MIS on the weights."""
        advantage_T, weight_T = correct_for_sampler(
            spec,
            self.advantage_T,
            self.weight_T,
            self.old_logprob_T,
            self.sampler_logprob_T,
            self.cu_seqlens_S1,
        )
        return replace(self, advantage_T=advantage_T, weight_T=weight_T)

    def scored(self, logprob_T: Tensor, entropy_T: Tensor, lse_T: Tensor) -> Tokens:
        """Return the inputs together with the results of the forward pass."""
        return Tokens(
            logprob_T=logprob_T,
            entropy_T=entropy_T,
            lse_T=lse_T,
            cu_seqlens_S1=self.cu_seqlens_S1,
            **self.per_token(),
        )


def unflatten_inputs(*flat: Any) -> tuple[LossSpec, TokenInputs]:
    """Return the loss and its inputs from the arguments of an operator."""
    *tensors, encoded = flat
    return decode(encoded), TokenInputs(**dict(zip(_FLAT, tensors, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(TokenInputs):
    """The argument of a token loss: its inputs, and the results of the forward pass."""

    logprob_T: Tensor
    entropy_T: Tensor
    lse_T: Tensor


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of each target token and its derivatives, [T] each."""

    loss_T: Tensor
    dlogprob_T: Tensor
    """dL/dlogp."""
    dentropy_T: Tensor | None
    """dL/dH; None when it is zero everywhere, which spares the row kernel a term."""
    log_ratio_T: Tensor
    """logp - old before any clamp (of the sequence for "gspo")."""
    is_clipped_T: Tensor
    """bool: the clip or dual clip zeroed the policy gradient, or bounded the ratio of "cispo"."""
    kl_T: Tensor
    """KL estimate to the reference policy; without one, k3 of the old policy against the new."""
    dlse_T: Tensor | None = None
    """dL/dlse; None when it is zero everywhere."""
    dsequence_T: Tensor | None = None
    """Derivative by logp through the ratio of the sequence, summed over the losses of its tokens
    times their weights; None for losses that depend on no other token."""

    def weighted_slopes(self, weight_T: Tensor) -> Slopes:
        """Return the derivatives of the weighted sum of losses; 0 where the weight is 0, even for a
        derivative that is not finite.
        """
        dlogprob_T, dentropy_T, dlse_T = (
            None if x is None else torch.where(weight_T != 0, weight_T * x, 0.0)
            for x in (self.dlogprob_T, self.dentropy_T, self.dlse_T)
        )
        assert dlogprob_T is not None
        if self.dsequence_T is not None:
            dlogprob_T = dlogprob_T + torch.where(weight_T != 0, self.dsequence_T, 0.0)
        return Slopes(dlogprob_T, dentropy_T, dlse_T)


TokenLossFn = Callable[[Tokens], TokenLoss]
"""A custom loss: maps all tokens to each one's loss and derivatives, before weighting."""


def by_autograd(loss: Callable[[Tokens], Tensor]) -> TokenLossFn:
    """Return a `TokenLossFn` built from a function that computes the loss [T] of each token.

    Autograd differentiates the loss by `logprob_T`, `entropy_T` and `lse_T`. The loss of a token
    may depend on other tokens.
    """

    def with_slopes(tokens: Tokens) -> TokenLoss:
        with torch.enable_grad():
            leaves = [
                x.detach().requires_grad_()
                for x in (tokens.logprob_T, tokens.entropy_T, tokens.lse_T)
            ]
            loss_T = loss(
                replace(tokens, logprob_T=leaves[0], entropy_T=leaves[1], lse_T=leaves[2])
            )
            if loss_T.shape != tokens.logprob_T.shape:
                raise ValueError(
                    f"the loss has the shape {tuple(loss_T.shape)}, not one number for each of "
                    f"{len(tokens.logprob_T)} tokens"
                )
            weight_T = tokens.weight_T
            total = torch.where(weight_T != 0, weight_T * loss_T, 0.0).sum()
            weighted = torch.autograd.grad(total, leaves, allow_unused=True)
        zeros_T = torch.zeros_like(tokens.logprob_T)
        # `policy_loss` multiplies by the weights again.
        slopes = [
            None if x is None else torch.where(weight_T != 0, x / weight_T, 0.0) for x in weighted
        ]
        # The statistics are those of any loss; here nothing is known of a clip.
        nll = token_loss(LossSpec("nll"), tokens)
        return replace(
            nll,
            loss_T=loss_T.detach(),
            dlogprob_T=zeros_T if slopes[0] is None else slopes[0],
            dentropy_T=slopes[1],
            dlse_T=slopes[2],
        )

    return with_slopes


def token_loss(spec: LossSpec, tokens: Tokens) -> TokenLoss:
    """Return the loss of each token with its derivatives.

    Raises:
        ValueError: kl_coef > 0 without `ref_logprob_T`, "gspo" without `cu_seqlens_S1`.
    """
    check_inputs(spec, tokens)
    logprob_T, advantage_T = tokens.logprob_T, tokens.advantage_T
    old_T = logprob_T if tokens.old_logprob_T is None else tokens.old_logprob_T
    log_ratio_T = logprob_T - old_T
    # dratio: by the log-ratio, which moves as logp does, but for the ratio of a sequence.
    if spec.loss_type == "nll":
        loss_T, dratio_T = -advantage_T * logprob_T, -advantage_T
        is_clipped_T = torch.zeros_like(logprob_T, dtype=torch.bool)
    elif spec.loss_type == "cispo":
        loss_T, dratio_T, is_clipped_T = _cispo(spec, log_ratio_T, advantage_T, logprob_T)
    else:
        if spec.loss_type == "gspo":
            log_ratio_T = _sequence_mean(log_ratio_T, tokens)
        loss_T, dratio_T, is_clipped_T = _clipped_ratio(spec, log_ratio_T, advantage_T)
    dlogprob_T = torch.zeros_like(logprob_T)

    ref_T = tokens.ref_logprob_T
    kl_T, dkl_T = (
        _kl(spec, logprob_T, ref_T, spec.kl)
        if ref_T is not None
        else _kl(spec, logprob_T, old_T, "k3")
    )
    if spec.kl_coef > 0:
        term_T, slope_T = kl_T, dkl_T
        if spec.kl_ratio:
            limit = spec.log_ratio_limit
            ratio_T = log_ratio_T.clamp(-limit, limit).exp()
            term_T, slope_T = ratio_T * kl_T, ratio_T * dkl_T
            dratio_T = dratio_T + spec.kl_coef * torch.where(log_ratio_T.abs() > limit, 0.0, term_T)
        loss_T = loss_T + spec.kl_coef * term_T
        dlogprob_T = spec.kl_coef * slope_T
    dsequence_T = None
    if spec.loss_type == "gspo":
        # The ratio is that of a mean over the sequence, so each of its tokens moves all of them.
        dsequence_T = _sequence_mean(tokens.weight_T * dratio_T, tokens)
    else:
        dlogprob_T = dlogprob_T + dratio_T
    dentropy_T = None
    if spec.entropy_coef != 0:
        loss_T = loss_T - spec.entropy_coef * tokens.entropy_T
        dentropy_T = torch.full_like(logprob_T, -spec.entropy_coef)
    dlse_T = None
    if spec.z_loss_coef > 0:
        loss_T = loss_T + spec.z_loss_coef * tokens.lse_T.square()
        dlse_T = 2 * spec.z_loss_coef * tokens.lse_T
    return TokenLoss(
        loss_T, dlogprob_T, dentropy_T, log_ratio_T, is_clipped_T, kl_T, dlse_T, dsequence_T
    )


def check_inputs(spec: LossSpec, inputs: TokenInputs) -> None:
    """Raise a ValueError if an input that the loss needs is missing."""
    if spec.kl_coef > 0 and inputs.ref_logprob_T is None:
        raise ValueError(f"kl_coef={spec.kl_coef} needs ref_logprob_T")
    if spec.loss_type == "gspo" and inputs.cu_seqlens_S1 is None:
        raise ValueError("loss_type='gspo' needs cu_seqlens_S1, the bounds of the sequences")


def correct_for_sampler(
    spec: LossSpec,
    advantage_T: Tensor,
    weight_T: Tensor,
    old_logprob_T: Tensor | None,
    sampler_logprob_T: Tensor | None,
    cu_seqlens_S1: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return advantages corrected by TIS and weights corrected by MIS; unchanged if `spec` has
    neither.

    `policy_loss` applies the same correction. Call this function first if you divide by the sum of
    the weights, so that dropped tokens leave the denominator too. Applying MIS twice changes
    nothing; apply TIS only once. With correction_level="sequence" the ratio is the product over all
    tokens with weight of a sequence of `cu_seqlens_S1`.

    Source: TIS, "Your efficient RL framework secretly brings you off-policy RL training" (Yao et
    al., 2025); MIS likewise.
    """
    if spec.tis is None and spec.mis is None:
        return advantage_T, weight_T
    if old_logprob_T is None or sampler_logprob_T is None:
        name = "old_logprob_T" if old_logprob_T is None else "sampler_logprob_T"
        raise ValueError(f"tis={spec.tis} and mis={spec.mis} need {name}")
    log_ratio_T = old_logprob_T - sampler_logprob_T
    if spec.correction_level == "sequence":
        if cu_seqlens_S1 is None:
            raise ValueError("correction_level='sequence' needs cu_seqlens_S1")
        log_ratio_T = sequence_sum(log_ratio_T, weight_T != 0, cu_seqlens_S1)
    limit = spec.log_ratio_limit
    ratio_T = log_ratio_T.clamp(-limit, limit).exp()
    if spec.tis is not None:
        advantage_T = advantage_T * ratio_T.clamp(max=spec.tis)
    if spec.mis is not None:
        # A NaN ratio is kept: it must show up in the loss.
        weight_T = torch.where((ratio_T < spec.mis[0]) | (ratio_T > spec.mis[1]), 0.0, weight_T)
    return advantage_T, weight_T


def _clipped_ratio(
    spec: LossSpec, log_ratio_T: Tensor, advantage_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return -min(r A, clip(r) A), at most -c A where A < 0; its derivative by log r; where that
    was clipped away.
    """
    limit = spec.log_ratio_limit
    ratio_T = log_ratio_T.clamp(-limit, limit).exp()
    unclipped_T = ratio_T * advantage_T
    clipped_T = ratio_T.clamp(1 - spec.clip_low, 1 + spec.clip_high) * advantage_T
    # The two are equal inside the clip range, where the gradient is that of r A.
    is_clipped_T = unclipped_T > clipped_T
    loss_T = torch.where(is_clipped_T, -clipped_T, -unclipped_T)
    if spec.dual_clip is not None:
        bound_T = -spec.dual_clip * advantage_T
        is_dual_T = (advantage_T < 0) & (loss_T > bound_T)
        loss_T = torch.where(is_dual_T, bound_T, loss_T)
        is_clipped_T = is_clipped_T | is_dual_T
    is_flat_T = is_clipped_T | (log_ratio_T.abs() > limit)
    return loss_T, torch.where(is_flat_T, 0.0, -unclipped_T), is_clipped_T


def _cispo(
    spec: LossSpec, log_ratio_T: Tensor, advantage_T: Tensor, logprob_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute CISPO: the ratio, bounded above, is a constant weight of the log-prob's gradient."""
    ratio_T = log_ratio_T.clamp(-spec.log_ratio_limit, spec.log_ratio_limit).exp()
    slope_T = -ratio_T.clamp(max=1 + spec.clip_high) * advantage_T
    return slope_T * logprob_T, slope_T, ratio_T > 1 + spec.clip_high


def _sequence_mean(value_T: Tensor, tokens: Tokens) -> Tensor:
    assert tokens.cu_seqlens_S1 is not None
    return sequence_mean(value_T, tokens.weight_T != 0, tokens.cu_seqlens_S1)


def _kl(spec: LossSpec, logprob_T: Tensor, other_T: Tensor, estimator: KL) -> tuple[Tensor, Tensor]:
    """Return the KL estimate against `other` and its derivative by logp."""
    raw_T = other_T - logprob_T
    u_T = raw_T.clamp(-spec.log_ratio_limit, spec.log_ratio_limit)
    match estimator:
        case "k1":
            kl_T, dkl_T = -u_T, torch.full_like(u_T, 1.0)
        case "k2":
            kl_T, dkl_T = u_T.square() / 2, -u_T
        case _:
            kl_T, dkl_T = u_T.expm1() - u_T, -u_T.expm1()
    if estimator == "low_var_kl":
        dkl_T = torch.where(kl_T > KL_BOUND, 0.0, dkl_T)
        kl_T = kl_T.clamp(max=KL_BOUND)
    return kl_T, torch.where(raw_T.abs() > spec.log_ratio_limit, 0.0, dkl_T)
