"""Blocks of the row kernels in Triton: the statistics of a row of logits, and its gradient.
`logprobs.py` has the maths and the reference.

A row is read in blocks of [LANES, WIDTH] elements. WIDTH consecutive ones belong to one thread, so
every lane keeps its own running (maximum, sum, weighted sum) without talking to the others, and
takes one exp2 per element plus one per WIDTH; the lanes meet once, at the end of the row. Sums are
of exp(z - maximum) and of exp(z - maximum) (z - maximum): neither overflows, and the entropy is not
the small difference of two large numbers.

Functions share these arguments: `row` = (pointer, num_vocab, scale, softcap) with scale = log2(e) /
temperature and a softcap that may be None; `full` = (top, log2_total, entropy) of the row, `masked`
= (top, log2_total) over its sampling mask, with t = (x - top) * scale and log2_total = log2 of sum
2^t; `mask_ptrs` = (ids, offsets, copy): the ids of all masks, where those of each row are, and room
for a copy of their logits; `scored` = (logit of the target, full, masked, (begin, end) of the row's
ids in the mask); `slopes` = (a, c), the weights of the log-probability and of the entropy in the
gradient, c None where it has no entropy.
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
WIDTH = tl.constexpr(8)
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
        return {"LANES": self.lanes, "num_warps": self.num_warps, **limit}


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
def clamp(x, low, high) -> tl.tensor:
    """NaN stays NaN."""
    return tl.clamp(x, low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _not_far(x) -> tl.tensor:
    return tl.maximum(x, _FAR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_all(ptr, stride, values, NUM: tl.constexpr) -> None:
    """Store the NUM values, `stride` elements apart."""
    for i in tl.static_range(NUM):
        tl.store(ptr + i * stride, values[i])


@triton.jit
def _columns(LANES: tl.constexpr) -> tl.tensor:
    return tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _absorb(x, top, total, moment, scale) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take the block x [LANES, WIDTH] into the running state [LANES]."""
    new_top = tl.maximum(top, tl.max(x, axis=1))
    base = tl.where(new_top == -_INF, 0.0, new_top)
    t = (x - base[:, None]) * scale
    e = tl.exp2(t)
    shift = _not_far((top - base) * scale)
    shrink = tl.exp2(shift)
    moment = shrink * (moment + total * shift) + tl.sum(e * _not_far(t), axis=1)
    total = shrink * total + tl.sum(e, axis=1)
    return new_top, total, moment


@triton.jit
def _cap(x, softcap) -> tl.tensor:
    """softcap * tanh(x / softcap), with tanh by exp, which every target has."""
    if softcap is not None:
        x = softcap * (1.0 - 2.0 / (tl.exp(2.0 * x / softcap) + 1.0))
    return x


@triton.jit
def _read(ptr, is_in, softcap, POLICY: tl.constexpr) -> tl.tensor:
    """Logits in fp32, capped; `is_in` may be None."""
    if is_in is None:
        x = tl.load(ptr, eviction_policy=POLICY)
    else:
        x = tl.load(ptr, mask=is_in, other=0.0, eviction_policy=POLICY)
    return _cap(x.to(tl.float32), softcap)


