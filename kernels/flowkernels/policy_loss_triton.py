"""The kernels of `policy_loss.py` in Triton: statistics, token loss and gradient of a row by one
program, while the row is still in L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowkernels.implementations import warps
from flowkernels.loss_spec import KLS, LossSpec
from flowkernels.row_gradients_triton import backward_row, write_zeros
from flowkernels.rows_triton import (
    LOG2E,
    Mask,
    Row,
    RowSlopes,
    clamp,
    one_pass,
    row_arguments,
    score_row,
    store_all,
    two_passes,
)
from flowkernels.statistics import NAMES, Column
from flowkernels.targets import UNSPECIALISED, Targets
from flowkernels.token_loss import KL_BOUND, TokenInputs

STATISTICS = {"BLOCK": 512, "num_warps": warps(256)}
MERGE = {"BLOCK": 64, "num_warps": warps(128)}
"""The merge takes the statistics of at most BLOCK programs."""
SCALE = {"BLOCK": 4096, "num_warps": warps(256)}
_LOSS_TYPES = {"clip": 0, "cispo": 1, "nll": 2}

CISPO, NLL = tl.constexpr(_LOSS_TYPES["cispo"]), tl.constexpr(_LOSS_TYPES["nll"])
K1, K2, K3, LOW_VAR_KL = (tl.constexpr(i) for i in range(4))  # as in `loss_spec.KLS`
_KL_BOUND = tl.constexpr(KL_BOUND)
LOSS = tl.constexpr(Column.LOSS)
ENTROPY = tl.constexpr(Column.ENTROPY)
LOG_RATIO = tl.constexpr(Column.LOG_RATIO)
KL_ESTIMATE = tl.constexpr(Column.KL)
IS_CLIPPED = tl.constexpr(Column.IS_CLIPPED)
NUM_COLUMNS = tl.constexpr(Column.NUM)
NUM_NAMES = tl.constexpr(len(NAMES))
RATIO_MAX = tl.constexpr(NAMES.index("ratio_max"))
RATIO_MIN = tl.constexpr(NAMES.index("ratio_min"))


@triton.jit
def _expm1(x) -> tl.tensor:
    small = x * (1.0 + x / 2 * (1.0 + x / 3 * (1.0 + x / 4 * (1.0 + x / 5))))
    return tl.where(tl.abs(x) < 0.1, small, tl.exp(x) - 1.0)


@triton.jit
def _kl(raw, limit, KL: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return (estimate, derivative by logp) with raw = other - logp, as in `token_loss._kl`."""
    u = clamp(raw, -limit, limit)
    if KL == K1:
        kl, slope = -u, u * 0.0 + 1.0
    elif KL == K2:
        kl, slope = u * u / 2, -u
    else:
        kl, slope = _expm1(u) - u, -_expm1(u)
    if KL == LOW_VAR_KL:
        slope = tl.where(kl > _KL_BOUND, 0.0, slope)
        kl = tl.where(kl > _KL_BOUND, _KL_BOUND, kl)  # NaN stays
    return kl, tl.where(tl.abs(raw) > limit, 0.0, slope)


