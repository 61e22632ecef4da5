"""The kernel of `distillation.py` in Triton: one program per row reads both logits three times, of
which the first is from memory where all rows at work fit the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowkernels.implementations import warps
from flowkernels.rows_triton import LN2, LOG2E, clamp_exponent

LAUNCH = {"BLOCK": 2048, "num_warps": warps(256)}
_INF = tl.constexpr(float("inf"))


@triton.jit
def _take(x, top, total) -> tuple[tl.tensor, tl.tensor]:
    """Take scaled logits into the running maximum and sum of exp2 of each lane."""
    new_top = tl.maximum(top, x, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(new_top == -_INF, 0.0, new_top)
    total = total * tl.exp2(clamp_exponent(top - base)) + tl.exp2(clamp_exponent(x - base))
    return new_top, total


@triton.jit
def _log2_sum(top, total) -> tl.tensor:
    """Return log2 of the sum over all lanes."""
    row_top = tl.max(top, axis=0)
    nan = tl.sum(tl.where(top == top, 0.0, top), axis=0)  # a maximum over lanes passes over it
    base = tl.where(row_top == -_INF, 0.0, row_top) + nan
    return base + tl.log2(tl.sum(total * tl.exp2(clamp_exponent(top - base)), axis=0))


@triton.jit
def _weighed(p, x) -> tl.tensor:
    """Return p x; a p of 0 counts nothing, whatever x is."""
    return tl.where(p == 0.0, 0.0, p * x)


@triton.jit
def _log2_mixed(log2_p, log2_q, mix) -> tl.tensor:
    """Return log2 of mix q + (1 - mix) p."""
    top = tl.maximum(log2_p, log2_q, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(top == -_INF, 0.0, top)
    parts = mix * tl.exp2(clamp_exponent(log2_q - base))
    return base + tl.log2(parts + (1.0 - mix) * tl.exp2(clamp_exponent(log2_p - base)))


@triton.jit
def _load(ptr, columns, is_in, scale) -> tl.tensor:
    return tl.load(ptr + columns, mask=is_in, other=-_INF).to(tl.float32) * scale


@triton.jit(do_not_specialize=["row_stride", "teacher_stride", "out_stride"])
def divergence_kernel(
    logits_ptr, teacher_ptr, scales_ptr, weight_ptr, divergence_ptr, out_ptr, num_vocab, row_stride,
    teacher_stride, out_stride, mix, KIND: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the divergence of a row, and the gradient by its logits unless `out_ptr` is None."""
    index = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales_ptr + index)
    log2_scale = scale * LOG2E
    row_ptr, other_ptr = logits_ptr + index * row_stride, teacher_ptr + index * teacher_stride
    lane = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], tl.float32)
    top, total, other_top, other_total = zeros - _INF, zeros, zeros - _INF, zeros
    for start in range(0, num_vocab, BLOCK):
        columns = start + lane
        is_in = columns < num_vocab
        top, total = _take(_load(row_ptr, columns, is_in, log2_scale), top, total)
        x = _load(other_ptr, columns, is_in, log2_scale)
        other_top, other_total = _take(x, other_top, other_total)
    lse, other_lse = _log2_sum(top, total), _log2_sum(other_top, other_total)
    divergence, inner = zeros, zeros
    for start in range(0, num_vocab, BLOCK):
        columns = start + lane
        is_in = columns < num_vocab
        log2_p = _load(row_ptr, columns, is_in, log2_scale) - lse
        log2_q = _load(other_ptr, columns, is_in, log2_scale) - other_lse
        if KIND == "reverse_kl":
            divergence += _weighed(tl.exp2(log2_p), log2_p - log2_q)
        elif KIND == "forward_kl":
            divergence += _weighed(tl.exp2(log2_q), log2_q - log2_p)
        else:
            log2_m = _log2_mixed(log2_p, log2_q, mix)
            divergence += mix * _weighed(tl.exp2(log2_q), log2_q - log2_m)
            inner += (1.0 - mix) * _weighed(tl.exp2(log2_p), log2_p - log2_m)
    row_divergence = tl.sum(divergence, axis=0)
    row_inner = row_divergence
    if KIND == "jsd":
        row_inner = tl.sum(inner, axis=0)
        row_divergence += row_inner
    tl.store(divergence_ptr + index, row_divergence * LN2)
    if out_ptr is not None:
        factor = tl.load(weight_ptr + index) * scale
        row_out_ptr = out_ptr + index * out_stride
        for start in range(0, num_vocab, BLOCK):
            columns = start + lane
            is_in = columns < num_vocab
            log2_p = _load(row_ptr, columns, is_in, log2_scale) - lse
            log2_q = _load(other_ptr, columns, is_in, log2_scale) - other_lse
            p = tl.exp2(log2_p)
            if KIND == "reverse_kl":
                g = _weighed(p, (log2_p - log2_q - row_inner) * LN2)
            elif KIND == "forward_kl":
                g = p - tl.exp2(log2_q)
            else:
                slope = (1.0 - mix) * (log2_p - _log2_mixed(log2_p, log2_q, mix))
                g = _weighed(p, (slope - row_inner) * LN2)
            tl.store(row_out_ptr + columns, (factor * g).to(out_ptr.dtype.element_ty), mask=is_in)


def diverge(
    logits_CV: Tensor,
    teacher_CV: Tensor,
    scale_C: Tensor,
    weight_C: Tensor,
    divergence: str,
    mix: float,
    out_CV: Tensor | None,
) -> Tensor:
    """Launcher; `out_CV` may be the logits."""
    divergence_C = torch.empty_like(scale_C)
    if len(divergence_C):
        divergence_kernel[(len(divergence_C),)](
            logits_CV,
            teacher_CV,
            scale_C,
            weight_C,
            divergence_C,
            out_CV,
            logits_CV.shape[1],
            logits_CV.stride(0),
            teacher_CV.stride(0),
            0 if out_CV is None else out_CV.stride(0),
            mix,
            KIND=divergence,
            **LAUNCH,
        )
    return divergence_C
