"""The row kernels in Triton: statistics of a row of logits, and the loss with its gradient.
`rows.py` has the maths and the reference.

A row is read in blocks of [LANES, WIDTH] elements. WIDTH consecutive ones belong to one thread, so
every lane keeps its own running (maximum, sum, weighted sum) without talking to the others, and
takes one exp2 per element plus one per WIDTH; the lanes meet once, at the end of the row. Sums are
of exp(z - maximum) and of exp(z - maximum) (z - maximum): neither overflows, and the entropy is not
the small difference of two large numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowkernels.rows import Rows

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
WIDTH = 8
"""Elements per lane: 16 bytes of bf16, the widest load there is."""
_INF = tl.constexpr(float("inf"))
_FAR = tl.constexpr(-1000.0)  # exp2 of it is 0, and 0 times it is 0, which 0 times -inf is not


@dataclass(frozen=True, slots=True)
class Config:
    """Launch parameters: as many bytes in flight as registers hold without a spill on any target
    (`python -m bench.aot`).
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
    """For kernels that read a row once."""
    return (
        Config(1024, 8, None, 128) if logits_TV.element_size() == 2 else Config(512, 8, None, 128)
    )


def loss_config(logits_TV: Tensor) -> Config:
    """One row at a time on a multiprocessor, so that all rows at work (132 of 304 kB on an H200, V
    = 152k) fit L2 until they are read again.
    """
    return Config(2048, 16, 1, 128) if logits_TV.element_size() == 2 else Config(1024, 8, 1, 255)


@triton.jit
def _absorb(x, top, total, moment, scale):
    """Take the block x [LANES, WIDTH] into the running state [LANES]; `scale` = log2(e) /
    temperature.
    """
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
def _cap(x, softcap, HAS_SOFTCAP: tl.constexpr):
    """softcap * tanh(x / softcap), with tanh by exp, which every target has."""
    if HAS_SOFTCAP:
        x = softcap * (1.0 - 2.0 / (tl.exp(2.0 * x / softcap) + 1.0))
    return x