@triton.jit
def _row_statistics(row, LANES: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """`full` of a row; its entropy is in nats."""
    row_ptr, num_vocab, scale, softcap = row
    BLOCK: tl.constexpr = LANES * WIDTH
    columns = _columns(LANES)
    top = tl.full([LANES], -_INF, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    moment = tl.zeros([LANES], tl.float32)
    num_full = num_vocab // BLOCK * BLOCK
    for start in range(0, num_full, BLOCK):
        x = _read(row_ptr + start + columns, None, softcap, "evict_last")
        top, total, moment = _absorb(x, top, total, moment, scale)
    if num_full < num_vocab:
        is_in = num_full + columns < num_vocab
        x = _read(row_ptr + num_full + columns, is_in, softcap, "evict_last")
        top, total, moment = _absorb(tl.where(is_in, x, -_INF), top, total, moment, scale)
    row_top = tl.max(top, axis=0)
    base = tl.where(row_top == -_INF, 0.0, row_top)
    shift = _not_far((top - base) * scale)
    shrink = tl.exp2(shift)
    row_moment = tl.sum(shrink * (moment + total * shift), axis=0)
    row_total = tl.sum(shrink * total, axis=0)
    log2_total = tl.log2(row_total)
    return base, log2_total, (log2_total - row_moment / row_total) * LN2


@triton.jit
def _logits_at(row, ids, is_in) -> tl.tensor:
    """NaN for an id outside the vocabulary, so that a wrong one cannot go unseen."""
    row_ptr, num_vocab, _, softcap = row
    is_in = is_in & (ids >= 0) & (ids < num_vocab)
    return _cap(tl.load(row_ptr + ids, mask=is_in, other=float("nan")).to(tl.float32), softcap)


@triton.jit
def _mask_statistics(
    row, mask_ptrs, bounds, target, x_target, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """`masked` over the mask's ids and the target. Their logits are copied, because the gradient
    will overwrite them.
    """
    ids_ptr, _, copy_ptr = mask_ptrs
    begin, end = bounds
    scale = row[2]
    offsets = tl.arange(0, BLOCK)
    top = x_target
    has_target = 0
    for start in range(begin, end, BLOCK):
        is_in = start + offsets < end
        ids = tl.load(ids_ptr + start + offsets, mask=is_in, other=-1)
        x = _logits_at(row, ids, is_in)
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
def add_mask(
    row, index, target, mask_ptrs, full, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """`scored` of the row with this index, whose `full` is known."""
    x_target = _logits_at(row, target, True)
    top, log2_total, _ = full
    begin, end = tl.to_tensor(0).to(tl.int64), tl.to_tensor(0).to(tl.int64)
    if mask_ptrs[0] is not None:
        begin, end = tl.load(mask_ptrs[1] + index), tl.load(mask_ptrs[1] + index + 1)
        if end > begin:
            top, log2_total = _mask_statistics(
                row, mask_ptrs, (begin, end), target=target, x_target=x_target, BLOCK=BLOCK
            )
    return x_target, full, (top, log2_total), (begin, end)


@triton.jit
def score_row(
    row, index, target, mask_ptrs, LANES: tl.constexpr
) -> tuple[tl.tensor, tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]]:
    """(log-prob of the target, `scored`)."""
    full = _row_statistics(row, LANES)
    scored = add_mask(row, index, target, mask_ptrs=mask_ptrs, full=full, BLOCK=LANES)
    top, log2_total = scored[2]
    return ((scored[0] - top) * row[2] - log2_total) * LN2, scored


@triton.jit
def _uncap(g, x, softcap) -> tl.tensor:
    """The gradient by the raw logit, from that by the capped logit x."""
    if softcap is not None:
        g = g * (1.0 - (x / softcap) * (x / softcap))
    return g


@triton.jit
def _gradient(x, full, slopes, scale) -> tl.tensor:
    """p (a + c (log p + H)) without the target's term."""
    top, log2_total, entropy = full
    factor, c = slopes
    log2_p = (x - top) * scale - log2_total
    if c is not None:
        factor = factor + c * (_not_far(log2_p) * LN2 + entropy)
    return tl.exp2(log2_p) * factor


@triton.jit
def _write_block(row, out_ptr, columns, is_in, target, full, slopes) -> None:
    """The gradient of some columns; pointers and target are relative to the block."""
    row_ptr, _, scale, softcap = row
    x = _read(row_ptr + columns, is_in, softcap, "evict_first")
    g = _gradient(x, full, slopes, scale)
    g = _uncap(tl.where(columns == target, g - slopes[0], g), x, softcap)
    g = g.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + columns, g, mask=is_in, eviction_policy="evict_first")


@triton.jit
def _write_gradient(row, out_ptr, target, full, slopes, LANES: tl.constexpr) -> None:
    """Goes from the end of the row to its beginning: cache most likely holds what was read last."""
    row_ptr, num_vocab, scale, _ = row
    BLOCK: tl.constexpr = LANES * WIDTH
    columns = _columns(LANES)
    target = target.to(tl.int32)  # a comparison of 64 bits per element would cost twice
    num_full = num_vocab // BLOCK * BLOCK
    if num_full < num_vocab:
        block = (row_ptr + num_full, num_vocab, scale, row[3])
        _write_block(
            block, out_ptr + num_full, columns, is_in=num_full + columns < num_vocab,
            target=target - num_full, full=full, slopes=slopes,
        )  # fmt: skip
    for back in range(BLOCK, num_full + BLOCK, BLOCK):
        start = num_full - back
        block = (row_ptr + start, num_vocab, scale, row[3])
        _write_block(
            block, out_ptr + start, columns, is_in=None, target=target - start, full=full,
            slopes=slopes,
        )  # fmt: skip


@triton.jit
def write_zeros(out_ptr, num_vocab, LANES: tl.constexpr) -> None:
    BLOCK: tl.constexpr = LANES * WIDTH
    columns = _columns(LANES)
    zeros = tl.zeros([LANES, WIDTH], out_ptr.dtype.element_ty)
    for start in range(0, num_vocab, BLOCK):
        is_in = start + columns < num_vocab
        tl.store(out_ptr + start + columns, zeros, mask=is_in, eviction_policy="evict_first")


@triton.jit
def _write_at(row, out_ptr, ids, is_in, x, target, scored, slopes) -> None:
    """Write the gradient of the log-probability, which the mask's ids and the target alone have,
    over that of the entropy, which the whole row has.
    """
    _, num_vocab, scale, softcap = row
    _, full, masked, _ = scored
    a, c = slopes
    g = _gradient(x, (masked[0], masked[1], 0.0), (a, None), scale)
    g = tl.where(ids == target, g - a, g)
    if c is not None:
        g += _gradient(x, full, (0.0, c), scale)
    g = _uncap(g, x, softcap)
    is_in = is_in & (ids >= 0) & (ids < num_vocab)
    tl.store(out_ptr + ids, g.to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def backward_row(row, out_ptr, target, scored, mask_ptrs, slopes, LANES: tl.constexpr) -> None:
    """Gradient of a row. Rows that have none are written without being read."""
    x_target, full, _, bounds = scored
    begin, end = bounds
    ids_ptr, _, copy_ptr = mask_ptrs
    a, c = slopes
    is_zero = a == 0.0
    if c is not None:
        is_zero = is_zero & (c == 0.0)
    if is_zero:
        write_zeros(out_ptr, row[1], LANES)
    elif ids_ptr is None:
        _write_gradient(row, out_ptr, target, full=full, slopes=slopes, LANES=LANES)
    else:
        of_row = (tl.where(end > begin, 0.0, a), slopes[1])
        _write_gradient(row, out_ptr, target, full=full, slopes=of_row, LANES=LANES)
        if end > begin:
            offsets = tl.arange(0, LANES)
            tl.debug_barrier()  # the row was written by other threads
            for start in range(begin, end, LANES):
                is_in = start + offsets < end
                ids = tl.load(ids_ptr + start + offsets, mask=is_in, other=0)
                x = tl.load(copy_ptr + start + offsets, mask=is_in, other=0.0)
                _write_at(
                    row, out_ptr, ids, is_in=is_in, x=x, target=target, scored=scored, slopes=slopes
                )
            tl.debug_barrier()
            _write_at(
                row, out_ptr, target, is_in=True, x=x_target, target=target, scored=scored,
                slopes=slopes,
            )  # fmt: skip
