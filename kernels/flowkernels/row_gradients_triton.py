"""The gradient of a row of logits in Triton, with the arguments of `rows_triton.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from flowkernels.rows_triton import (
    LN2,
    ROUNDS,
    block_columns,
    capped,
    clamp_exponent,
    edge_columns,
    load_block,
    load_logits,
    row_body,
)


@triton.jit
def _softcap_gradient(g, x, softcap) -> tl.tensor:
    """Return the gradient by the raw logit, from that by the capped logit x."""
    if softcap is not None:
        tanh = x * (1.0 / softcap)
        g = g - g * (tanh * tanh)
    return g


@triton.jit
def _normalized(full) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (lse, entropy, factor) such that factor * 2^(x scale - lse) is the probability 2^(x
    scale - top - log2_total), for one instruction less, and log2 of it + H is x scale - lse +
    entropy: what the sum lse was rounded by is not lost.
    """
    top, log2_total, entropy = full
    # TwoSum (Knuth): `rounding` is exactly what the sum has lost.
    lse = top + log2_total
    rounded_total = lse - top
    rounding = (top - (lse - rounded_total)) + (log2_total - rounded_total)
    return lse, entropy - rounding * LN2, tl.exp2(-rounding)


@triton.jit
def _gradient(x, normalized, slopes, scale) -> tl.tensor:
    """Return p (a + d + c (log p + H)) without the target's term; the slopes are a + d and c, with
    the factor of `_normalized` in them.
    """
    lse, entropy, _ = normalized
    factor, c = slopes
    log2_p = x * scale - lse
    if c is not None:
        factor = factor + c * (clamp_exponent(log2_p) * LN2 + entropy)
    return tl.exp2(log2_p) * factor


@triton.jit
def _write_part(row, out_ptr, x, is_in, normalized, slopes) -> None:
    """Write the gradient where the logits x were read."""
    x = capped(x, row.softcap)
    g = _softcap_gradient(_gradient(x, normalized, slopes, row.scale), x, row.softcap)
    g = g.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr, g, mask=is_in, eviction_policy="evict_first")


@triton.jit
def _write_block(
    row, ptr, out_ptr, limit, parts, normalized, slopes, LANES: tl.constexpr, WIDTH: tl.constexpr
) -> None:
    if parts is None:
        parts = load_block(ptr, limit, 0.0, POLICY="evict_first", LANES=LANES, WIDTH=WIDTH)
    for i in tl.static_range(ROUNDS):
        columns = block_columns(LANES, WIDTH) + i * LANES * WIDTH
        if limit is None:
            _write_part(row, out_ptr + columns, parts[i], None, normalized, slopes)
        else:
            _write_part(row, out_ptr + columns, parts[i], columns < limit, normalized, slopes)


