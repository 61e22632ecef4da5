"""Policy losses from logits.

The maths is in `logprobs.py` (rows of logits) and `token_loss.py` (tokens). A `LossSpec` without a
sequence term, a `kl_ratio` or a z-loss runs as one kernel that reads a row, takes its loss and
writes its gradient: 4 B per element of bf16 when the second read comes from cache. Other specs and
custom losses need the scores of all tokens before any gradient, so they read the logits again: 6 B.
T: target tokens, V: vocabulary, S: sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowkernels import statistics
from flowkernels.arguments import check_logits, check_targets, check_token_inputs, dtype_of_results
from flowkernels.implementations import resolve_impl, with_launcher
from flowkernels.logprobs import (
    backward_torch,
    empty_rows,
    forward_torch,
    row_chunks,
    scores,
    write_gradient,
)
from flowkernels.loss_spec import LossSpec
from flowkernels.plain_tensors import flat_rows
from flowkernels.statistics import Column, to_columns
from flowkernels.targets import TARGETS, SamplingMask, Slopes, Targets, unflatten
from flowkernels.token_loss import INPUTS, TokenInputs, TokenLossFn, token_loss, unflatten_inputs

TAKEN_TWICE = (
    "the gradient of a policy loss was taken twice, but only the first backward pass gets it; "
    "call the loss again for another one"
)
TOO_LATE = (
    "the gradient of a policy loss in float16 was rounded before scaling by {:g}: scale weight_T "
    "instead of the loss, or use bfloat16, which needs no loss scale"
)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The result of `policy_loss`, fp32 (fp64 for fp64 logits). Only `loss` carries a gradient."""

    loss: Tensor
    """0-d: sum_T weight * token loss."""
    logprob_T: Tensor
    """Log-probs in the shape of the targets; 0 in ignored rows (weight 0 or a negative target),
    which are not read."""
    entropy_T: Tensor
    stats: dict[str, Tensor]
    """Statistics over the tokens with weight, as 0-d tensors on the device: `num_tokens_sum`,
    `weight_sum`, `entropy_sum`, `kl_sum`, `ratio_sum`, `ratio_max`, `ratio_min` (all before
    clipping), `clipped_low_sum`, `clipped_high_sum` (by the side of 1 the ratio is on; the dual
    clip counts as high) and `mismatch_sum` (|logp - old|). Over micro-batches and ranks, add
    `*_sum` and reduce `*_max` and `*_min` by maximum and minimum; without any token these two are
    -inf and inf."""

    @classmethod
    def of(cls, loss: Tensor, column_7T: Tensor, stats: Tensor) -> PolicyLoss:
        column_7T = column_7T.detach()
        return cls(
            loss=loss,
            logprob_T=column_7T[Column.LOGPROB],
            entropy_T=column_7T[Column.ENTROPY],
            stats=statistics.by_name(stats.detach()),
        )

    def view(self, shape: Sequence[int]) -> PolicyLoss:
        """Return the result with log-probs and entropies in the shape of the targets."""
        logprob_T, entropy_T = self.logprob_T.view(shape), self.entropy_T.view(shape)
        return replace(self, logprob_T=logprob_T, entropy_T=entropy_T)


@with_launcher("flowkernels.policy_loss_triton")
def run_loss(
    logits_TV: Tensor, targets: Targets, spec: LossSpec, inputs: TokenInputs, out_TV: Tensor | None
) -> Tensor:
    """Return `column_7T`; write the logits' gradient to `out_TV`, if any; both may coincide."""
    weight_T = inputs.weight_T
    column_7T = weight_T.new_zeros(Column.NUM, len(weight_T))
    counts_T = (weight_T != 0) & (targets.ids_T >= 0)
    for chunk in row_chunks(logits_TV):
        logits_CV = logits_TV[chunk]
        forward = forward_torch(logits_CV, targets[chunk])
        tokens = inputs[chunk].scored(forward.logprob_C, forward.entropy_C, forward.lse_C)
        token, counts_C = token_loss(spec, tokens), counts_T[chunk]
        column_7T[:, chunk] = torch.where(counts_C, to_columns(token, tokens), 0.0)
        if out_TV is None:
            continue
        slope_C = tokens.weight_T / targets.temperature_T[chunk]
        a_C = torch.where(counts_C, -slope_C * token.dlogprob_T, 0.0)
        c_C = None
        if token.dentropy_T is not None:
            c_C = torch.where(counts_C, -slope_C * token.dentropy_T, 0.0)
        backward_torch(forward, logits_CV, a_C, c_C, out_TV[chunk])
    return column_7T


