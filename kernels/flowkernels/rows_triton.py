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
ROUNDS = tl.constexpr(4)
"""Loads that a thread has under way at once."""
_INF = tl.constexpr(float("inf"))
_FAR = tl.constexpr(-1000.0)  # exp2 of it is 0, and 0 times it is 0, which 0 times -inf is not


@dataclass(frozen=True, slots=True)
class Config:
    """Launch parameters that keep as many bytes in flight as registers hold without a spill on any
    target (`python -m bench.aot`).
    """

    num_warps: int
    rows_per_sm: int | None
    """Programs per multiprocessor, each of which takes row after row; None: one program per row, in
    whatever order the GPU likes."""
    max_registers: int
    """Per thread. Left to itself the NVIDIA assembler at times saves registers that nobody else
    needs, and spills."""

    def arguments(self, element_size: int) -> dict[str, int]:
        """`element_size` is that of the logits: a load is 16 bytes, the widest there is."""
        limit = {} if torch.version.hip else {"maxnreg": self.max_registers}
        width = max(1, 16 // element_size)
        return {"LANES": 32 * self.num_warps, "WIDTH": width, "num_warps": self.num_warps, **limit}


SCORE_LAUNCH = Config(num_warps=8, rows_per_sm=None, max_registers=80)
"""The launch of kernels that read a row once."""
GRADIENT_LAUNCH = Config(num_warps=8, rows_per_sm=None, max_registers=80)
LOSS_LAUNCH = Config(num_warps=16, rows_per_sm=1, max_registers=128)
"""The launch of the loss: one row at a time on a multiprocessor, so that all rows at work (132 of
304 kB on an H200, V = 152k) fit L2 until they are read again."""


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


def row_arguments(
    logits_TV: Tensor, targets: Targets, config: Config, out_TV: Tensor | None = None
) -> dict[str, Any]:
    """The arguments that all row kernels take; without a sampling mask its pointers are None."""
    mask, device = targets.mask, logits_TV.device
    spread = [_misalignment(x) for x in (logits_TV, out_TV) if x is not None]
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
        "IS_ALIGNED": all(each == (0, 0, 0) for each in spread),
        **config.arguments(logits_TV.element_size()),
    }


def _misalignment(x_TV: Tensor) -> tuple[int, int, int]:
    """Bytes beyond the last multiple of 16 of the address, the row stride and the row length."""
    size = x_TV.element_size()
    return x_TV.data_ptr() % 16, x_TV.stride(0) * size % 16, x_TV.shape[1] * size % 16


