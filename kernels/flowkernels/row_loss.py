"""The fused loss on rows of logits, as `torch.library` operators over the kernel and its reference."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flowkernels import statistics
from flowkernels.rows import Rows, backward_torch, forward_torch, make_rows
from flowkernels.token_loss import LossSpec, TokenLoss, Tokens, token_loss

NUM_COLUMNS = 7
"""Per-row results: weighted loss, logp, entropy, log-ratio, KL, clipped, active (has a gradient).
"""


def columns(token: TokenLoss, tokens: Tokens) -> Tensor:
    """[7, T], see `NUM_COLUMNS`."""
    counts_T = tokens.weight_T != 0
    weighted_T = torch.where(counts_T, tokens.weight_T * token.loss_T, 0.0)
    active_T = token.dlogprob_T != 0
    if token.dentropy_T is not None:
        active_T = active_T | (token.dentropy_T != 0)
    flags = (token.is_clipped_T.float(), (counts_T & active_T).float())
    return torch.stack(
        [weighted_T, tokens.logprob_T, tokens.entropy_T, token.log_ratio_T, token.kl_T, *flags]
    )


def weighted_slopes(token: TokenLoss, weight_T: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weight times dL/dlogp and dL/dH; 0 where the weight is, whatever the slope."""
    counts_T = weight_T != 0
    dlogprob_T = torch.where(counts_T, weight_T * token.dlogprob_T, 0.0)
    return dlogprob_T, None if token.dentropy_T is None else torch.where(
        counts_T, weight_T * token.dentropy_T, 0.0
    )


@lru_cache(maxsize=64)
def decode(text: str) -> LossSpec:
    """From `LossSpec.encoded`."""
    fields = json.loads(text)
    return LossSpec(**{**fields, "mis": None if fields["mis"] is None else tuple(fields["mis"])})


def run_loss(
    rows: Rows,
    spec: LossSpec,
    advantage_T: Tensor,
    weight_T: Tensor,
    old_T: Tensor | None,
    ref_T: Tensor | None,
    out_TV: Tensor | None,
    impl: str,
) -> Tensor:
    """Columns [7, T]; the gradient by the logits goes into `out_TV`, which may be the logits."""
    if impl == "torch":
        return _loss_torch(rows, spec, advantage_T, weight_T, old_T, ref_T, out_TV)
    from flowkernels import loss_triton

    return loss_triton.loss(rows, spec, advantage_T, weight_T, old_T, ref_T, out_TV)


def _loss_torch(
    rows: Rows,
    spec: LossSpec,
    advantage_T: Tensor,
    weight_T: Tensor,
    old_T: Tensor | None,
    ref_T: Tensor | None,
    out_TV: Tensor | None,
) -> Tensor:
    """The reference of the fused kernel."""
    column_7T = torch.zeros(NUM_COLUMNS, len(weight_T), device=weight_T.device)
    counts_T = (weight_T != 0) & (rows.target_ids_T >= 0)
    for chunk in rows.chunks():
        forward = forward_torch(rows[chunk])
        old_C, ref_C = (None if x is None else x[chunk] for x in (old_T, ref_T))
        tokens = Tokens(
            forward.logprob_C, forward.entropy_C, advantage_T[chunk], weight_T[chunk], old_C, ref_C
        )
        token, counts_C = token_loss(spec, tokens), counts_T[chunk]
        column_7T[:, chunk] = torch.where(counts_C, columns(token, tokens), 0.0)
        if out_TV is None:
            continue
        slope_C = tokens.weight_T / rows.temperature_T[chunk]
        a_C = torch.where(counts_C, -slope_C * token.dlogprob_T, 0.0)
        c_C = (
            None
            if token.dentropy_T is None
            else torch.where(counts_C, -slope_C * token.dentropy_T, 0.0)
        )
        backward_torch(forward, a_C, c_C, out_TV[chunk])
    return column_7T


@torch.library.custom_op("flowkernels::policy_loss", mutates_args=())
def policy_loss_op(
    logits: Tensor,
    targets: Tensor,
    advantage: Tensor,
    weight: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
    temperature: Tensor,
    softcap: float,
    kept_ids: Tensor | None,
    kept_offsets: Tensor | None,
    spec: str,
    needs_gradient: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, gradient or an empty tensor, columns, statistics)."""
    rows = make_rows(logits, targets, temperature, softcap, kept_ids, kept_offsets)
    dlogits_TV = logits.new_empty(logits.shape if needs_gradient else (0,))
    column_7T = run_loss(
        rows,
        decode(spec),
        advantage,
        weight,
        old,
        ref,
        dlogits_TV if needs_gradient else None,
        impl,
    )
    loss, stats = statistics.reduce(column_7T, weight, targets, impl)
    return loss, dlogits_TV, column_7T, stats


@policy_loss_op.register_fake
def _(logits: Tensor, targets: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    needs_gradient = arguments[-2]
    return (
        logits.new_empty((), dtype=torch.float32),
        logits.new_empty(logits.shape if needs_gradient else (0,)),
        logits.new_empty((NUM_COLUMNS, targets.shape[0]), dtype=torch.float32),
        logits.new_empty((statistics.NUM_STATISTICS,), dtype=torch.float32),
    )


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(
        False
    )  # or autograd fills a zero gradient of [T, V] for the gradient itself
    ctx.save_for_backward(output[1])


def _policy_loss_backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    (dlogits_TV,) = ctx.saved_tensors
    return (scaled(dlogits_TV, dloss), *[None] * 12)


def scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient * factor: in place, but for a tracer, to which the gradient is an output that must
    stay.
    """
    if type(gradient) is not Tensor:
        return (gradient.to(torch.promote_types(gradient.dtype, factor.dtype)) * factor).to(
            gradient.dtype
        )
    scale_op(gradient, factor)
    return gradient


policy_loss_op.register_autograd(_policy_loss_backward, setup_context=_save_gradient)


@torch.library.custom_op("flowkernels::policy_loss_", mutates_args=("logits",))
def policy_loss_inplace_op(
    logits: Tensor,
    targets: Tensor,
    advantage: Tensor,
    weight: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
    temperature: Tensor,
    softcap: float,
    kept_ids: Tensor | None,
    kept_offsets: Tensor | None,
    spec: str,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, columns, statistics); the gradient is written over the logits."""
    rows = make_rows(logits, targets, temperature, softcap, kept_ids, kept_offsets)
    column_7T = run_loss(rows, decode(spec), advantage, weight, old, ref, logits, impl)
    loss, stats = statistics.reduce(column_7T, weight, targets, impl)
    return loss, column_7T, stats


@policy_loss_inplace_op.register_fake
def _(logits: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (
        logits.new_empty((), dtype=torch.float32),
        logits.new_empty((NUM_COLUMNS, targets.shape[0]), dtype=torch.float32),
        logits.new_empty((statistics.NUM_STATISTICS,), dtype=torch.float32),
    )


@torch.library.custom_op("flowkernels::scale_", mutates_args=("gradient",))
def scale_op(gradient: Tensor, factor: Tensor) -> None:
    """gradient *= factor. A factor of 1, as `loss.backward()` sends it, costs nothing."""
    if gradient.is_cuda and gradient.is_contiguous():
        from flowkernels import loss_triton

        loss_triton.scale_(gradient, factor)
    elif gradient.is_cuda or float(factor) != 1.0:
        for part in gradient.split(64):  # in fp32, and without a copy of all of it
            part.copy_(part.to(torch.promote_types(part.dtype, factor.dtype)) * factor)


@scale_op.register_fake
def _(gradient: Tensor, factor: Tensor) -> None:
    return None