def scored_loss(
    spec: LossSpec | TokenLossFn, inputs: TokenInputs, score_3T: Tensor, target_ids_T: Tensor
) -> tuple[Tensor, Tensor, Tensor, Slopes]:
    """Return (loss, columns, statistics, slopes) of tokens that have been scored; in torch, so that
    torch.compile can trace it.
    """
    weight_T = torch.where(target_ids_T >= 0, inputs.weight_T, 0.0)
    tokens = replace(inputs, weight_T=weight_T).scored(*score_3T.detach().unbind())
    token = token_loss(spec, tokens) if isinstance(spec, LossSpec) else spec(tokens)
    column_7T = to_columns(token, tokens)
    loss, stats = statistics.reduce("torch", column_7T, weight_T, target_ids_T)
    return loss, column_7T, stats, token.weighted_slopes(weight_T)


def add_slopes(loss: Tensor, score_3T: Tensor, slopes: Slopes) -> Tensor:
    """Add a zero to the loss that carries its gradient: x - x.detach() is 0 with slope 1."""
    slopes_T = (slopes.logprob_T, slopes.entropy_T, slopes.lse_T)  # in the order of `Score`
    slope_3T = torch.stack([torch.zeros_like(slopes_T[0]) if x is None else x for x in slopes_T])
    # Where the slope is 0 the score may be infinite, and inf - inf is NaN.
    zero_3T = torch.where(slope_3T != 0, score_3T - score_3T.detach(), 0.0)
    return loss + (slope_3T * zero_3T).sum()