@triton.jit
def _columns(LANES: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """The places [ROUNDS, LANES, WIDTH] of a block."""
    rounds = tl.arange(0, ROUNDS)[:, None, None] * (LANES * WIDTH)
    return rounds + tl.arange(0, LANES)[None, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]


@triton.jit
def _body(
    row_ptr, num_vocab, IS_ALIGNED: tl.constexpr, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(begin, size) of what can be read 16 bytes at a time: all of an aligned row, else what is left
    without the elements before the first boundary and behind the last one.
    """
    begin, size = 0, num_vocab
    if not IS_ALIGNED:
        address = row_ptr.to(tl.int64)
        begin = tl.minimum(((-address) & 15) // (16 // WIDTH), num_vocab).to(tl.int32)
        size = (num_vocab - begin) // WIDTH * WIDTH
    return begin, tl.multiple_of(size, WIDTH)


@triton.jit
def _ragged(begin, size, num_vocab, LANES: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(columns, mask) [LANES] of the elements outside the body, of which there are fewer than two
    times WIDTH.
    """
    lane = tl.arange(0, LANES)
    return tl.where(lane < begin, lane, lane + size), lane < num_vocab - size


@triton.jit
def _cap(x, softcap) -> tl.tensor:
    """softcap * tanh(x / softcap), with tanh by exp2, which every target has."""
    if softcap is not None:
        x = softcap - 2.0 * softcap / (tl.exp2(x * (2.0 * LOG2E / softcap)) + 1.0)
    return x


@triton.jit
def _absorb(x, is_in, top, total, moment, scale, softcap) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take the block x [ROUNDS, LANES, WIDTH] of raw logits, -inf where not `is_in` (None: all are),
    into the running state [LANES], whose `top` is in units of t. The maximum needs all loads of an iteration at once: were they absorbed
    one by one, or capped before, the compiler would issue each when the one before it is used up.
    """
    block_top = _cap(tl.max(tl.max(x, axis=2), axis=0), softcap) * scale
    new_top = tl.maximum(top, block_top)
    base = tl.where(new_top == -_INF, 0.0, new_top)
    t = _cap(x, softcap) * scale - base[None, :, None]
    if is_in is not None:
        t = tl.where(is_in, t, _FAR)
    t = tl.maximum(t, _FAR, propagate_nan=tl.PropagateNan.ALL)
    e = tl.exp2(t)
    shift = tl.maximum(top - base, _FAR, propagate_nan=tl.PropagateNan.ALL)
    shrink = tl.exp2(shift)
    moment = shrink * (moment + total * shift) + tl.sum(tl.sum(e * t, axis=2), axis=0)
    total = shrink * total + tl.sum(tl.sum(e, axis=2), axis=0)
    return new_top, total, moment


@triton.jit
def row_statistics(
    row_ptr, num_vocab, scale, softcap,
    IS_ALIGNED: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, EVICTION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """`full` of a row; its entropy is in nats."""
    BLOCK: tl.constexpr = ROUNDS * LANES * WIDTH
    columns = _columns(LANES, WIDTH)
    top = tl.full([LANES], -_INF, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    moment = tl.zeros([LANES], tl.float32)
    begin, size = _body(row_ptr, num_vocab, IS_ALIGNED, WIDTH)
    body_ptr = tl.multiple_of(row_ptr + begin, 16)
    num_full = size // BLOCK * BLOCK
    for start in range(0, num_full, BLOCK):
        x = tl.load(body_ptr + start + columns, eviction_policy=EVICTION).to(tl.float32)
        top, total, moment = _absorb(x, None, top, total, moment, scale, softcap)
    if num_full < size:
        is_in = num_full + columns < size
        x = tl.load(body_ptr + num_full + columns, mask=is_in, other=0.0, eviction_policy=EVICTION)
        x = tl.where(is_in, x.to(tl.float32), -_INF)
        top, total, moment = _absorb(x, is_in, top, total, moment, scale, softcap)
    if not IS_ALIGNED:
        places, is_place = _ragged(begin, size, num_vocab, LANES)
        x = tl.load(row_ptr + places, mask=is_place, other=0.0).to(tl.float32)
        x = tl.where(is_place, x, -_INF)[None, :, None]
        is_place = is_place[None, :, None]
        top, total, moment = _absorb(x, is_place, top, total, moment, scale, softcap)
    row_top = tl.max(top, axis=0)
    base = tl.where(row_top == -_INF, 0.0, row_top)
    shift = tl.maximum(top - base, _FAR, propagate_nan=tl.PropagateNan.ALL)
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
    tops = tl.full([BLOCK], -_INF, tl.float32)
    is_target = tl.zeros([BLOCK], tl.int1)
    for start in range(begin, end, BLOCK):
        is_in = start + offsets < end
        ids = tl.load(ids_ptr + start + offsets, mask=is_in, other=-1)
        is_id = is_in & (ids >= 0) & (ids < num_vocab)
        x = tl.load(row_ptr + ids, mask=is_id, other=float("nan")).to(tl.float32)
        x = _cap(x, softcap)
        tl.store(copy_ptr + start + offsets, x, mask=is_in)
        x = tl.where(is_in, x, -_INF)
        tops = tl.maximum(tops, x, propagate_nan=tl.PropagateNan.ALL)
        is_target |= ids == target
    # A maximum over a block passes over NaN; a sum does not.
    nan = tl.sum(tl.where(tops == tops, 0.0, tops), axis=0)
    top = tl.maximum(x_target, tl.max(tops, axis=0) + nan, propagate_nan=tl.PropagateNan.ALL) * scale
    # other threads may read the copy than wrote it, or write the row while it is still being read
    tl.debug_barrier()
    totals = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        is_in = start + offsets < end
        x = tl.load(copy_ptr + start + offsets, mask=is_in, other=-_INF)
        totals += tl.exp2(x * scale - top)
    has_target = tl.max(is_target.to(tl.int32), axis=0) > 0
    own = tl.where(has_target, 0.0, tl.exp2(x_target * scale - top))
    return top, tl.log2(own + tl.sum(totals, axis=0))


@triton.jit
def _uncap(g, x, softcap) -> tl.tensor:
    """The gradient by the raw logit, from that by the capped logit x."""
    if softcap is not None:
        tanh = x * (1.0 / softcap)
        g = g - g * (tanh * tanh)
    return g


@triton.jit
def _normalized(
    top, log2_total, entropy, a, c
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(lse, entropy, a, c) such that q = 2^(x scale - lse) takes one instruction less than p =
    2^(x scale - top - log2_total) and nothing is lost: what lse was rounded by goes into the others.
    """
    lse = top + log2_total
    of_total = lse - top
    rounding = (top - (lse - of_total)) + (log2_total - of_total)
    lost = tl.exp2(-rounding)
    return lse, entropy - rounding * LN2, a * lost, c * lost


@triton.jit
def _gradient(x, lse, entropy, a, c, scale, HAS_ENTROPY: tl.constexpr) -> tl.tensor:
    """p (a + c (log p + H)), without the target's term, with what `_normalized` returned."""
    log2_q = x * scale - lse
    factor = a
    if HAS_ENTROPY:
        log2_far = tl.maximum(log2_q, _FAR, propagate_nan=tl.PropagateNan.ALL)
        factor = a + c * (log2_far * LN2 + entropy)
    return tl.exp2(log2_q) * factor


@triton.jit
def _write_gradient(
    row_ptr, out_ptr, num_vocab, full, a, c, scale, softcap, HAS_ENTROPY: tl.constexpr,
    IS_ALIGNED: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient of a row but for the target's own term. Goes from the end of the row to
    its beginning: cache most likely holds what was read last.
    """
    BLOCK: tl.constexpr = ROUNDS * LANES * WIDTH
    top, log2_total, entropy = full
    lse, entropy, a, c = _normalized(top, log2_total, entropy, a, c)
    columns = _columns(LANES, WIDTH)
    begin, size = _body(row_ptr, num_vocab, IS_ALIGNED, WIDTH)
    body_ptr = tl.multiple_of(row_ptr + begin, 16)
    body_out_ptr = tl.multiple_of(out_ptr + begin, 16)
    num_full = size // BLOCK * BLOCK
    if not IS_ALIGNED:
        places, is_place = _ragged(begin, size, num_vocab, LANES)
        x_apart = tl.load(row_ptr + places, mask=is_place, other=0.0).to(tl.float32)
        x_apart = _cap(x_apart, softcap)
        g_apart = _gradient(x_apart, lse, entropy, a, c, scale, HAS_ENTROPY)
        g_apart = _uncap(g_apart, x_apart, softcap).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + places, g_apart, mask=is_place)
    if num_full < size:
        is_in = num_full + columns < size
        x = tl.load(
            body_ptr + num_full + columns, mask=is_in, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
        x = _cap(x, softcap)
        g = _gradient(x, lse, entropy, a, c, scale, HAS_ENTROPY)
        g = _uncap(g, x, softcap).to(out_ptr.dtype.element_ty)
        tl.store(body_out_ptr + num_full + columns, g, mask=is_in, eviction_policy="evict_first")
    for back in range(BLOCK, num_full + BLOCK, BLOCK):
        start = num_full - back
        x = tl.load(body_ptr + start + columns, eviction_policy="evict_first").to(tl.float32)
        x = _cap(x, softcap)
        g = _gradient(x, lse, entropy, a, c, scale, HAS_ENTROPY)
        g = _uncap(g, x, softcap).to(out_ptr.dtype.element_ty)
        tl.store(body_out_ptr + start + columns, g, eviction_policy="evict_first")


@triton.jit
def write_zeros(
    out_ptr, num_vocab, IS_ALIGNED: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr
) -> None:
    BLOCK: tl.constexpr = ROUNDS * LANES * WIDTH
    zeros = tl.zeros([ROUNDS, LANES, WIDTH], out_ptr.dtype.element_ty)
    columns = _columns(LANES, WIDTH)
    begin, size = _body(out_ptr, num_vocab, IS_ALIGNED, WIDTH)
    body_ptr = tl.multiple_of(out_ptr + begin, 16)
    for start in range(0, size, BLOCK):
        tl.store(
            body_ptr + start + columns,
            zeros,
            mask=start + columns < size,
            eviction_policy="evict_first",
        )
    if not IS_ALIGNED:
        places, is_place = _ragged(begin, size, num_vocab, LANES)
        tl.store(out_ptr + places, tl.zeros([LANES], out_ptr.dtype.element_ty), mask=is_place)


@triton.jit
def _gradient_apart(x, full, masked, a, c, scale, HAS_ENTROPY: tl.constexpr) -> tl.tensor:
    """The gradient where log-probability and entropy are of different distributions, by the raw
    logit, whose capped value is x.
    """
    top, log2_total, entropy = full
    masked_top, masked_log2_total = masked
    g = a * tl.exp2((x * scale - masked_top) - masked_log2_total)
    if HAS_ENTROPY:
        lse, entropy, _, c = _normalized(top, log2_total, entropy, a, c)
        g += _gradient(x, lse, entropy, 0.0, c, scale, True)
    return g


@triton.jit
def _write_masked_gradient(
    out_ptr, num_vocab, mask, full, masked, a, c, scale, softcap,
    HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient of the log-probability, which the mask's ids and the target alone have,
    over that of the entropy, which the whole row has.
    """
    ids_ptr, copy_ptr, begin, end = mask
    offsets = tl.arange(0, BLOCK)
    for start in range(begin, end, BLOCK):
        is_in = start + offsets < end
        ids = tl.load(ids_ptr + start + offsets, mask=is_in, other=0)
        x = tl.load(copy_ptr + start + offsets, mask=is_in, other=0.0)
        g = _gradient_apart(x, full, masked, a, c, scale, HAS_ENTROPY)
        g = _uncap(g, x, softcap).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ids, g, mask=is_in & (ids >= 0) & (ids < num_vocab))


@triton.jit
def backward_row(
    row_ptr, out_ptr, num_vocab, mask, target, x_target, full, masked, a, c, scale, softcap,
    HAS_ENTROPY: tl.constexpr, IS_ALIGNED: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Gradient of a row: a weighs the log-probability, c the entropy. Rows that have none are
    written without being read. What differs from the rest of the row is written over it at the end,
    the target last, which a mask may name too.
    """
    ids_ptr, _, begin, end = mask
    if (a == 0.0) & (c == 0.0):
        write_zeros(out_ptr, num_vocab, IS_ALIGNED, LANES, WIDTH)
    else:
        a_row = a
        if ids_ptr is not None:
            a_row = tl.where(end > begin, 0.0, a)
        _write_gradient(
            row_ptr, out_ptr, num_vocab, full, a=a_row, c=c, scale=scale, softcap=softcap,
            HAS_ENTROPY=HAS_ENTROPY, IS_ALIGNED=IS_ALIGNED, LANES=LANES, WIDTH=WIDTH,
        )  # fmt: skip
        tl.debug_barrier()  # the row was written by other threads
        if ids_ptr is not None:
            _write_masked_gradient(
                out_ptr, num_vocab, mask, full=full, masked=masked, a=a, c=c, scale=scale,
                softcap=softcap, HAS_ENTROPY=HAS_ENTROPY, BLOCK=LANES,
            )  # fmt: skip
            tl.debug_barrier()
        g = _gradient_apart(x_target, full, masked, a, c, scale, HAS_ENTROPY) - a
        g = _uncap(g, x_target, softcap).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + target, g, mask=(target >= 0) & (target < num_vocab))
