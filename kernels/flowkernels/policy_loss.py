"""Log-probabilities and policy losses from logits: the public functions.

The maths is in `rows.py` (logits) and `token_loss.py` (tokens). A `LossSpec` without a sequence
term runs as one kernel that reads a row, takes its loss and writes its gradient: 4 B per element of
bf16 when the second read comes from cache. GSPO and a loss of one's own see all tokens before any
gradient is known, so there the logits are read again: 6 B. T: target tokens, V: vocabulary, S:
sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowkernels import statistics
from flowkernels.arguments import check_rows, check_token_inputs, resolve_impl
from flowkernels.row_loss import (
    columns,
    policy_loss_inplace_op,
    policy_loss_op,
    scale_op,
    weighted_slopes,
)
from flowkernels.rows import Rows, SamplingMask, scores, write_gradient
from flowkernels.token_loss import LossSpec, TokenLossFn, Tokens, correct_for_sampler, token_loss


@dataclass(frozen=True, slots=True)
class LogProbs:
    """fp32 [T] each; 0 in rows whose target is negative."""

    logprob_T: Tensor
    entropy_T: Tensor
    """Exact, over the full vocabulary, in nats."""
    lse_T: Tensor
    """Log-sum-exp of the row at the temperature. Never carries a gradient."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """What `policy_loss` returns. Only `loss` carries a gradient."""

    loss: Tensor
    """0-d fp32: sum_T weight * token loss."""
    logprob_T: Tensor
    """fp32; 0 in rows that do not count (weight 0 or a negative target), which are not read."""
    entropy_T: Tensor
    stats: dict[str, Tensor]
    """fp32, left on the device, over the tokens that count: the 0-d `num_tokens_sum`, `weight_sum`,
    `entropy_sum`, `kl_sum`, `ratio_sum`, `ratio_max`, `ratio_min` (all before clipping),
    `clipped_low_sum`, `clipped_high_sum` (by the side of 1 the ratio is on; the dual clip counts as
    high), `mismatch_sum` (|logp - old|), and `ratio_histogram_sum` [16], see
    `statistics.BIN_WIDTH`. `*_sum` add up over micro-batches and ranks, `*_max` and `*_min` reduce
    so; where no token counts these are -inf and inf."""


def logprobs(
    logits_TV: Tensor,
    target_ids_T: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    sampling_mask: SamplingMask | None = None,
    differentiable: bool = False,
    impl: str = "auto",
) -> LogProbs:
    """Log-probability of each target, the entropy and the log-sum-exp of its row, in one read of
    the logits.

    Args:
        logits_TV: [T, V] fp32, bf16 or fp16, rows of any stride; accumulated in fp32. fp64 is
            accepted, in torch, and stays fp64.
        target_ids_T: [T] int64 in [0, V); a negative id marks a row that is not read.
        temperature: divides the logits; > 0, a number or fp32 [T].
        softcap: logits become softcap * tanh(logits / softcap) first.
        sampling_mask: take log-probs over these ids, as the sampler did; entropy and lse stay those of the
            full vocabulary.
        differentiable: let gradients of `logprob_T` and `entropy_T` reach the logits (a second
            read, in the backward pass).
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value. Values of tensors are
            checked on the CPU and with FLOWKERNELS_DEBUG=1; elsewhere a target above V and NaN
            logits give NaN.
    """
    rows = check_rows(logits_TV, target_ids_T, temperature, softcap, sampling_mask)
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        score_3T, _ = scores(rows, resolve_impl(impl, logits_TV.device, logits_TV.dtype))
    logprob_T, entropy_T, lse_T = score_3T.unbind()
    return LogProbs(logprob_T, entropy_T, lse_T.detach())


def policy_loss(
    logits_TV: Tensor,
    target_ids_T: Tensor,
    *,
    spec: LossSpec | TokenLossFn,
    advantage_T: Tensor,
    weight_T: Tensor,
    old_logprob_T: Tensor | None = None,
    ref_logprob_T: Tensor | None = None,
    sampler_logprob_T: Tensor | None = None,
    cu_seqlens_S1: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    sampling_mask: SamplingMask | None = None,
    inplace: bool = False,
    impl: str = "auto",
) -> PolicyLoss:
    """sum_T weight * token_loss(spec), with the gradient formed in the forward pass.

    Args:
        logits_TV: [T, V] fp32, bf16 or fp16, rows of any stride. Its gradient has the same dtype;
            all arithmetic is fp32. fp64 is accepted, in torch, and stays fp64.
        target_ids_T: [T] int64 in [0, V); a negative id marks a row to leave out.
        spec: the token loss, or a function of all tokens (see `TokenLossFn`).
        advantage_T: [T] fp32.
        weight_T: [T] fp32; it holds the whole averaging rule. Rows of weight 0 are not read, get a
            zero gradient and count in no statistic.
        old_logprob_T: [T] fp32, of the policy that the ratio is taken against; needed by every
            policy but "nll".
        ref_logprob_T: [T] fp32, of the reference policy; needed when spec.kl_coef > 0.
        sampler_logprob_T: [T] fp32, as the sampler reported them; needed by spec.tis and spec.mis.
        cu_seqlens_S1: [S + 1] int, bounds of the sequences; needed by "gspo".
        temperature: the one that sampled the tokens; > 0, a number or fp32 [T].
        softcap: logits become softcap * tanh(logits / softcap) first.
        sampling_mask: the ids that top-k / top-p left the sampler; log-probs are taken over them and their
            gradient stays on them.
        inplace: write the gradient over the logits, which hold garbage afterwards. Ignored under
            torch.compile, which plans memory itself.
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value. Values of tensors are
            checked on the CPU and with FLOWKERNELS_DEBUG=1; elsewhere a target above V and NaN
            logits give a NaN loss.
        RuntimeError: a second backward pass through a loss whose gradient was formed in the forward
            pass: it is handed over, not kept.

    Source: PPO (arXiv 1707.06347) eq. 7, GRPO (arXiv 2402.03300) eq. 3, DAPO (arXiv 2503.14476) eq.
    8, Flow-GRPO (arXiv 2510.05592) eq. 5; the others at `LossSpec.loss_type`. T = 0 gives a zero loss.
    """
    rows = check_rows(logits_TV, target_ids_T, temperature, softcap, sampling_mask)
    impl = resolve_impl(impl, logits_TV.device, logits_TV.dtype)
    tokens = check_token_inputs(
        spec,
        rows,
        advantage_T,
        weight_T,
        old_logprob_T,
        ref_logprob_T,
        sampler_logprob_T,
        cu_seqlens_S1,
    )
    if isinstance(spec, LossSpec):
        advantage_T, weight_T = correct_for_sampler(
            spec,
            tokens.advantage_T,
            tokens.weight_T,
            tokens.old_logprob_T,
            tokens.sampler_logprob_T,
        )
        tokens = replace(tokens, advantage_T=advantage_T, weight_T=weight_T)
    inplace = inplace and not torch.compiler.is_compiling()
    if isinstance(spec, LossSpec) and spec.loss_type != "gspo":
        loss, column_7T, stats = _fused(rows, spec, tokens, impl, inplace)
    else:
        loss, column_7T, stats = _two_passes(rows, spec, tokens, impl, inplace)
    return PolicyLoss(
        loss, column_7T[1].detach(), column_7T[2].detach(), statistics.by_name(stats.detach())
    )


def _fused(
    rows: Rows, spec: LossSpec, tokens: Tokens, impl: str, inplace: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, columns, statistics) by one kernel."""
    kept_ids, kept_offsets = (
        (None, None)
        if rows.sampling_mask is None
        else (rows.sampling_mask.token_ids_K, rows.sampling_mask.offsets_T1)
    )
    needs_gradient = rows.logits_TV.requires_grad and torch.is_grad_enabled()
    of_tokens = (
        rows.target_ids_T,
        tokens.advantage_T,
        tokens.weight_T,
        tokens.old_logprob_T,
        tokens.ref_logprob_T,
    )
    of_rows = (rows.temperature_T, rows.softcap, kept_ids, kept_offsets)
    if inplace and needs_gradient:
        with torch.no_grad():
            loss, column_7T, stats = policy_loss_inplace_op(
                rows.logits_TV, *of_tokens, *of_rows, spec.encoded, impl
            )
        return _Attach.apply(rows.logits_TV, loss), column_7T, stats
    loss, _, column_7T, stats = policy_loss_op(
        rows.logits_TV, *of_tokens, *of_rows, spec.encoded, needs_gradient, impl
    )
    return loss, column_7T, stats


