"""Blocks of the row kernels in Triton: the statistics of a row of logits, and its gradient.
`logprobs.py` has the maths and the reference.

A row is read in blocks of ROUNDS times [LANES, WIDTH] elements. WIDTH consecutive ones, 16 bytes,
are one load of a thread, and a thread has ROUNDS loads under way at once: memory is waited for as
seldom as registers allow. Every lane keeps its own running (maximum, sum, weighted sum) without
talking to the others, and takes one exp2 per element plus one per block; the lanes meet once, at
the end of the row. Sums are of exp(z - maximum) and of exp(z - maximum) (z - maximum): neither
overflows, and the entropy is not the small difference of two large numbers.

Rows that do not begin at multiples of 16 bytes, as those of an odd vocabulary, are read from the
first multiple on; the few elements before it and behind the last one are read apart. Which lane an
element falls to then depends on where its row begins, and with it the last bit of a result.

Functions share these arguments: `row` = (pointer, num_vocab, scale, softcap) with scale = log2(e) /
temperature and a softcap that may be None; t = x * scale - top; `full` = (top, log2_total, entropy)
of the row, with top = the largest x * scale and log2_total = log2 of sum 2^t, `masked` = (top,
log2_total) over its sampling mask; `mask_ptrs` = (ids, offsets, copy): the ids of all masks, where
those of each row are, and room for a copy of their logits; `scored` = (logit of the target, full,
masked, (begin, end) of the row's ids in the mask); `slopes` = (a, c, d), the weights of the
log-probability, the entropy and the log-sum-exp in the gradient; c and d may be None.
"""

from __future__ import annotations

from dataclasses import dataclass
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
class Launch:
    """Launch parameters of a kernel with one program per row, without a spill on any target
    (`python -m bench.aot`). With 64 registers a multiprocessor holds 32 warps, whatever the size
    of the programs.
    """

    num_warps: int
    max_registers: int = 64
    """Per thread. Left to itself the NVIDIA assembler takes more, and fewer programs fit."""
    contracts: bool = False
    """Make one instruction, with one rounding, of a product and a sum. Without it x * scale - top
    is 0 for the largest x, however large that is."""

    def options(self, element_size: int) -> dict[str, int]:
        """Block and compiler options for logits of this size; a load is 16 bytes of them, the
        widest there is.
        """
        limit = {} if torch.version.hip else {"maxnreg": self.max_registers}
        return {
            "LANES": 32 * self.num_warps,
            "WIDTH": 16 // element_size,
            "num_warps": self.num_warps,
            "enable_fp_fusion": self.contracts,
            **limit,
        }


ONE_PASS = Launch(num_warps=4)
"""The launch of kernels that read a row once. Small programs, because one begins while others end.
"""
CAPPED_ONE_PASS = Launch(num_warps=8, max_registers=80, contracts=True)
CAPPED_TWO_PASSES = Launch(num_warps=16, max_registers=128, contracts=True)
"""A softcap takes registers for itself, keeps logits small, and makes arithmetic the bound."""


def one_pass(softcap: float | None) -> Launch:
    """The launch of a kernel that reads a row once."""
    return ONE_PASS if softcap is None else CAPPED_ONE_PASS


def two_passes(logits_TV: Tensor, softcap: float | None) -> Launch:
    """The launch of the loss. All rows at work at once (132 of 304 kB on an H200, V = 152k) are to
    fit L2 until they are read again; smaller ones can be more, so that some read while others write
    (measured: `bench/results/h200/launches.json`).
    """
    if softcap is not None:
        return CAPPED_TWO_PASSES
    row_bytes = logits_TV.shape[1] * logits_TV.element_size()
    return Launch(num_warps=32 if row_bytes > 192e3 else 16 if row_bytes > 112e3 else 8)


def row_arguments(
    launch: Launch, logits_TV: Tensor, targets: Targets, out_TV: Tensor | None = None
) -> dict[str, Any]:
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
        "ALIGNMENT": alignment(logits_TV, out_TV),
        **launch.options(logits_TV.element_size()),
    }


def alignment(logits_TV: Tensor, out_TV: Tensor | None = None) -> str:
    """Say which loads and stores can be 16 bytes: "whole", of rows that begin and end at multiples
    of 16; "alike", between the first and the last multiple, in both tensors at once; "apart", loads
    alone.
    """
    both = [logits_TV] if out_TV is None else [logits_TV, out_TV]
    if not any(
        (x.data_ptr() | x.stride(0) * x.itemsize | x.shape[1] * x.itemsize) % 16 for x in both
    ):
        return "whole"
    begins = {(x.itemsize, x.data_ptr() % 16, x.stride(0) * x.itemsize % 16) for x in both}
    return "alike" if len(begins) == 1 else "apart"