@triton.jit
def _policy_term(
    logp, log_ratio, advantage, clip_low, clip_high, dual_clip, limit, LOSS_TYPE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (loss, derivative by logp, clipped), as in `token_loss`."""
    ratio = tl.exp(clamp(log_ratio, -limit, limit))
    if LOSS_TYPE == NLL:
        slope = -advantage
        loss = slope * logp
        is_clipped = advantage != advantage
    elif LOSS_TYPE == CISPO:
        slope = -tl.minimum(ratio, 1.0 + clip_high, propagate_nan=tl.PropagateNan.ALL) * advantage
        loss = slope * logp
        is_clipped = ratio > 1.0 + clip_high
    else:
        unclipped = ratio * advantage
        clipped = clamp(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantage
        is_clipped = unclipped > clipped
        loss = tl.where(is_clipped, -clipped, -unclipped)
        if dual_clip is not None:
            is_dual = (advantage < 0) & (loss > -dual_clip * advantage)
            loss = tl.where(is_dual, -dual_clip * advantage, loss)
            is_clipped = is_clipped | is_dual
        slope = tl.where(is_clipped | (tl.abs(log_ratio) > limit), 0.0, -unclipped)
    return loss, slope, is_clipped


@triton.jit(do_not_specialize=UNSPECIALISED)
def loss_kernel(
    logits_ptr, out_ptr, targets_ptr, temperature_ptr, mask_ids_ptr, mask_offsets_ptr,
    mask_copy_ptr, advantage_ptr, weight_ptr, old_ptr, ref_ptr, column_ptr, num_rows, num_vocab,
    row_stride, out_stride, temperature_stride, softcap, clip_low, clip_high, dual_clip, kl_coef,
    entropy_coef, limit, LOSS_TYPE: tl.constexpr, KL: tl.constexpr, ALIGNMENT: tl.constexpr,
    LANES: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Write the columns [7, T], and the gradient into `out` unless that is None; it may be the
    logits. Other arguments that may be None: mask, old, ref, softcap, dual_clip, entropy_coef. Rows
    of weight 0 are not read.
    """
    mask = Mask(mask_ids_ptr, mask_offsets_ptr, mask_copy_ptr)
    index = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + index * row_stride
    row_out_ptr = row_ptr
    if out_ptr is not None:
        row_out_ptr = out_ptr + index * out_stride
    target = tl.load(targets_ptr + index)
    weight = tl.load(weight_ptr + index)
    if (weight != 0.0) & (target >= 0):
        temperature = tl.load(temperature_ptr + index * temperature_stride)
        advantage = tl.load(advantage_ptr + index)
        row = Row(row_ptr, num_vocab, 1.0 / temperature * LOG2E, softcap)
        logp, scored, last_block = score_row(
            row, index, target, mask=mask, ALIGNMENT=ALIGNMENT,
            # The gradient reads the row again, from L2.
            POLICY="evict_first" if out_ptr is None else "evict_last", LANES=LANES, WIDTH=WIDTH,
        )  # fmt: skip
        entropy = scored.full.entropy
        old = logp
        if old_ptr is not None:
            old = tl.load(old_ptr + index)
        log_ratio = logp - old
        loss, dlogp, is_clipped = _policy_term(
            logp, log_ratio, advantage, clip_low=clip_low, clip_high=clip_high,
            dual_clip=dual_clip, limit=limit, LOSS_TYPE=LOSS_TYPE,
        )  # fmt: skip
        if ref_ptr is not None:
            kl, dkl = _kl(tl.load(ref_ptr + index) - logp, limit, KL)
            if kl_coef != 0.0:  # 0 times an infinite estimate must stay 0
                loss += kl_coef * kl
                dlogp += kl_coef * dkl
        else:
            kl, dkl = _kl(old - logp, limit, K3)
        a = -weight * dlogp / temperature
        slopes = RowSlopes(a, None, None)
        has_gradient = a != 0.0
        if entropy_coef is not None:
            loss -= entropy_coef * entropy
            c = weight * entropy_coef / temperature
            slopes = RowSlopes(a, c, None)
            has_gradient = has_gradient | (c != 0.0)
        columns = (  # in the order of `Column`
            weight * loss, logp, entropy, log_ratio, kl, is_clipped.to(tl.float32),
            has_gradient.to(tl.float32),
        )  # fmt: skip
        store_all(column_ptr + index, num_rows, columns, NUM_COLUMNS)
        if out_ptr is not None:
            backward_row(
                row, row_out_ptr, target, scored=scored, mask=mask, slopes=slopes,
                last_block=last_block, ALIGNMENT=ALIGNMENT, LANES=LANES, WIDTH=WIDTH,
            )  # fmt: skip
    else:
        for i in tl.static_range(NUM_COLUMNS):
            tl.store(column_ptr + i * num_rows + index, 0.0)
        if out_ptr is not None:
            write_zeros(row_out_ptr, num_vocab, ALIGNMENT, LANES=LANES, WIDTH=WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def statistics_kernel(
    column_ptr, weight_ptr, targets_ptr, loss_ptr, out_ptr, num_rows, BLOCK: tl.constexpr
) -> None:
    """Sum over the rows that count, in the order of `statistics.NAMES`: each program its own, so
    that no order is left to chance.
    """
    program = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], tl.float32)
    loss, num, weights, entropies, kls = zeros, zeros, zeros, zeros, zeros
    ratios, low, high, mismatch = zeros, zeros, zeros, zeros
    ratio_max = tl.full([BLOCK], -float("inf"), tl.float32)
    ratio_min = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(program * BLOCK, num_rows, tl.num_programs(0) * BLOCK):
        rows = start + offsets
        is_in = rows < num_rows
        weight = tl.load(weight_ptr + rows, mask=is_in, other=0.0)
        counts = is_in & (weight != 0.0) & (tl.load(targets_ptr + rows, mask=is_in, other=-1) >= 0)
        log_ratio = tl.load(column_ptr + LOG_RATIO * num_rows + rows, mask=counts, other=0.0)
        ratio = tl.exp(log_ratio)
        is_clipped = tl.load(column_ptr + IS_CLIPPED * num_rows + rows, mask=counts, other=0.0)
        loss += tl.load(column_ptr + LOSS * num_rows + rows, mask=counts, other=0.0)
        entropies += tl.load(column_ptr + ENTROPY * num_rows + rows, mask=counts, other=0.0)
        kls += tl.load(column_ptr + KL_ESTIMATE * num_rows + rows, mask=counts, other=0.0)
        num += counts.to(tl.float32)
        weights += tl.where(counts, weight, 0.0)
        ratios += tl.where(counts, ratio, 0.0)
        ratio_max = tl.maximum(
            ratio_max, tl.where(counts, ratio, -float("inf")), propagate_nan=tl.PropagateNan.ALL
        )
        ratio_min = tl.minimum(
            ratio_min, tl.where(counts, ratio, float("inf")), propagate_nan=tl.PropagateNan.ALL
        )
        low += tl.where(log_ratio < 0, is_clipped, 0.0)
        high += tl.where(log_ratio < 0, 0.0, is_clipped)
        mismatch += tl.abs(log_ratio)
    tl.store(loss_ptr + program, tl.sum(loss, axis=0))
    out_ptr += program * NUM_NAMES
    ratio_sum = tl.sum(ratios, axis=0)
    is_nan = ratio_sum != ratio_sum  # max and min over a block pass over NaN
    values = (
        tl.sum(num, axis=0), tl.sum(weights, axis=0), tl.sum(entropies, axis=0),
        tl.sum(kls, axis=0), ratio_sum, tl.where(is_nan, ratio_sum, tl.max(ratio_max, axis=0)),
        tl.where(is_nan, ratio_sum, tl.min(ratio_min, axis=0)), tl.sum(low, axis=0),
        tl.sum(high, axis=0), tl.sum(mismatch, axis=0),
    )  # fmt: skip
    store_all(out_ptr, 1, values, NUM_NAMES)