@triton.jit
def row_statistics(
    row_ptr,
    num_vocab,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """(top, log2 of sum 2^t, entropy in nats) of a row, with t = (x - top) * scale."""
    BLOCK: tl.constexpr = LANES * WIDTH
    columns = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    top = tl.full([LANES], -_INF, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    moment = tl.zeros([LANES], tl.float32)
    num_full = num_vocab // BLOCK * BLOCK
    for start in range(0, num_full, BLOCK):
        x = tl.load(row_ptr + start + columns, eviction_policy="evict_last").to(tl.float32)
        top, total, moment = _absorb(_cap(x, softcap, HAS_SOFTCAP), top, total, moment, scale)
    if num_full < num_vocab:
        is_in = num_full + columns < num_vocab
        x = tl.load(
            row_ptr + num_full + columns, mask=is_in, other=0.0, eviction_policy="evict_last"
        ).to(tl.float32)
        x = tl.where(is_in, _cap(x, softcap, HAS_SOFTCAP), -_INF)
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
def target_logit(row_ptr, target, num_vocab, softcap, HAS_SOFTCAP: tl.constexpr):
    """NaN for a target outside the vocabulary, so that a wrong id cannot go unseen."""
    x = tl.load(row_ptr + target, mask=(target >= 0) & (target < num_vocab), other=float("nan")).to(
        tl.float32
    )
    return _cap(x, softcap, HAS_SOFTCAP)


@triton.jit
def kept_statistics(
    row_ptr,
    ids_ptr,
    copy_ptr,
    begin,
    end,
    target,
    x_target,
    num_vocab,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(top, log2 of sum 2^t) over the kept ids and the target. Their logits are copied, because the
    gradient will overwrite them.
    """
    offsets = tl.arange(0, BLOCK)
    top = x_target
    has_target = 0
    for start in range(begin, end, BLOCK):
        is_in = start + offsets < end
        ids = tl.load(ids_ptr + start + offsets, mask=is_in, other=-1)
        x = tl.load(
            row_ptr + ids, mask=is_in & (ids >= 0) & (ids < num_vocab), other=float("nan")
        ).to(tl.float32)
        x = _cap(x, softcap, HAS_SOFTCAP)
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
def _uncap(g, x, softcap, HAS_SOFTCAP: tl.constexpr):
    """The gradient by the raw logit, from that by the capped logit x."""
    if HAS_SOFTCAP:
        g = g * (1.0 - (x / softcap) * (x / softcap))
    return g


@triton.jit
def _gradient(x, top, log2_total, entropy, a, c, scale, HAS_ENTROPY: tl.constexpr):
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
    row_ptr, out_ptr, num_vocab, target, top, log2_total, entropy, a, b, c, scale, softcap,
    HAS_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """From the end of the row to its beginning: what was read last is most likely still in cache."""
    BLOCK: tl.constexpr = LANES * WIDTH
    columns = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    target = target.to(tl.int32)  # a comparison of 64 bits per element would cost twice
    num_full = num_vocab // BLOCK * BLOCK
    if num_full < num_vocab:
        is_in = num_full + columns < num_vocab
        x = tl.load(
            row_ptr + num_full + columns, mask=is_in, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
        x = _cap(x, softcap, HAS_SOFTCAP)
        g = _gradient(x, top, log2_total, entropy, a, c, scale, HAS_ENTROPY)
        g = _uncap(tl.where(num_full + columns == target, g - b, g), x, softcap, HAS_SOFTCAP)
        tl.store(
            out_ptr + num_full + columns,
            g.to(out_ptr.dtype.element_ty),
            mask=is_in,
            eviction_policy="evict_first",
        )
    for back in range(BLOCK, num_full + BLOCK, BLOCK):
        start = num_full - back
        x = tl.load(row_ptr + start + columns, eviction_policy="evict_first").to(tl.float32)
        x = _cap(x, softcap, HAS_SOFTCAP)
        g = _gradient(x, top, log2_total, entropy, a, c, scale, HAS_ENTROPY)
        g = _uncap(tl.where(start + columns == target, g - b, g), x, softcap, HAS_SOFTCAP)
        tl.store(
            out_ptr + start + columns, g.to(out_ptr.dtype.element_ty), eviction_policy="evict_first"
        )


@triton.jit
def write_zeros(out_ptr, num_vocab, LANES: tl.constexpr, WIDTH: tl.constexpr):
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
def _write_kept_gradient(
    out_ptr, ids_ptr, copy_ptr, begin, end, target, x_target, num_vocab, top, log2_total, kept_top, kept_log2_total, entropy, a, c, scale,
    softcap,
    HAS_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Over the entropy's gradient, which the whole row has: that of the log-probability, on the
    kept ids and the target alone.
    """
    offsets = tl.arange(0, BLOCK)
    tl.debug_barrier()  # the row was written by other threads
    for start in range(begin, end, BLOCK):
        is_in = start + offsets < end
        ids = tl.load(ids_ptr + start + offsets, mask=is_in, other=0)
        x = tl.load(copy_ptr + start + offsets, mask=is_in, other=0.0)
        g = _gradient(x, kept_top, kept_log2_total, 0.0, a, 0.0, scale, False)
        if HAS_ENTROPY:
            g += _gradient(x, top, log2_total, entropy, 0.0, c, scale, True)
        g = _uncap(tl.where(ids == target, g - a, g), x, softcap, HAS_SOFTCAP)
        tl.store(
            out_ptr + ids,
            g.to(out_ptr.dtype.element_ty),
            mask=is_in & (ids >= 0) & (ids < num_vocab),
        )
    tl.debug_barrier()
    g = _gradient(x_target, kept_top, kept_log2_total, 0.0, a, 0.0, scale, False) - a
    if HAS_ENTROPY:
        g += _gradient(x_target, top, log2_total, entropy, 0.0, c, scale, True)
    g = _uncap(g, x_target, softcap, HAS_SOFTCAP)
    tl.store(
        out_ptr + target, g.to(out_ptr.dtype.element_ty), mask=(target >= 0) & (target < num_vocab)
    )


@triton.jit
def backward_row(
    row_ptr, out_ptr, ids_ptr, copy_ptr, begin, end, target, x_target, num_vocab, top, log2_total, kept_top, kept_log2_total, entropy,
    a, c, scale, softcap, HAS_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_KEPT: tl.constexpr,
    LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradient of a row: a weighs the log-probability, c the entropy. Rows that have none are
    written without being read.
    """
    if (a == 0.0) & (c == 0.0):
        write_zeros(out_ptr, num_vocab, LANES, WIDTH)
    else:
        a_row = a
        if HAS_KEPT:
            a_row = tl.where(end > begin, 0.0, a)
        _write_gradient(
            row_ptr, out_ptr, num_vocab, target, top, log2_total, entropy, a_row, a_row, c, scale, softcap,
            HAS_ENTROPY, HAS_SOFTCAP, LANES, WIDTH,
        )  # fmt: skip
        if HAS_KEPT:
            if end > begin:
                _write_kept_gradient(
                    out_ptr, ids_ptr, copy_ptr, begin, end, target, x_target, num_vocab, top, log2_total, kept_top, kept_log2_total,
                    entropy, a, c, scale, softcap, HAS_ENTROPY, HAS_SOFTCAP, LANES,
                )  # fmt: skip


@triton.jit
def score_kernel(
    logits_ptr, targets_ptr, temperature_ptr, kept_ids_ptr, kept_offsets_ptr, kept_copy_ptr, score_ptr, state_ptr,
    num_rows, num_vocab, row_stride, temperature_stride, softcap,
    HAS_SOFTCAP: tl.constexpr, HAS_KEPT: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """score [3, T]: logp, entropy, lse. state [4, T]: see `rows.scores`."""
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        target = tl.load(targets_ptr + row)
        if target >= 0:
            row_ptr = logits_ptr + row * tl.cast(row_stride, tl.int64)
            temperature = tl.load(temperature_ptr + row * temperature_stride)
            scale = 1.0 / temperature * LOG2E
            top, log2_total, entropy = row_statistics(
                row_ptr, num_vocab, scale, softcap, HAS_SOFTCAP, LANES, WIDTH
            )
            x_target = target_logit(row_ptr, target, num_vocab, softcap, HAS_SOFTCAP)
            kept_top, kept_log2_total = top, log2_total
            if HAS_KEPT:
                begin, end = tl.load(kept_offsets_ptr + row), tl.load(kept_offsets_ptr + row + 1)
                if end > begin:
                    kept_top, kept_log2_total = kept_statistics(
                        row_ptr,
                        kept_ids_ptr,
                        kept_copy_ptr,
                        begin,
                        end,
                        target,
                        x_target,
                        num_vocab,
                        scale,
                        softcap,
                        HAS_SOFTCAP,
                        LANES,
                    )
            tl.store(score_ptr + row, ((x_target - kept_top) * scale - kept_log2_total) * LN2)
            tl.store(score_ptr + num_rows + row, entropy)
            tl.store(score_ptr + 2 * num_rows + row, top / temperature + log2_total * LN2)
            tl.store(state_ptr + row, top)
            tl.store(state_ptr + num_rows + row, log2_total * LN2)
            tl.store(state_ptr + 2 * num_rows + row, kept_top)
            tl.store(state_ptr + 3 * num_rows + row, kept_log2_total * LN2)
        else:
            for i in tl.static_range(3):
                tl.store(score_ptr + i * num_rows + row, 0.0)
            for i in tl.static_range(4):
                tl.store(state_ptr + i * num_rows + row, 0.0)


@triton.jit
def gradient_kernel(
    logits_ptr, out_ptr, targets_ptr, temperature_ptr, kept_ids_ptr, kept_offsets_ptr, kept_copy_ptr, state_ptr, entropy_ptr,
    dlogprob_ptr, dentropy_ptr, num_rows, num_vocab, row_stride, out_stride, temperature_stride, softcap,
    HAS_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_KEPT: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient with respect to the logits for any upstream gradient of logp and entropy; `out`
    may be the logits.
    """
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row_ptr = logits_ptr + row * tl.cast(row_stride, tl.int64)
        row_out_ptr = out_ptr + row * tl.cast(out_stride, tl.int64)
        target = tl.load(targets_ptr + row)
        temperature = tl.load(temperature_ptr + row * temperature_stride)
        scale = 1.0 / temperature * LOG2E
        a = tl.where(target >= 0, -tl.load(dlogprob_ptr + row) / temperature, 0.0)
        c = 0.0
        if HAS_ENTROPY:
            c = tl.where(target >= 0, -tl.load(dentropy_ptr + row) / temperature, 0.0)
        begin, end = tl.to_tensor(0).to(tl.int64), tl.to_tensor(0).to(tl.int64)
        x_target = 0.0
        top = tl.load(state_ptr + row)
        log2_total = tl.load(state_ptr + num_rows + row) * LOG2E
        kept_top = tl.load(state_ptr + 2 * num_rows + row)
        kept_log2_total = tl.load(state_ptr + 3 * num_rows + row) * LOG2E
        if HAS_KEPT:
            begin, end = tl.load(kept_offsets_ptr + row), tl.load(kept_offsets_ptr + row + 1)
            x_target = target_logit(row_ptr, target, num_vocab, softcap, HAS_SOFTCAP)
            if end > begin:
                kept_statistics(
                    row_ptr,
                    kept_ids_ptr,
                    kept_copy_ptr,
                    begin,
                    end,
                    target,
                    x_target,
                    num_vocab,
                    scale,
                    softcap,
                    HAS_SOFTCAP,
                    LANES,
                )
        backward_row(
            row_ptr, row_out_ptr, kept_ids_ptr, kept_copy_ptr, begin, end, target, x_target, num_vocab, top, log2_total, kept_top,
            kept_log2_total, tl.load(entropy_ptr + row), a, c, scale, softcap, HAS_ENTROPY, HAS_SOFTCAP, HAS_KEPT, LANES, WIDTH,
        )  # fmt: skip


def scores(rows: Rows) -> tuple[Tensor, Tensor]:
    """Launcher: ([3, T], [4, T]), see `rows.scores`."""
    logits_TV, num_rows = rows.logits_TV, len(rows.target_ids_T)
    score_3T = torch.empty(3, num_rows, device=logits_TV.device)
    state_4T = torch.empty(4, num_rows, device=logits_TV.device)
    if num_rows:
        config = score_config(logits_TV)
        score_kernel[grid(config, logits_TV)](
            logits_TV, rows.target_ids_T, rows.temperature_T, *kept_arguments(rows), score_3T, state_4T,
            num_rows, logits_TV.shape[1], logits_TV.stride(0), rows.temperature_T.stride(0), rows.softcap,
            HAS_SOFTCAP=rows.softcap > 0, HAS_KEPT=rows.sampling_mask is not None,
            **config.arguments(),
        )  # fmt: skip
    return score_3T, state_4T


def gradient(
    rows: Rows,
    entropy_T: Tensor,
    state_4T: Tensor,
    dlogprob_T: Tensor,
    dentropy_T: Tensor | None,
    out_TV: Tensor,
) -> None:
    """Launcher; `out_TV` may be the logits."""
    logits_TV, num_rows = rows.logits_TV, len(rows.target_ids_T)
    assert out_TV.stride(1) == 1 and all(
        x.is_contiguous() for x in (entropy_T, state_4T, dlogprob_T)
    )
    if num_rows:
        config = score_config(logits_TV)
        gradient_kernel[grid(config, logits_TV)](
            logits_TV, out_TV, rows.target_ids_T, rows.temperature_T, *kept_arguments(rows), state_4T, entropy_T,
            dlogprob_T, dentropy_T, num_rows, logits_TV.shape[1], logits_TV.stride(0), out_TV.stride(0), rows.temperature_T.stride(0),
            rows.softcap, HAS_ENTROPY=dentropy_T is not None, HAS_SOFTCAP=rows.softcap > 0, HAS_KEPT=rows.sampling_mask is not None,
            **config.arguments(),
        )  # fmt: skip


def kept_arguments(rows: Rows) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The kept ids, their offsets and room for a copy of their logits."""
    if rows.sampling_mask is None:
        return None, None, None
    return (
        rows.sampling_mask.token_ids_K,
        rows.sampling_mask.offsets_T1,
        torch.empty(len(rows.sampling_mask.token_ids_K), device=rows.logits_TV.device),
    )


def grid(config: Config, logits_TV: Tensor) -> tuple[int]:
    """One-dimensional, so that T is no launch limit."""
    num_rows = len(logits_TV)
    return (
        num_rows
        if config.rows_per_sm is None
        else min(num_rows, config.rows_per_sm * _num_sms(logits_TV.device)),
    )


@cache
def _num_sms(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )
