"""Blocks of the row kernels in Triton: the statistics of a row of logits, and its gradient.
`logprobs.py` has the maths and the reference.

A row is read in blocks of [LANES, WIDTH] elements. WIDTH consecutive ones belong to one thread, so
every lane keeps its own running (maximum, sum, weighted sum) without talking to the others, and
takes one exp2 per element plus one per WIDTH; the lanes meet once, at the end of the row. Sums are
of exp(z - maximum) and of exp(z - maximum) (z - maximum): neither overflows, and the entropy is not
the small difference of two large numbers.

Functions share these arguments: `scale` = log2(e) / temperature; `softcap` may be None; `full` =
(top, log2_total, entropy) of the row, `masked` = (top, log2_total) over its sampling mask, with t =
(x - top) * scale and log2_total = log2 of sum 2^t; `mask` = (ids_ptr, copy_ptr, begin, end): the
ids of all masks, room for a copy of their logits, and where those of the row are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowkernels.targets import Targets

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
WIDTH = 8
"""Elements per lane: 16 bytes of bf16, the widest load there is."""
_INF = tl.constexpr(float("inf"))
_FAR = tl.constexpr(-1000.0)  # exp2 of it is 0, and 0 times it is 0, which 0 times -inf is not


@dataclass(frozen=True, slots=True)
class Config:
    """Launch parameters that keep as many bytes in flight as registers hold without a spill on any
    target (`python -m bench.aot`).
    """

    lanes: int
    num_warps: int
    rows_per_sm: int | None
    """Programs per multiprocessor, each of which takes row after row; None: one program per row, in
    whatever order the GPU likes."""
    max_registers: int
    """Per thread. Left to itself the NVIDIA assembler at times saves registers that nobody else
    needs, and spills."""

    def arguments(self) -> dict[str, int]:
        limit = {} if torch.version.hip else {"maxnreg": self.max_registers}
        return {"LANES": self.lanes, "WIDTH": WIDTH, "num_warps": self.num_warps, **limit}


def score_config(logits_TV: Tensor) -> Config:
    """The launch of kernels that read a row once."""
    lanes = 1024 if logits_TV.element_size() == 2 else 512
    return Config(lanes, num_warps=8, rows_per_sm=None, max_registers=128)


def loss_config(logits_TV: Tensor) -> Config:
    """The launch of the loss: one row at a time on a multiprocessor, so that all rows at work (132
    of 304 kB on an H200, V = 152k) fit L2 until they are read again.
    """
    if logits_TV.element_size() == 2:
        return Config(2048, num_warps=16, rows_per_sm=1, max_registers=128)
    return Config(1024, num_warps=8, rows_per_sm=1, max_registers=255)


def grid(config: Config, logits_TV: Tensor) -> tuple[int]:
    """One-dimensional, so that T is no launch limit."""
    if config.rows_per_sm is None:
        return (len(logits_TV),)
    return (min(len(logits_TV), config.rows_per_sm * _num_sms(logits_TV.device)),)


@cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def row_arguments(logits_TV: Tensor, targets: Targets) -> dict[str, Any]:
    """The arguments that all row kernels take; without a sampling mask its pointers are None."""
    mask, device = targets.mask, logits_TV.device
    return {
        "logits_ptr": logits_TV,
        "targets_ptr": targets.ids_T,
        "temperature_ptr": targets.temperature_T,
        "mask_ids_ptr": mask and mask.token_ids_K,
        "mask_offsets_ptr": mask and mask.offsets_T1,
        "mask_copy_ptr": mask and torch.empty(len(mask.token_ids_K), device=device),
        "num_rows": len(targets),
        "num_vocab": logits_TV.shape[1],
        "row_stride": logits_TV.stride(0),
        "temperature_stride": targets.temperature_T.stride(0),
        "softcap": targets.softcap,
    }


@triton.jit
def _absorb(x, top, total, moment, scale) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take the block x [LANES, WIDTH] into the running state [LANES]."""
    new_top = tl.maximum(top, tl.max(x, axis=1))
    base = tl.where(new_top == -_INF, 0.0, new_top)
    t = (x - base[:, None]) * scale
    e = tl.exp2(t)
    shift = tl.maximum((top - base) * scale, _FAR, propagate_nan=tl.PropagateNan.ALL)
    shrink = tl.exp2(shift)
    moment = shrink * (moment + total * shift) + tl.sum(
        e * tl.maximum(t, _FAR, propagate_nan=tl.PropagateNan.ALL), axis=1
    )
    total = shrink * total + tl.sum(e, axis=1)
    return new_top, total, moment