@triton.jit
def merge_kernel(
    losses_ptr, parts_ptr, loss_ptr, out_ptr, num_parts, NUM: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Write the loss and the NUM statistics, from those of up to BLOCK programs."""
    offsets = tl.arange(0, BLOCK)
    losses = tl.load(losses_ptr + offsets, mask=offsets < num_parts, other=0.0)
    tl.store(loss_ptr, tl.sum(losses, axis=0))
    is_in = (offsets < num_parts)[:, None] & (offsets < NUM)[None, :]
    entries = offsets[:, None] * NUM + offsets[None, :]
    parts = tl.load(parts_ptr + entries, mask=is_in, other=0.0)
    total = tl.sum(parts, axis=0)
    largest = tl.max(tl.where(is_in, parts, -float("inf")), axis=0)
    smallest = tl.min(tl.where(is_in, parts, float("inf")), axis=0)
    total = tl.where(offsets == RATIO_MAX, largest, total)
    total = tl.where(offsets == RATIO_MIN, smallest, total)
    is_nan = tl.max((parts != parts).to(tl.int32), axis=0) > 0  # max and min pass over it
    total = tl.where(is_nan, float("nan"), total)
    tl.store(out_ptr + offsets, total, mask=offsets < NUM)


@triton.jit
def scale_kernel(gradient_ptr, factor_ptr, num_elements, BLOCK: tl.constexpr) -> None:
    """Scale the gradient in place, without touching it when the factor is 1, which is what
    `loss.backward()` sends.
    """
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        for start in range(
            tl.program_id(0).to(tl.int64) * BLOCK,
            num_elements,
            tl.num_programs(0).to(tl.int64) * BLOCK,
        ):
            offsets = start + tl.arange(0, BLOCK)
            is_in = offsets < num_elements
            g = tl.load(gradient_ptr + offsets, mask=is_in, other=0.0).to(tl.float32)
            tl.store(
                gradient_ptr + offsets, (g * factor).to(gradient_ptr.dtype.element_ty), mask=is_in
            )


def run_loss(
    logits_TV: Tensor, targets: Targets, spec: LossSpec, inputs: TokenInputs, out_TV: Tensor | None
) -> Tensor:
    """Launcher: `column_7T`, and the gradient into `out_TV` (which may be the logits) unless that
    is None.
    """
    column_7T = torch.empty(Column.NUM, len(targets), device=logits_TV.device)
    if len(targets):
        launch = (
            one_pass(targets.softcap) if out_TV is None else two_passes(logits_TV, targets.softcap)
        )
        loss_kernel[(len(targets),)](
            **row_arguments(launch, logits_TV, targets, out_TV),
            out_ptr=out_TV,
            out_stride=0 if out_TV is None else out_TV.stride(0),
            advantage_ptr=inputs.advantage_T,
            weight_ptr=inputs.weight_T,
            old_ptr=inputs.old_logprob_T,
            ref_ptr=inputs.ref_logprob_T,
            column_ptr=column_7T,
            clip_low=spec.clip_low,
            clip_high=spec.clip_high,
            dual_clip=spec.dual_clip,
            kl_coef=spec.kl_coef,
            entropy_coef=spec.entropy_coef or None,
            limit=spec.log_ratio_limit,
            LOSS_TYPE=_LOSS_TYPES[spec.loss_type],
            KL=KLS.index(spec.kl),
        )
    return column_7T


def reduce(column_7T: Tensor, weight_T: Tensor, target_ids_T: Tensor) -> tuple[Tensor, Tensor]:
    """Launcher: (loss, statistics), see `statistics.reduce`."""
    num_parts = max(1, min(MERGE["BLOCK"], triton.cdiv(len(weight_T), STATISTICS["BLOCK"])))
    losses_P = torch.empty(num_parts, device=column_7T.device)
    parts_PS = torch.empty(num_parts, len(NAMES), device=column_7T.device)
    statistics_kernel[(num_parts,)](
        column_ptr=column_7T,
        weight_ptr=weight_T,
        targets_ptr=target_ids_T,
        loss_ptr=losses_P,
        out_ptr=parts_PS,
        num_rows=len(weight_T),
        **STATISTICS,
    )
    if num_parts == 1:
        return losses_P.view(()), parts_PS.view(-1)
    loss, out = losses_P.new_empty(()), parts_PS.new_empty(len(NAMES))
    merge_kernel[(1,)](losses_P, parts_PS, loss, out, num_parts, NUM=len(NAMES), **MERGE)
    return loss, out


def scale_(gradient: Tensor, factor: Tensor) -> None:
    """Launcher: gradient *= factor, in place."""
    assert gradient.is_contiguous()
    if gradient.numel():
        scale_kernel[(1024,)](gradient, factor.float(), gradient.numel(), **SCALE)