@torch.library.custom_op(
    "flowkernels::policy_loss",
    mutates_args=(),
    schema=f"(Tensor logits, {TARGETS}, {INPUTS}, bool needs_gradient, str impl)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _policy_loss_op(logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return (loss, gradient or an empty tensor, columns, statistics)."""
    *flat, needs_gradient, impl = arguments
    targets, (spec, inputs) = unflatten(*flat[:5]), unflatten_inputs(*flat[5:])
    dlogits_TV = empty_rows(logits) if needs_gradient else logits.new_empty((0,))
    out_TV = dlogits_TV if needs_gradient else None
    column_7T = run_loss(impl, logits, targets, spec, inputs, out_TV)
    loss, stats = statistics.reduce(impl, column_7T, inputs.weight_T, targets.ids_T)
    return loss, dlogits_TV, column_7T, stats


@_policy_loss_op.register_fake
def _(logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    needs_gradient = arguments[-2]
    loss, *results = fake_results(logits)
    return loss, empty_rows(logits) if needs_gradient else logits.new_empty((0,)), *results


def fake_results(example: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty (loss, columns, statistics) for the fake kernels of operators."""
    dtype = dtype_of_results(example.dtype)
    return (
        example.new_empty((), dtype=dtype),
        example.new_empty((Column.NUM, example.shape[0]), dtype=dtype),
        example.new_empty((len(statistics.NAMES),), dtype=dtype),
    )


def register_gradients(operator: Any, num_results: int = 2) -> None:
    """Make an operator that returns (loss, the gradients by its first arguments, so many other
    results) hand these gradients over.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        # Or autograd fills a zero gradient of [T, V] for the gradient itself.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:-num_results])

    def backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if hasattr(ctx, "is_taken"):
            raise RuntimeError(TAKEN_TWICE)
        ctx.is_taken = True
        saved = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        gradients = [_scaled(gradient, dloss) if need else None for gradient, need in saved]
        return *gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients))

    operator.register_autograd(backward, setup_context=save)


register_gradients(_policy_loss_op)


def scale_(gradient: Tensor, factor: Tensor) -> None:
    """Scale the gradient in place. A factor of 1, as `loss.backward()` sends it, costs nothing.

    Raises RuntimeError for fp16 and the factor of a loss scale, because the small gradients that
    the scale should preserve are already 0.
    """
    is_captured = gradient.is_cuda and torch.cuda.is_current_stream_capturing()
    if gradient.dtype == torch.float16 and not is_captured and float(factor) > 1:
        raise RuntimeError(TOO_LATE.format(float(factor)))
    if gradient.is_cuda and gradient.is_contiguous() and gradient.dtype != torch.float64:
        from flowkernels import policy_loss_triton

        with torch.cuda.device_of(gradient):
            policy_loss_triton.scale_(gradient, factor)
    elif gradient.is_cuda or float(factor) != 1.0:
        for rows in gradient.split(64):  # in fp32, and without a copy of all of it
            rows.copy_(rows.to(torch.promote_types(rows.dtype, factor.dtype)) * factor)
    torch.autograd.graph.increment_version(gradient)  # it may be taken once


def scale_rows_(gradient: Tensor, factor: Tensor) -> None:
    """Scale a gradient; one of `empty_rows` with what lies between its rows, in one piece."""
    if gradient.dim() == 2 and not gradient.is_contiguous() and len(gradient):
        size = (len(gradient) - 1) * gradient.stride(0) + gradient.shape[1]
        if gradient.untyped_storage().nbytes() == size * gradient.itemsize:  # nobody else's
            gradient = gradient.as_strided((size,), (1,), 0)
    scale_(gradient, factor)


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """Return gradient * factor, in place except in a tracer, where the gradient is an output."""
    if type(gradient) is not Tensor:
        fp32_gradient = gradient.to(torch.promote_types(gradient.dtype, factor.dtype))
        return (fp32_gradient * factor).to(gradient.dtype)
    scale_rows_(gradient, factor)
    return gradient


class HandOver(torch.autograd.Function):
    """Attaches to a loss the gradient by the logits, which has overwritten the logits."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits_TV: Tensor) -> Tensor:
        ctx.gradient = logits_TV.detach()
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[None, Tensor]:
        if ctx.gradient is None:
            raise RuntimeError(TAKEN_TWICE)
        gradient, ctx.gradient = ctx.gradient, None
        scale_rows_(gradient, dloss)
        return None, gradient


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
    """Return sum_T weight * token_loss(spec), with the gradient formed in the forward pass.

    Args:
        logits_TV: [T, V] fp32, bf16 or fp16, rows of any stride. All arithmetic is fp32. The
            gradient has the dtype of the logits, so a loss scale for fp16 belongs in `weight_T`,
            not in `backward`. fp64 is accepted (torch computes it) and gives fp64 results. A batch
            [B, L, V], or one of more dimensions, takes [B, L] for every [T] here and returns [B,
            L]; see `logprobs`.
        target_ids_T: [T] int64 or int32 in [0, V); rows with a negative id are ignored.
        spec: the token loss, or a function of all tokens (see `TokenLossFn`).
        advantage_T: [T] of any float dtype, or [S] with one advantage per sequence of
            `cu_seqlens_S1` (read as [T] if S = T).
        weight_T: [T] of any float dtype, bool or int; the weights define the whole averaging rule
            (see `token_weights`). Rows of weight 0 are not read, get a zero gradient and enter no
            statistic.
        old_logprob_T: [T] fp32 or fp64, log-probs under the policy in the ratio's denominator. None
            stands for the current policy: the ratio is 1, with the gradient of the log-prob.
        ref_logprob_T: [T] fp32 or fp64, log-probs under the reference policy; needed when
            spec.kl_coef > 0.
        sampler_logprob_T: [T] fp32 or fp64, log-probs that the sampler reported; spec.tis and
            spec.mis need them and `old_logprob_T`.
        cu_seqlens_S1: [S + 1] int, bounds of the sequences; needed by "gspo" and by
            correction_level="sequence". For a batch with one sequence per row: torch.arange(0, B *
            L + 1, L).
        temperature: the sampling temperature of the tokens; > 0, a number or [T] of any float
            dtype.
        softcap, sampling_mask: as for `logprobs`; ids outside the mask get no policy gradient.
        inplace: overwrite the logits with the gradient, so that peak memory is one copy of the
            logits. Ignored under torch.compile, which plans memory itself.
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value. Values of tensors are
            checked only on the CPU and with FLOWKERNELS_DEBUG=1; otherwise a target above V and NaN
            logits give a NaN loss.
        RuntimeError: a second backward pass through the same loss, because the gradient of the
            forward pass is handed over and not kept; or a backward pass through a scaled-up fp16
            loss.

    Source: PPO (arXiv 1707.06347) eq. 7, GRPO (arXiv 2402.03300) eq. 3, DAPO (arXiv 2503.14476) eq.
    8, Flow-GRPO (arXiv 2510.05592) eq. 5; further ones at `LossSpec.loss_type`. T = 0 gives a zero
    loss.
    """
    inplace = inplace and not torch.compiler.is_compiling()
    flat_TV = flat_rows("logits_TV", logits_TV, may_copy=not inplace)
    check_logits(flat_TV)
    targets = check_targets(
        logits_TV, flat_TV.shape[1], target_ids_T, temperature, softcap, sampling_mask
    )
    inputs = TokenInputs(
        advantage_T=advantage_T,
        weight_T=weight_T,
        old_logprob_T=old_logprob_T,
        ref_logprob_T=ref_logprob_T,
        sampler_logprob_T=sampler_logprob_T,
        cu_seqlens_S1=cu_seqlens_S1,
    )
    inputs = check_token_inputs(spec, inputs, targets, target_ids_T.shape)
    impl = resolve_impl(impl, flat_TV.device, flat_TV.dtype)
    return _run(flat_TV, targets, spec, inputs, inplace, impl).view(target_ids_T.shape)


def _run(
    logits_TV: Tensor,
    targets: Targets,
    spec: LossSpec | TokenLossFn,
    inputs: TokenInputs,
    inplace: bool,
    impl: str,
) -> PolicyLoss:
    needs_gradient = logits_TV.requires_grad and torch.is_grad_enabled()
    writes = inplace and needs_gradient
    if isinstance(spec, LossSpec):
        inputs = inputs.corrected(spec)
    if not isinstance(spec, LossSpec) or not spec.is_fused:
        # The scores of all tokens, their loss in torch, then the gradient from the logits again.
        targets = replace(targets, ids_T=torch.where(inputs.weight_T != 0, targets.ids_T, -1))
        with torch.set_grad_enabled(needs_gradient and not writes):
            scored = scores(logits_TV, targets, impl)
        loss, column_7T, stats, slopes = scored_loss(spec, inputs, scored[0], targets.ids_T)
        if writes:
            with torch.no_grad():
                write_gradient(impl, logits_TV, targets, scored, slopes, logits_TV)
        elif needs_gradient:
            loss = add_slopes(loss, scored[0], slopes)
    elif writes:
        with torch.no_grad():
            column_7T = run_loss(impl, logits_TV, targets, spec, inputs, logits_TV)
        loss, stats = statistics.reduce(impl, column_7T, inputs.weight_T, targets.ids_T)
    else:
        flat = (*targets.flat(), *inputs.flat(), spec.encoded)
        loss, _, column_7T, stats = _policy_loss_op(logits_TV, *flat, needs_gradient, impl)
    if writes:
        # So autograd refuses an earlier use of the logits, whose backward pass would read garbage.
        torch.autograd.graph.increment_version(logits_TV)
        loss = HandOver.apply(loss, logits_TV)
    return PolicyLoss.of(loss, column_7T, stats)
