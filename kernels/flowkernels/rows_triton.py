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

Functions share the tuples `Row`, `Mask`, `Statistics`, `ScoredRow` and `RowSlopes`; t = x * scale
- top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowkernels.implementations import warps
from flowkernels.targets import Targets

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
ROUNDS = tl.constexpr(4)
"""Loads that a thread has under way at once."""
_INF = tl.constexpr(float("inf"))
_MIN_EXPONENT = tl.constexpr(-1000.0)  # exp2 of it is 0, and 0 times it is 0, unlike 0 * -inf


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
        return {
            "LANES": 32 * self.num_warps,
            "WIDTH": 16 // element_size,
            "num_warps": warps(32 * self.num_warps),
            "enable_fp_fusion": self.contracts,
            **({} if torch.version.hip else {"maxnreg": self.max_registers}),
        }


ONE_PASS = Launch(num_warps=4)
"""The launch of kernels that read a row once: small programs, so that one begins as others end."""
CAPPED_ONE_PASS = Launch(num_warps=8, max_registers=80, contracts=True)
CAPPED_TWO_PASSES = Launch(num_warps=16, max_registers=128, contracts=True)
"""A softcap takes registers for itself, keeps logits small, and makes arithmetic the bound."""


def one_pass(softcap: float | None) -> Launch:
    """Return the launch of a kernel that reads a row once."""
    return ONE_PASS if softcap is None else CAPPED_ONE_PASS


def two_passes(logits_TV: Tensor, softcap: float | None) -> Launch:
    """Return the launch of the loss. All rows at work at once (132 of 304 kB on an H200, V = 152k)
    are to fit L2 until they are read again; smaller ones can be more, so that some read while
    others write (measured: `bench/results/h200/launches.json`).
    """
    if softcap is not None:
        return CAPPED_TWO_PASSES
    row_bytes = logits_TV.shape[1] * logits_TV.element_size()
    return Launch(num_warps=32 if row_bytes > 192e3 else 16 if row_bytes > 112e3 else 8)


def row_arguments(
    launch: Launch, logits_TV: Tensor, targets: Targets, out_TV: Tensor | None = None
) -> dict[str, Any]:
    """Return the arguments of all row kernels; without a sampling mask its pointers are None."""
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
    tensors = [logits_TV] if out_TV is None else [logits_TV, out_TV]
    if not any(
        (x.data_ptr() | x.stride(0) * x.itemsize | x.shape[1] * x.itemsize) % 16 for x in tensors
    ):
        return "whole"
    layouts = {(x.itemsize, x.data_ptr() % 16, x.stride(0) * x.itemsize % 16) for x in tensors}
    return "alike" if len(layouts) == 1 else "apart"


class Row(NamedTuple):
    """The logits of a row: (pointer, V, log2(e) / temperature, softcap or None)."""

    ptr: Any
    num_vocab: Any
    scale: Any
    softcap: Any


class Mask(NamedTuple):
    """Pointers to the sampling masks: (all ids, where each row's begin, copies of their logits)."""

    ids: Any
    offsets: Any
    copies: Any


class Statistics(NamedTuple):
    """A row's (largest x * scale, log2 of sum 2^t, entropy; None over a sampling mask)."""

    top: Any
    log2_total: Any
    entropy: Any


class ScoredRow(NamedTuple):
    """A row after its forward pass; its ids in the sampling mask are from `begin` to `end`."""

    x_target: Any
    full: Any
    masked: Any
    begin: Any
    end: Any


class RowSlopes(NamedTuple):
    """Weights a, c, d in the gradient: of the log-prob, the entropy and the lse (None: 0)."""

    logprob: Any
    entropy: Any
    lse: Any


