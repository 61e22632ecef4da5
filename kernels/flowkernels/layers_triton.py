"""The kernels of `layers.py` in Triton. None contracts a product and a sum, which torch takes in
two steps.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowkernels.implementations import warps
from flowkernels.layers import Gradients, Pair, Saved

GATED: dict[str, Any] = {"BLOCK": 2048, "num_warps": warps(128), "enable_fp_fusion": False}
_TILE = 4096
"""Elements that a program of a norm has in hand, where a row is no longer."""
GRADIENT_PER_WARP = 512
"""So many of these let two programs of its gradient on a multiprocessor."""
_PROGRAMS_PER_SM = 2
_INTERPRETED_PROGRAMS = 3


@triton.jit
def _block(first_row, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tuple:
    """Return a block's (offsets in a tensor of these rows, rows, columns, which are in it)."""
    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    is_in = (row < num_rows) & (column < num_columns)
    return row * num_columns + column, row, column, is_in


@triton.jit
def _load(ptr, is_in) -> tl.tensor:
    return tl.load(ptr, mask=is_in, other=0.0).to(tl.float32)


@triton.jit
def _rounded(x, ptr) -> tl.tensor:
    """Round to the dtype of the memory behind the pointer."""
    return x.to(ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _scale(scale_ptr, num_columns, FORM: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    column = tl.arange(0, COLUMNS)[None, :]
    weight = _load(scale_ptr + column, column < num_columns)
    return weight + 1.0 if FORM == "gemma" else weight


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    hidden_ptr, scale_ptr, out_ptr, r_ptr, num_rows, num_columns, eps, FORM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Normalise a block of rows."""
    first_row = tl.program_id(0) * ROWS
    offset, row, _, is_in = _block(first_row, num_rows, num_columns, ROWS, COLUMNS)
    x, scale = _load(hidden_ptr + offset, is_in), _scale(scale_ptr, num_columns, FORM, COLUMNS)
    r = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / num_columns + eps)
    normed = _rounded(x * r, out_ptr) if FORM == "llama" else x * r
    tl.store(out_ptr + offset, normed * scale, mask=is_in)
    tl.store(r_ptr + row, r, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def norm_gradient_kernel(
    hidden_ptr, scale_ptr, r_ptr, dout_ptr, dhidden_ptr, dweight_ptr, num_rows, num_columns,
    FORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Write dhidden, and this program's part of dweight [P, D] if there is one; a program takes
    every P-th block.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    scale = _scale(scale_ptr, num_columns, FORM, COLUMNS)
    # Summed over all rows of the program: few parts are left, to be added in a fixed order.
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first_row in range(program * ROWS, num_rows, num_programs * ROWS):
        offset, row, _, is_in = _block(first_row, num_rows, num_columns, ROWS, COLUMNS)
        x, dout = _load(hidden_ptr + offset, is_in), _load(dout_ptr + offset, is_in)
        r = _load(r_ptr + row, row < num_rows)
        normed, slope = x * r, dout * scale
        mean = tl.sum(slope * normed, axis=1, keep_dims=True) / num_columns
        tl.store(dhidden_ptr + offset, r * (slope - normed * mean), mask=is_in)
        if dweight_ptr is not None:
            dweight += dout * (_rounded(normed, hidden_ptr) if FORM == "llama" else normed)
    if dweight_ptr is not None:
        offset, _, _, is_in = _block(program, program + 1, num_columns, 1, COLUMNS)
        tl.store(dweight_ptr + offset, tl.sum(dweight, axis=0, keep_dims=True), mask=is_in)


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, tables, table_ptr, num_heads, size, HEADS: tl.constexpr, HALF: tl.constexpr
) -> None:
    """Rotate all heads of one position."""
    cos_a, cos_b, sin_a, sin_b = tables
    half = size // 2
    _, head, pair, is_in = _block(0, num_heads, half, HEADS, HALF)
    offset = (tl.program_id(0).to(tl.int64) * num_heads + head) * size + pair
    a, b = _load(x_ptr + offset, is_in), _load(x_ptr + offset + half, is_in)
    # Products are rounded to the dtype of the tables, and then their sum.
    new_a = _rounded(a * cos_a, table_ptr) - _rounded(b * sin_a, table_ptr)
    new_b = _rounded(b * cos_b, table_ptr) + _rounded(a * sin_b, table_ptr)
    tl.store(out_ptr + offset, _rounded(new_a, table_ptr), mask=is_in)
    tl.store(out_ptr + offset + half, _rounded(new_b, table_ptr), mask=is_in)


@triton.jit
def rotary_kernel(
    query_ptr, query_out_ptr, key_ptr, key_out_ptr, cos_ptr, sin_ptr, num_query_heads,
    num_key_heads, size, INVERSE: tl.constexpr, QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate queries and keys [positions, heads, size] of one position."""
    pair, half = tl.arange(0, HALF)[None, :], size // 2
    is_pair, offset = pair < half, tl.program_id(0).to(tl.int64) * size + pair
    cos_a, cos_b = _load(cos_ptr + offset, is_pair), _load(cos_ptr + offset + half, is_pair)
    sin_a, sin_b = _load(sin_ptr + offset, is_pair), _load(sin_ptr + offset + half, is_pair)
    if INVERSE:  # the transpose, also where the halves of a table differ
        sin_a, sin_b = -sin_b, -sin_a
    tables = (cos_a, cos_b, sin_a, sin_b)
    _rotate_heads(
        query_ptr, query_out_ptr, tables, cos_ptr, num_query_heads, size, QUERY_HEADS, HALF
    )
    _rotate_heads(key_ptr, key_out_ptr, tables, cos_ptr, num_key_heads, size, KEY_HEADS, HALF)


@triton.jit
def gated_kernel(
    gate_ptr, up_ptr, out_ptr, dout_ptr, dgate_ptr, dup_ptr, num_columns, gate_stride, up_stride,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write silu(gate) * up of a block of a row, its gradients, or both: what there is room for."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in, offset = column < num_columns, row * num_columns + column
    gate = _load(gate_ptr + row * gate_stride + column, is_in)
    up = _load(up_ptr + row * up_stride + column, is_in)
    total = 1.0 + tl.exp(-gate)
    silu = _rounded(gate / total, gate_ptr)
    if out_ptr is not None:
        tl.store(out_ptr + offset, silu * up, mask=is_in)
    if dout_ptr is not None:
        dout, sigmoid = _load(dout_ptr + offset, is_in), 1.0 / total
        tl.store(dup_ptr + offset, dout * silu, mask=is_in)
        # silu'(x) = p (1 + x (1 - p)) with p = sigmoid(x).
        dgate = dout * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(dgate_ptr + offset, dgate, mask=is_in)


def norm_launch(num_columns: int, per_warp: int = 1024) -> dict[str, Any]:
    """Let a program take whole rows, several of them where they are short; `per_warp`: elements."""
    columns = triton.next_power_of_2(num_columns)
    rows = max(1, _TILE // columns)
    num_warps = warps(32 * min(32, rows * columns // per_warp))
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": num_warps, "enable_fp_fusion": False}


def norm(hidden: Tensor, weight_D: Tensor, eps: float, form: str) -> Pair:
    """Launcher, see `layers.norm`."""
    hidden, num_columns, launch = hidden.contiguous(), len(weight_D), norm_launch(len(weight_D))
    out = torch.empty_like(hidden)
    r = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
    if num_rows := r.numel():
        tensors = (hidden, weight_D.contiguous(), out, r)
        grid = (triton.cdiv(num_rows, launch["ROWS"]),)
        norm_kernel[grid](*tensors, num_rows, num_columns, eps, FORM=form, **launch)
    return out, r


def norm_gradient(saved: Saved, dout: Tensor, form: str, needs_weight: bool) -> Gradients:
    """Launcher, see `layers.norm_gradient`."""
    hidden, weight_D, r, dout = (x.contiguous() for x in (*saved, dout))
    num_rows, num_columns, dhidden = r.numel(), len(weight_D), torch.empty_like(hidden)
    launch = norm_launch(num_columns, GRADIENT_PER_WARP)
    num_programs = _INTERPRETED_PROGRAMS
    if hidden.is_cuda:
        device = torch.cuda.get_device_properties(hidden.device)
        num_programs = _PROGRAMS_PER_SM * device.multi_processor_count
    num_programs = min(triton.cdiv(num_rows, launch["ROWS"]), num_programs)
    part_PD = r.new_empty(num_programs, num_columns) if needs_weight else None
    if num_rows:
        tensors = (hidden, weight_D, r, dout, dhidden, part_PD)
        norm_gradient_kernel[(num_programs,)](*tensors, num_rows, num_columns, FORM=form, **launch)
    return dhidden, None if part_PD is None else part_PD.sum(0).to(weight_D.dtype)


def rotary_launch(num_query_heads: int, num_key_heads: int, size: int) -> dict[str, Any]:
    """Let a program take all heads of a position."""
    names = ("QUERY_HEADS", "KEY_HEADS", "HALF")
    sizes = (num_query_heads, num_key_heads, size // 2)
    blocks = {name: triton.next_power_of_2(x) for name, x in zip(names, sizes, strict=True)}
    num_warps = min(8, max(1, blocks["QUERY_HEADS"] * blocks["HALF"] // 256))
    return {**blocks, "num_warps": warps(32 * num_warps), "enable_fp_fusion": False}


def rotate(heads: Pair, tables: Pair, inverse: bool) -> Pair:
    """Launcher, see `layers.rotate`."""
    # As they come from a linear layer, and come back.
    query, key = (x.transpose(1, 2).contiguous() for x in heads)
    query_out, key_out = torch.empty_like(query), torch.empty_like(key)
    num_batch, num_positions, *sizes = *query.shape[:3], *key.shape[2:]
    cos, sin = (x.expand(num_batch, -1, -1).contiguous() for x in tables)
    if query.numel():
        tensors = (query, query_out, key, key_out, cos, sin)
        launch = {"INVERSE": inverse, **rotary_launch(*sizes)}
        rotary_kernel[(num_batch * num_positions,)](*tensors, *sizes, **launch)
    return query_out.transpose(1, 2), key_out.transpose(1, 2)


def gated(gate: Tensor, up: Tensor, dout: Tensor | None, needs_out: bool) -> Gradients:
    """Launcher, see `layers.gated`."""
    needed = (needs_out, dout is not None, dout is not None)
    empty = functools.partial(torch.empty_like, gate, memory_format=torch.contiguous_format)
    out, dgate, dup = results = [empty() if is_needed else None for is_needed in needed]
    rows = (x.flatten(0, -2) for x in (gate, up))
    gate_TF, up_TF = (x if x.stride(1) == 1 else x.contiguous() for x in rows)
    if gate.numel():
        num_rows, num_columns = gate_TF.shape
        tensors = (gate_TF, up_TF, out, None if dout is None else dout.contiguous(), dgate, dup)
        grid = (num_rows, triton.cdiv(num_columns, GATED["BLOCK"]))
        gated_kernel[grid](*tensors, num_columns, gate_TF.stride(0), up_TF.stride(0), **GATED)
    return results