@triton.jit
def _write_gradient(
    row, out_ptr, full, slopes, last_block, ALIGNMENT: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient of a row but for the target's own term. Goes from the end of the row to
    its beginning: cache most likely holds what was read last, and registers its last block, unless
    `last_block` is None.
    """
    row_ptr, num_vocab = row.ptr, row.num_vocab
    BLOCK: tl.constexpr = ROUNDS * LANES * WIDTH
    normalized = _normalized(full)
    factor, c = slopes
    slopes = (factor * normalized[2], None)
    if c is not None:
        slopes = (factor * normalized[2], c * normalized[2])
    begin, size = row_body(row_ptr, num_vocab, ALIGNMENT, WIDTH)
    body_ptr = tl.multiple_of(row_ptr + begin, 16)
    body_out_ptr = out_ptr + begin
    if ALIGNMENT != "apart":
        body_out_ptr = tl.multiple_of(body_out_ptr, 16)
    num_full = (size - 1) // BLOCK * BLOCK
    if ALIGNMENT != "whole":
        columns = edge_columns(begin, size, LANES)
        is_in = tl.arange(0, LANES) < num_vocab - size
        x = load_logits(row_ptr + columns, is_in, 0.0, POLICY="evict_first")
        _write_part(row, out_ptr + columns, x, is_in, normalized, slopes)
    _write_block(
        row, body_ptr + num_full, body_out_ptr + num_full, limit=size - num_full, parts=last_block,
        normalized=normalized, slopes=slopes, LANES=LANES, WIDTH=WIDTH,
    )  # fmt: skip
    for back in range(BLOCK, num_full + BLOCK, BLOCK):
        start = num_full - back
        _write_block(
            row, body_ptr + start, body_out_ptr + start, limit=None, parts=None,
            normalized=normalized, slopes=slopes, LANES=LANES, WIDTH=WIDTH,
        )  # fmt: skip


@triton.jit
def write_zeros(
    out_ptr, num_vocab, ALIGNMENT: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr
) -> None:
    PART: tl.constexpr = LANES * WIDTH
    columns = block_columns(LANES, WIDTH)
    begin, size = row_body(out_ptr, num_vocab, ALIGNMENT, WIDTH)
    body_ptr = tl.multiple_of(out_ptr + begin, 16)
    block = tl.zeros([LANES, WIDTH], out_ptr.dtype.element_ty)
    for start in range(0, size, PART):
        is_in = start + columns < size
        tl.store(body_ptr + start + columns, block, mask=is_in, eviction_policy="evict_first")
    if ALIGNMENT != "whole":
        is_in = tl.arange(0, LANES) < num_vocab - size
        zeros = tl.zeros([LANES], out_ptr.dtype.element_ty)
        tl.store(out_ptr + edge_columns(begin, size, LANES), zeros, mask=is_in)


@triton.jit
def _write_tokens(row, out_ptr, ids, is_in, x, is_target, scored, slopes) -> None:
    """Write the gradient of the log-probability, which the mask's ids and the target alone have,
    over that of the entropy and of the log-sum-exp, which the whole row has.
    """
    a, c, d = slopes
    scale, masked = row.scale, scored.masked
    g = a * tl.exp2((x * scale - masked.top) - masked.log2_total)
    if is_target:
        g -= a
    normalized = _normalized(scored.full)
    if c is not None:
        g += _gradient(x, normalized, (0.0, c * normalized[2]), scale)
    if d is not None:
        g += _gradient(x, normalized, (d * normalized[2], None), scale)
    g = _softcap_gradient(g, x, row.softcap)
    is_in = is_in & (ids >= 0) & (ids < row.num_vocab)
    tl.store(out_ptr + ids, g.to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def backward_row(
    row, out_ptr, target, scored, mask, slopes, last_block, ALIGNMENT: tl.constexpr,
    LANES: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient of a row. Rows that have none are written without being read. Elements
    that differ from the rest of the row are overwritten at the end, the target last, because a mask
    may contain it too.
    """
    a, c, d = slopes
    tl.debug_barrier()  # in place, other threads may still read the target's logit
    is_zero = a == 0.0
    if c is not None:
        is_zero = is_zero & (c == 0.0)
    if d is not None:
        is_zero = is_zero & (d == 0.0)
    if is_zero:
        write_zeros(out_ptr, row.num_vocab, ALIGNMENT, LANES=LANES, WIDTH=WIDTH)
    else:
        factor = a
        if mask.ids is not None:  # then its ids alone have a gradient by the log-prob
            factor = tl.where(scored.end > scored.begin, 0.0, a)
        if d is not None:
            factor += d
        _write_gradient(
            row, out_ptr, scored.full, slopes=(factor, c), last_block=last_block,
            ALIGNMENT=ALIGNMENT, LANES=LANES, WIDTH=WIDTH,
        )  # fmt: skip
        tl.debug_barrier()  # the row was written by other threads
        if mask.ids is not None:
            offsets = tl.arange(0, LANES)
            for start in range(scored.begin, scored.end, LANES):
                is_in = start + offsets < scored.end
                ids = tl.load(mask.ids + start + offsets, mask=is_in, other=0)
                x = tl.load(mask.copies + start + offsets, mask=is_in, other=0.0)
                _write_tokens(
                    row, out_ptr, ids, is_in=is_in, x=x, is_target=False, scored=scored,
                    slopes=slopes,
                )  # fmt: skip
            tl.debug_barrier()  # or a target that the mask names keeps the gradient of its id
        _write_tokens(
            row, out_ptr, target, is_in=True, x=scored.x_target, is_target=True, scored=scored,
            slopes=slopes,
        )  # fmt: skip