@triton.jit
def clamp(x, low, high) -> tl.tensor:
    """Clamp x; NaN stays NaN."""
    return tl.clamp(x, low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clamp_exponent(x) -> tl.tensor:
    return tl.maximum(x, _MIN_EXPONENT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_all(ptr, stride, values, NUM: tl.constexpr) -> None:
    """Store the NUM values, `stride` elements apart."""
    for i in tl.static_range(NUM):
        tl.store(ptr + i * stride, values[i])


@triton.jit
def block_columns(LANES: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Return columns [LANES, WIDTH] of a part of a block; the next is LANES * WIDTH further on."""
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
    """Return the ROUNDS parts of a block; `other` from element `limit` on, which may be None."""
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
    """Return (begin, size) of the part of a row that is made of whole loads."""
    begin, size = 0, num_vocab
    if ALIGNMENT != "whole":
        SIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        # Elements up to the next multiple of 16 bytes.
        begin = tl.minimum((-ptr.to(tl.int64) & 15) // SIZE, num_vocab).to(tl.int32)
        size = (num_vocab - begin) // WIDTH * WIDTH
    return begin, tl.multiple_of(size, WIDTH)


@triton.jit
def edge_columns(begin, size, LANES: tl.constexpr) -> tl.tensor:
    """Return the columns [LANES] beside the body, of which the first num_vocab - size are in the
    row: fewer than two loads have.
    """
    lane = tl.arange(0, LANES)
    return tl.where(lane < begin, lane, lane + size)


@triton.jit
def capped(x, softcap) -> tl.tensor:
    """Return softcap * tanh(x / softcap), with tanh by exp2, which every target has."""
    if softcap is not None:
        x = softcap - 2.0 * softcap / (tl.exp2(x * (2.0 * LOG2E / softcap)) + 1.0)
    return x


@triton.jit
def _accumulate(
    row, parts, limit, state, NUM: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take NUM parts [LANES, WIDTH] of raw logits, -inf from element `limit` (or None) on, into the
    running (top, total, moment) [LANES].

    The maximum needs all loads of a block at once. Were they taken one by one, or capped before,
    the compiler would issue each load when the one before it has been used up.
    """
    top, total, moment = state
    largest = parts[0]
    for i in tl.static_range(1, NUM):
        largest = tl.maximum(largest, parts[i])
    new_top = tl.maximum(top, capped(tl.max(largest, axis=1), row.softcap) * row.scale)
    # A lane that has seen nothing but -inf would subtract -inf from itself.
    base = tl.where(new_top == -_INF, 0.0, new_top)
    e_sum, moment_sum = tl.zeros_like(parts[0]), tl.zeros_like(parts[0])
    for i in tl.static_range(NUM):
        t = clamp_exponent(capped(parts[i], row.softcap) * row.scale - base[:, None])
        if limit is not None:
            t = tl.where(block_columns(LANES, WIDTH) + i * LANES * WIDTH < limit, t, _MIN_EXPONENT)
        e = tl.exp2(t)
        e_sum += e
        moment_sum = tl.fma(e, t, moment_sum)
    shift = clamp_exponent(top - base)
    shrink = tl.exp2(shift)
    moment = shrink * (moment + total * shift) + tl.sum(moment_sum, axis=1)
    total = shrink * total + tl.sum(e_sum, axis=1)
    return new_top, total, moment


@triton.jit
def _row_statistics(
    row, ALIGNMENT: tl.constexpr, POLICY: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return (`Statistics` of a row, its last block as it was read); its entropy is in nats."""
    row_ptr, num_vocab = row.ptr, row.num_vocab
    BLOCK: tl.constexpr = ROUNDS * LANES * WIDTH
    zeros = tl.zeros([LANES], tl.float32)
    state = (zeros - _INF, zeros, zeros)
    begin, size = row_body(row_ptr, num_vocab, ALIGNMENT, WIDTH)
    body_ptr = tl.multiple_of(row_ptr + begin, 16)
    # The last block stays out of the loop: its logits are returned, and the gradient begins there.
    num_full = (size - 1) // BLOCK * BLOCK
    for start in range(0, num_full, BLOCK):
        parts = load_block(body_ptr + start, None, -_INF, POLICY=POLICY, LANES=LANES, WIDTH=WIDTH)
        state = _accumulate(row, parts, None, state=state, NUM=ROUNDS, LANES=LANES, WIDTH=WIDTH)
    num_tail = size - num_full
    last_block = load_block(
        body_ptr + num_full, num_tail, -_INF, POLICY="evict_first", LANES=LANES, WIDTH=WIDTH
    )
    state = _accumulate(
        row, last_block, num_tail, state=state, NUM=ROUNDS, LANES=LANES, WIDTH=WIDTH
    )
    if ALIGNMENT != "whole":
        num_edge = num_vocab - size
        x = load_logits(
            row_ptr + edge_columns(begin, size, LANES),
            tl.arange(0, LANES) < num_edge, -_INF, POLICY,
        )  # fmt: skip
        state = _accumulate(row, (x[:, None],), num_edge, state=state, NUM=1, LANES=LANES, WIDTH=1)
    top, total, moment = state
    row_top = tl.max(top, axis=0)
    base = tl.where(row_top == -_INF, 0.0, row_top)
    shift = clamp_exponent(top - base)
    shrink = tl.exp2(shift)
    row_moment = tl.sum(shrink * (moment + total * shift), axis=0)
    row_total = tl.sum(shrink * total, axis=0)
    log2_total = tl.log2(row_total)
    entropy = (log2_total - row_moment / row_total) * LN2
    return Statistics(base, log2_total, entropy), last_block


@triton.jit
def _logits_at(row, ids, is_in) -> tl.tensor:
    """Return logits, NaN for an id outside the vocabulary, so that a wrong one cannot go unseen."""
    is_in = is_in & (ids >= 0) & (ids < row.num_vocab)
    x = tl.load(row.ptr + ids, mask=is_in, other=float("nan")).to(tl.float32)
    return capped(x, row.softcap)


@triton.jit
def _mask_statistics(
    row, mask, begin, end, target, x_target, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return (top, log2_total) over the mask's ids and the target. Their logits are copied, because
    the gradient will overwrite them.
    """
    offsets = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], -_INF, tl.float32)
    is_target = tl.zeros([BLOCK], tl.int1)
    for start in range(begin, end, BLOCK):
        is_in = start + offsets < end
        ids = tl.load(mask.ids + start + offsets, mask=is_in, other=-1)
        x = _logits_at(row, ids, is_in)
        tl.store(mask.copies + start + offsets, x, mask=is_in)
        tops = tl.maximum(tops, tl.where(is_in, x, -_INF), propagate_nan=tl.PropagateNan.ALL)
        is_target |= ids == target
    nan = tl.sum(tl.where(tops == tops, 0.0, tops), axis=0)  # a maximum over a block passes over it
    top = tl.maximum(x_target, tl.max(tops, axis=0) + nan, propagate_nan=tl.PropagateNan.ALL)
    top *= row.scale
    # other threads may read the copy than wrote it, or write the row while it is still being read
    tl.debug_barrier()
    totals = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        is_in = start + offsets < end
        x = tl.load(mask.copies + start + offsets, mask=is_in, other=-_INF)
        totals += tl.exp2(x * row.scale - top)
    has_target = tl.max(is_target.to(tl.int32), axis=0) > 0
    # The target always counts, but only once: not again where the mask names it.
    target_term = tl.where(has_target, 0.0, tl.exp2(x_target * row.scale - top))
    return top, tl.log2(target_term + tl.sum(totals, axis=0))


@triton.jit
def add_mask(
    row, index, target, mask, full, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the `ScoredRow` with this index, whose `Statistics` are known."""
    x_target = _logits_at(row, target, True)
    top, log2_total = full.top, full.log2_total
    begin, end = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if mask.ids is not None:
        begin, end = tl.load(mask.offsets + index), tl.load(mask.offsets + index + 1)
        if end > begin:
            top, log2_total = _mask_statistics(
                row, mask, begin, end, target=target, x_target=x_target, BLOCK=BLOCK
            )
    return ScoredRow(x_target, full, Statistics(top, log2_total, None), begin, end)


@triton.jit
def score_row(
    row, index, target, mask, ALIGNMENT: tl.constexpr, POLICY: tl.constexpr,
    LANES: tl.constexpr, WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tuple, tl.tensor]:  # fmt: skip
    """Return (log-prob of the target, `ScoredRow`, its last block as it was read); POLICY: what
    becomes of the other blocks in the cache.
    """
    full, last_block = _row_statistics(row, ALIGNMENT, POLICY, LANES=LANES, WIDTH=WIDTH)
    scored = add_mask(row, index, target, mask=mask, full=full, BLOCK=LANES)
    # Not x - lse: that is off by the rounding of lse, which grows with the size of the logits.
    log2_p = (scored.x_target * row.scale - scored.masked.top) - scored.masked.log2_total
    return log2_p * LN2, scored, last_block