@triton.jit
def _cap(x, softcap) -> tl.tensor:
    """softcap * tanh(x / softcap), with tanh by exp, which every target has."""
    if softcap is not None:
        x = softcap * (1.0 - 2.0 / (tl.exp(2.0 * x / softcap) + 1.0))
    return x


@triton.jit
def row_statistics(
    row_ptr, num_vocab, scale, softcap, LANES: tl.constexpr, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """`full` of a row; its entropy is in nats."""
    BLOCK: tl.constexpr = LANES * WIDTH
    columns = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    top = tl.full([LANES], -_INF, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    moment = tl.zeros([LANES], tl.float32)
    num_full = num_vocab // BLOCK * BLOCK
    for start in range(0, num_full, BLOCK):
        x = tl.load(row_ptr + start + columns, eviction_policy="evict_last").to(tl.float32)
        top, total, moment = _absorb(_cap(x, softcap), top, total, moment, scale)
    if num_full < num_vocab:
        is_in = num_full + columns < num_vocab
        x = tl.load(
            row_ptr + num_full + columns, mask=is_in, other=0.0, eviction_policy="evict_last"
        ).to(tl.float32)
        x = tl.where(is_in, _cap(x, softcap), -_INF)
        top, total, moment = _absorb(x, top, total, moment, scale)
    row_top = tl.max(top, axis=0)
    base = tl.where(row_top == -_INF, 0.0, row_top)
    shift = tl.maximum((top - base) * scale, _FAR, propagate_nan=tl.PropagateNan.ALL)
    shrink = tl.exp2(shift)
    row_moment = tl.sum(shrink * (moment + total * shift), axis=0)
    row_total = tl.sum(shrink * total, axis=0)
    log2_total = tl.log2(row_total)
    return base, log2_total, (log2_total - row_moment / row_total) * LN2


@triton.jit
def target_logit(row_ptr, target, num_vocab, softcap) -> tl.tensor:
    """NaN for a target outside the vocabulary, so that a wrong id cannot go unseen."""
    x = tl.load(row_ptr + target, mask=(target >= 0) & (target < num_vocab), other=float("nan")).to(
        tl.float32
    )
    return _cap(x, softcap)


@triton.jit
def mask_statistics(
    row_ptr, mask, target, x_target, num_vocab, scale, softcap, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """`masked` over the mask's ids and the target. Their logits are copied, because the gradient
    will overwrite them.
    """
    ids_ptr, copy_ptr, begin, end = mask
    offsets = tl.arange(0, BLOCK)
    top = x_target
    has_target = 0
    for start in range(begin, end, BLOCK):
        is_in = start + offsets < end
        ids = tl.load(ids_ptr + start + offsets, mask=is_in, other=-1)
        x = tl.load(
            row_ptr + ids, mask=is_in & (ids >= 0) & (ids < num_vocab), other=float("nan")
        ).to(tl.float32)
        x = _cap(x, softcap)
        tl.store(copy_ptr + start + offsets, x, mask=is_in)
        top = tl.maximum(
            top, tl.max(tl.where(is_in, x, -_INF), axis=0), propagate_nan=tl.PropagateNan.ALL
        )
        has_target += tl.sum((ids == target).to(tl.int32), axis=0)
    # other threads may read the copy than wrote it, or write the row while it is still being read
    tl.debug_barrier()
    total = tl.where(has_target > 0, 0.0, tl.exp2((x_target - top) * scale))
    for start in range(begin, end, BLOCK):
        is_in = start + offsets < end
        x = tl.load(copy_ptr + start + offsets, mask=is_in, other=-_INF)
        total += tl.sum(tl.exp2((x - top) * scale), axis=0)
    return top, tl.log2(total)


@triton.jit
def _uncap(g, x, softcap) -> tl.tensor:
    """The gradient by the raw logit, from that by the capped logit x."""
    if softcap is not None:
        g = g * (1.0 - (x / softcap) * (x / softcap))
    return g


@triton.jit
def _gradient(x, top, log2_total, entropy, a, c, scale, HAS_ENTROPY: tl.constexpr) -> tl.tensor:
    """p (a + c (log p + H)) without the target's term."""
    log2_p = (x - top) * scale - log2_total
    p = tl.exp2(log2_p)
    factor = a
    if HAS_ENTROPY:
        factor = a + c * (
            tl.maximum(log2_p, _FAR, propagate_nan=tl.PropagateNan.ALL) * LN2 + entropy
        )
    return p * factor


@triton.jit
def _write_gradient(
    row_ptr, out_ptr, num_vocab, target, full, a, c, scale, softcap,
    HAS_ENTROPY: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Goes from the end of the row to its beginning: cache most likely holds what was read last."""
    BLOCK: tl.constexpr = LANES * WIDTH
    top, log2_total, entropy = full
    columns = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    target = target.to(tl.int32)  # a comparison of 64 bits per element would cost twice
    num_full = num_vocab // BLOCK * BLOCK
    if num_full < num_vocab:
        is_in = num_full + columns < num_vocab
        x = tl.load(
            row_ptr + num_full + columns, mask=is_in, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
        x = _cap(x, softcap)
        g = _gradient(x, top, log2_total, entropy, a, c, scale, HAS_ENTROPY)
        g = _uncap(tl.where(num_full + columns == target, g - a, g), x, softcap)
        tl.store(
            out_ptr + num_full + columns,
            g.to(out_ptr.dtype.element_ty),
            mask=is_in,
            eviction_policy="evict_first",
        )
    for back in range(BLOCK, num_full + BLOCK, BLOCK):
        start = num_full - back
        x = tl.load(row_ptr + start + columns, eviction_policy="evict_first").to(tl.float32)
        x = _cap(x, softcap)
        g = _gradient(x, top, log2_total, entropy, a, c, scale, HAS_ENTROPY)
        g = _uncap(tl.where(start + columns == target, g - a, g), x, softcap)
        tl.store(
            out_ptr + start + columns, g.to(out_ptr.dtype.element_ty), eviction_policy="evict_first"
        )


@triton.jit
def write_zeros(out_ptr, num_vocab, LANES: tl.constexpr, WIDTH: tl.constexpr) -> None:
    BLOCK: tl.constexpr = LANES * WIDTH
    columns = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    zeros = tl.zeros([LANES, WIDTH], out_ptr.dtype.element_ty)
    for start in range(0, num_vocab, BLOCK):
        tl.store(
            out_ptr + start + columns,
            zeros,
            mask=start + columns < num_vocab,
            eviction_policy="evict_first",
        )


@triton.jit
def _write_masked_gradient(
    out_ptr, num_vocab, mask, target, x_target, full, masked, a, c, scale, softcap,
    HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient of the log-probability, which the mask's ids and the target alone have,
    over that of the entropy, which the whole row has.
    """
    ids_ptr, copy_ptr, begin, end = mask
    top, log2_total, entropy = full
    masked_top, masked_log2_total = masked
    offsets = tl.arange(0, BLOCK)
    tl.debug_barrier()  # the row was written by other threads
    for start in range(begin, end, BLOCK):
        is_in = start + offsets < end
        ids = tl.load(ids_ptr + start + offsets, mask=is_in, other=0)
        x = tl.load(copy_ptr + start + offsets, mask=is_in, other=0.0)
        g = _gradient(x, masked_top, masked_log2_total, 0.0, a, 0.0, scale, False)
        if HAS_ENTROPY:
            g += _gradient(x, top, log2_total, entropy, 0.0, c, scale, True)
        g = _uncap(tl.where(ids == target, g - a, g), x, softcap)
        tl.store(
            out_ptr + ids,
            g.to(out_ptr.dtype.element_ty),
            mask=is_in & (ids >= 0) & (ids < num_vocab),
        )
    tl.debug_barrier()
    g = _gradient(x_target, masked_top, masked_log2_total, 0.0, a, 0.0, scale, False) - a
    if HAS_ENTROPY:
        g += _gradient(x_target, top, log2_total, entropy, 0.0, c, scale, True)
    g = _uncap(g, x_target, softcap)
    tl.store(
        out_ptr + target, g.to(out_ptr.dtype.element_ty), mask=(target >= 0) & (target < num_vocab)
    )


@triton.jit
def backward_row(
    row_ptr, out_ptr, num_vocab, mask, target, x_target, full, masked, a, c, scale, softcap,
    HAS_ENTROPY: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Gradient of a row: a weighs the log-probability, c the entropy. Rows that have none are
    written without being read.
    """
    ids_ptr, _, begin, end = mask
    if (a == 0.0) & (c == 0.0):
        write_zeros(out_ptr, num_vocab, LANES, WIDTH)
    else:
        a_row = a
        if ids_ptr is not None:
            a_row = tl.where(end > begin, 0.0, a)
        _write_gradient(
            row_ptr, out_ptr, num_vocab, target, full, a=a_row, c=c, scale=scale, softcap=softcap,
            HAS_ENTROPY=HAS_ENTROPY, LANES=LANES, WIDTH=WIDTH,
        )  # fmt: skip
        if ids_ptr is not None:
            if end > begin:
                _write_masked_gradient(
                    out_ptr, num_vocab, mask, target, x_target, full=full, masked=masked, a=a, c=c,
                    scale=scale, softcap=softcap, HAS_ENTROPY=HAS_ENTROPY, BLOCK=LANES,
                )  # fmt: skip