def _two_passes(
    rows: Rows, spec: LossSpec | TokenLossFn, tokens: Tokens, impl: str, inplace: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, columns, statistics): scores of all tokens, their loss in torch, then the gradient by
    a second read of the logits.
    """
    rows = replace(rows, target_ids_T=torch.where(tokens.weight_T != 0, rows.target_ids_T, -1))
    needs_gradient = rows.logits_TV.requires_grad and torch.is_grad_enabled()
    with torch.set_grad_enabled(needs_gradient and not inplace):
        score_3T, state_4T = scores(rows, impl)
    loss, column_7T, stats, slopes = evaluate(spec, tokens, score_3T, rows.target_ids_T)
    if not needs_gradient:
        return loss, column_7T, stats
    if inplace:
        with torch.no_grad():
            write_gradient(rows, score_3T, state_4T, *slopes, impl, rows.logits_TV)
        return _Attach.apply(rows.logits_TV, loss), column_7T, stats
    return add_slopes(loss, score_3T, slopes), column_7T, stats


def evaluate(
    spec: LossSpec | TokenLossFn, tokens: Tokens, score_3T: Tensor, target_ids_T: Tensor
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor | None]]:
    """(loss, columns, statistics, weighted slopes) of tokens that have been scored."""
    weight_T = torch.where(target_ids_T >= 0, tokens.weight_T, 0.0)
    logprob_T, entropy_T, _ = score_3T.detach().unbind()
    tokens = replace(tokens, logprob_T=logprob_T, entropy_T=entropy_T, weight_T=weight_T)
    token = token_loss(spec, tokens) if isinstance(spec, LossSpec) else spec(tokens)
    column_7T = columns(token, tokens)
    loss, stats = statistics.reduce_torch(
        column_7T, weight_T, target_ids_T
    )  # outside an operator: torch.compile traces it
    return loss, column_7T, stats, weighted_slopes(token, weight_T)


def add_slopes(loss: Tensor, score_3T: Tensor, slopes: tuple[Tensor, Tensor | None]) -> Tensor:
    """Adds a zero that has the gradient: x - x.detach() is 0 with slope 1."""
    dlogprob_T, dentropy_T = slopes
    slope_2T = torch.stack(
        [dlogprob_T, torch.zeros_like(dlogprob_T) if dentropy_T is None else dentropy_T]
    )
    moved_2T = torch.where(slope_2T != 0, score_3T[:2] - score_3T[:2].detach(), 0.0)
    return loss + (slope_2T * moved_2T).sum()


class _Attach(torch.autograd.Function):
    """Gives `loss` the gradient that was written over the logits."""

    @staticmethod
    def forward(ctx: Any, dlogits_TV: Tensor, loss: Tensor) -> Tensor:
        ctx.dlogits_TV = dlogits_TV.detach()
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.dlogits_TV is None:
            raise RuntimeError(
                "the gradient of an in-place policy_loss was taken twice; it is handed over at the "
                "first backward pass"
            )
        dlogits_TV, ctx.dlogits_TV = ctx.dlogits_TV, None
        scale_op(dlogits_TV, dloss)
        return dlogits_TV, None