@triton.jit
def clamp(x, low, high) -> tl.tensor:
    """NaN stays NaN."""
    return tl.clamp(x, low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def not_far(x) -> tl.tensor:
    return tl.maximum(x, _FAR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_all(ptr, stride, values, NUM: tl.constexpr) -> None:
    """Store the NUM values, `stride` elements apart."""
    for i in tl.static_range(NUM):
        tl.store(ptr + i * stride, values[i])


@triton.jit
def block_columns(LANES: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Places [LANES, WIDTH] of a part of a block; the next one begins LANES * WIDTH further on."""
    return tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def load_logits(ptr, is_in, other, POLICY: tl.constexpr) -> tl.tensor:
    """Load in fp32; `is_in` may be None."""
    if is_in is None:
        x = tl.load(ptr, eviction_policy=POLICY)
    else:
        x = tl.load(ptr, mask=is_in, other=other, eviction_policy=POLICY)
    return x.to(tl.float32)


@triton.jit
def load_block(
    ptr, limit, other, POLICY: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The ROUNDS parts of a block; `other` from element `limit` on, which may be None."""
    PART: tl.constexpr = LANES * WIDTH
    c0 = block_columns(LANES, WIDTH)
    c1, c2, c3 = c0 + PART, c0 + 2 * PART, c0 + 3 * PART
    if limit is None:
        x0 = load_logits(ptr + c0, None, other, POLICY)
        x1 = load_logits(ptr + c1, None, other, POLICY)
        x2 = load_logits(ptr + c2, None, other, POLICY)
        x3 = load_logits(ptr + c3, None, other, POLICY)
    else:
        x0 = load_logits(ptr + c0, c0 < limit, other, POLICY)
        x1 = load_logits(ptr + c1, c1 < limit, other, POLICY)
        x2 = load_logits(ptr + c2, c2 < limit, other, POLICY)
        x3 = load_logits(ptr + c3, c3 < limit, other, POLICY)
    return x0, x1, x2, x3


@triton.jit
def row_body(
    ptr, num_vocab, ALIGNMENT: tl.constexpr, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(begin, size) of the part of a row that is made of whole loads."""
    begin, size = 0, num_vocab
    if ALIGNMENT != "whole":
        SIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        begin = tl.minimum((-ptr.to(tl.int64) & 15) // SIZE, num_vocab).to(tl.int32)
        size = (num_vocab - begin) // WIDTH * WIDTH
    return begin, tl.multiple_of(size, WIDTH)


@triton.jit
def rest_columns(begin, size, LANES: tl.constexpr) -> tl.tensor:
    """Columns [LANES] beside the body, of which the first num_vocab - size are in the row: fewer
    than two loads have.
    """
    lane = tl.arange(0, LANES)
    return tl.where(lane < begin, lane, lane + size)


@triton.jit
def capped(x, softcap) -> tl.tensor:
    """softcap * tanh(x / softcap), with tanh by exp2, which every target has."""
    if softcap is not None:
        x = softcap - 2.0 * softcap / (tl.exp2(x * (2.0 * LOG2E / softcap)) + 1.0)
    return x


@triton.jit
def _absorb(
    row, parts, limit, state, NUM: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take NUM parts [LANES, WIDTH] of raw logits, -inf from element `limit` (or None) on, into the
    running (top, total, moment) [LANES].

    The maximum needs all loads of a block at once. Were they absorbed one by one, or capped before,
    the compiler would issue each load when the one before it has been used up.
    """
    _, _, scale, softcap = row
    top, total, moment = state
    largest = parts[0]
    for i in tl.static_range(1, NUM):
        largest = tl.maximum(largest, parts[i])
    new_top = tl.maximum(top, capped(tl.max(largest, axis=1), softcap) * scale)
    base = tl.where(new_top == -_INF, 0.0, new_top)
    e_sum, moment_sum = tl.zeros_like(parts[0]), tl.zeros_like(parts[0])
    for i in tl.static_range(NUM):
        t = not_far(capped(parts[i], softcap) * scale - base[:, None])
        if limit is not None:
            t = tl.where(block_columns(LANES, WIDTH) + i * LANES * WIDTH < limit, t, _FAR)
        e = tl.exp2(t)
        e_sum += e
        moment_sum = tl.fma(e, t, moment_sum)
    shift = not_far(top - base)
    shrink = tl.exp2(shift)
    moment = shrink * (moment + total * shift) + tl.sum(moment_sum, axis=1)
    total = shrink * total + tl.sum(e_sum, axis=1)
    return new_top, total, moment


@triton.jit
def _row_statistics(
    row, ALIGNMENT: tl.constexpr, POLICY: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(`full` of a row, its last block as it was read); its entropy is in nats."""
    row_ptr, num_vocab, _, _ = row
    BLOCK: tl.constexpr = ROUNDS * LANES * WIDTH
    zeros = tl.zeros([LANES], tl.float32)
    state = (zeros - _INF, zeros, zeros)
    begin, size = row_body(row_ptr, num_vocab, ALIGNMENT, WIDTH)
    body_ptr = tl.multiple_of(row_ptr + begin, 16)
    num_full = (size - 1) // BLOCK * BLOCK
    for start in range(0, num_full, BLOCK):
        parts = load_block(body_ptr + start, None, -_INF, POLICY=POLICY, LANES=LANES, WIDTH=WIDTH)
        state = _absorb(row, parts, None, state=state, NUM=ROUNDS, LANES=LANES, WIDTH=WIDTH)
    left = size - num_full
    last = load_block(
        body_ptr + num_full, left, -_INF, POLICY="evict_first", LANES=LANES, WIDTH=WIDTH
    )
    state = _absorb(row, last, left, state=state, NUM=ROUNDS, LANES=LANES, WIDTH=WIDTH)
    if ALIGNMENT != "whole":
        left = num_vocab - size
        x = load_logits(
            row_ptr + rest_columns(begin, size, LANES), tl.arange(0, LANES) < left, -_INF, POLICY
        )
        state = _absorb(row, (x[:, None],), left, state=state, NUM=1, LANES=LANES, WIDTH=1)
    top, total, moment = state
    row_top = tl.max(top, axis=0)
    base = tl.where(row_top == -_INF, 0.0, row_top)
    shift = not_far(top - base)
    shrink = tl.exp2(shift)
    row_moment = tl.sum(shrink * (moment + total * shift), axis=0)
    row_total = tl.sum(shrink * total, axis=0)
    log2_total = tl.log2(row_total)
    return (base, log2_total, (log2_total - row_moment / row_total) * LN2), last


@triton.jit
def _logits_at(row, ids, is_in) -> tl.tensor:
    """NaN for an id outside the vocabulary, so that a wrong one cannot go unseen."""
    row_ptr, num_vocab, _, softcap = row
    is_in = is_in & (ids >= 0) & (ids < num_vocab)
    return capped(tl.load(row_ptr + ids, mask=is_in, other=float("nan")).to(tl.float32), softcap)


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
    tops = tl.full([BLOCK], -_INF, tl.float32)
    is_target = tl.zeros([BLOCK], tl.int1)
    for start in range(begin, end, BLOCK):
        is_in = start + offsets < end
        ids = tl.load(ids_ptr + start + offsets, mask=is_in, other=-1)
        x = _logits_at(row, ids, is_in)
        tl.store(copy_ptr + start + offsets, x, mask=is_in)
        tops = tl.maximum(tops, tl.where(is_in, x, -_INF), propagate_nan=tl.PropagateNan.ALL)
        is_target |= ids == target
    nan = tl.sum(tl.where(tops == tops, 0.0, tops), axis=0)  # a maximum over a block passes over it
    top = tl.maximum(x_target, tl.max(tops, axis=0) + nan, propagate_nan=tl.PropagateNan.ALL)
    top *= scale
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
def add_mask(
    row, index, target, mask_ptrs, full, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """`scored` of the row with this index, whose `full` is known."""
    x_target = _logits_at(row, target, True)
    top, log2_total, _ = full
    begin, end = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if mask_ptrs[0] is not None:
        begin, end = tl.load(mask_ptrs[1] + index), tl.load(mask_ptrs[1] + index + 1)
        if end > begin:
            top, log2_total = _mask_statistics(
                row, mask_ptrs, (begin, end), target=target, x_target=x_target, BLOCK=BLOCK
            )
    return x_target, full, (top, log2_total), (begin, end)


@triton.jit
def score_row(
    row, index, target, mask_ptrs, ALIGNMENT: tl.constexpr, POLICY: tl.constexpr,
    LANES: tl.constexpr, WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor], tl.tensor]:  # fmt: skip
    """(log-prob of the target, `scored`, the row's last block as it was read); POLICY: what becomes
    of the others in the cache.
    """
    full, last = _row_statistics(row, ALIGNMENT, POLICY, LANES=LANES, WIDTH=WIDTH)
    scored = add_mask(row, index, target, mask_ptrs=mask_ptrs, full=full, BLOCK=LANES)
    top, log2_total = scored[2]
    return ((scored[0] * row[2] - top) - log2_total) * LN2, scored, last
