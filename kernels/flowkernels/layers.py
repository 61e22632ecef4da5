"""Layers of a decoder whose backward pass needs their inputs alone: RMSNorm, rotary embedding and
SwiGLU. Results are rounded where transformers' modules round them.

Maths. RMSNorm (arXiv 1910.07467): r = (mean x^2 + eps)^(-1/2), y = w x r; with g = w dy, dx = r (g
- x r^2 mean(g x)) and dw = sum_T dy x r. Rotary embedding (arXiv 2104.09864): (a, b) -> (a cos - b
sin, b cos + a sin) for the halves of a head; its gradient is turned by the negative angle. SwiGLU
(arXiv 2002.05202): s(gate) up with s(x) = x p, p = sigmoid(x), s'(x) = p (1 + x (1 - p)). Bytes per
element of 16 bits, forward and backward: 4 and 6; 4 and 4; 6 and 10, or 12 with its product once
more. Functions and sums are fp32. T: rows, D: their size, B: batch, H: heads, N: positions, F: size
of the MLP.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flowkernels.arguments import check_tokens
from flowkernels.implementations import resolve_impl, with_launcher
from flowkernels.plain_tensors import flat_rows

FORMS = ("llama", "olmo2", "gemma")
"""Of RMSNorm. The normalised x is rounded before it is weighted (llama) or after; gemma's weight is
1 + w."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Saved = tuple[Tensor, Tensor, Tensor]
Gradients = Any
"""A tuple of tensors, and None where no gradient is asked for."""
_KERNELS = "flowkernels.layers_triton"


@with_launcher(_KERNELS)
def norm(hidden_TD: Tensor, weight_D: Tensor, eps: float, form: str) -> tuple[Tensor, Tensor]:
    """(output, r [T] in fp32)"""
    x_TD = hidden_TD.float()
    r_T1 = torch.rsqrt(x_TD.pow(2).mean(-1, keepdim=True) + eps)
    scale_D = _scale(weight_D, form)
    return ((x_TD * r_T1).to(scale_D.dtype) * scale_D).to(hidden_TD.dtype), r_T1[:, 0]


@with_launcher(_KERNELS)
def norm_gradient(saved: Saved, dout_TD: Tensor, form: str, needs_weight: bool) -> Gradients:
    """(dhidden, dweight), by the steps that autograd takes; saved: hidden, weight and r."""
    hidden_TD, weight_D, r_T = saved
    x_TD, r_T1, scale_D, dweight_D = hidden_TD.float(), r_T[:, None], _scale(weight_D, form), None
    dout_TD = dout_TD.to(scale_D.dtype)
    if needs_weight:
        normed_TD = (x_TD * r_T1).to(scale_D.dtype)
        dweight_D = normed_TD.mul_(dout_TD).sum(0).to(weight_D.dtype)
    slope_TD = (dout_TD * scale_D).float()
    variance_T1 = -0.5 * (slope_TD * x_TD).sum(-1, keepdim=True) * r_T1.pow(3) / x_TD.shape[1]
    return (slope_TD * r_T1).add_(x_TD * (2 * variance_T1)).to(hidden_TD.dtype), dweight_D


def _scale(weight_D: Tensor, form: str) -> Tensor:
    """What multiplies the normalised x, in the dtype in which it does."""
    if form == "llama":
        return weight_D
    return weight_D.float() + 1 if form == "gemma" else weight_D.float()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_D: Tensor, eps: float, *how: str) -> Tensor:
        ctx.form, ctx.impl = how
        out_TD, r_T = norm(ctx.impl, hidden, weight_D, eps, ctx.form)
        ctx.save_for_backward(hidden, weight_D, r_T)
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: Tensor) -> Gradients:
        needs_weight = ctx.needs_input_grad[1]
        found = norm_gradient(ctx.impl, ctx.saved_tensors, dout_TD, ctx.form, needs_weight)
        return *found, None, None, None


def rms_norm(
    hidden: Tensor, weight_D: Tensor, eps: float, *, form: str = "llama", impl: str = "auto"
) -> Tensor:
    """Normalise rows by their root mean square, and weight them; saves `hidden` and r.

    Args:
        hidden: [..., D] fp32, bf16 or fp16.
        weight_D: [D] of the same dtype. Its gradient is summed in a fixed order.
        eps: added to the mean square.
        form: one of `FORMS`.
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    check_tokens("hidden", hidden, hidden.shape, DTYPES, hidden.device)
    check_tokens("weight_D", weight_D, hidden.shape[-1:], (hidden.dtype,), hidden.device)
    if form not in FORMS:
        raise ValueError(f"form={form!r} must be one of {', '.join(map(repr, FORMS))}")
    impl = resolve_impl(impl, hidden.device)
    out_TD: Tensor = _RMSNorm.apply(flat_rows("hidden", hidden), weight_D, eps, form, impl)
    return out_TD.view(hidden.shape)


@with_launcher(_KERNELS)
def rotate(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, inverse: bool
) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys; inverse: gradients of these, back."""
    half, cos, sin = cos.shape[-1] // 2, cos[:, None], sin[:, None]
    to_second, to_first = sin[..., half:], -sin[..., :half]
    if inverse:
        to_first, to_second = to_second, to_first

    def rotated(x: Tensor) -> Tensor:
        out = x * cos
        out[..., :half].add_(x[..., half:] * to_first)
        out[..., half:].add_(x[..., :half] * to_second)
        return out.to(x.dtype)

    return rotated(query), rotated(key)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, *tables_and_impl: Any) -> Any:
        cos, sin, ctx.impl = tables_and_impl
        ctx.save_for_backward(cos, sin)
        return rotate(ctx.impl, query, key, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dquery: Tensor, dkey: Tensor) -> Gradients:
        cos, sin = ctx.saved_tensors
        return *rotate(ctx.impl, dquery, dkey, cos, sin, True), None, None, None


def rotary(
    query_BHND: Tensor, key_BHND: Tensor, cos_BNR: Tensor, sin_BNR: Tensor, *, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Rotate the first R numbers of each head by the angles of its position; saves cos and sin.

    Args:
        query_BHND: [B, H, N, D] fp32, bf16 or fp16, however it lies in memory.
        key_BHND: the same with any number of heads.
        cos_BNR: [B or 1, N, R] of the same dtype, or fp32: products are rounded to it. No gradient.
            R is even.
        sin_BNR: the same.
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    num_batch, _, num_positions, size = query_BHND.shape
    dtype, device, part = query_BHND.dtype, query_BHND.device, cos_BNR.shape[-1]
    check_tokens("query_BHND", query_BHND, query_BHND.shape, DTYPES, device)
    shape: tuple[int, ...] = (num_batch, key_BHND.shape[1], num_positions, size)
    check_tokens("key_BHND", key_BHND, shape, (dtype,), device)
    shape = (1 if len(cos_BNR) == 1 else num_batch, num_positions, min(part // 2 * 2, size))
    check_tokens("cos_BNR", cos_BNR, shape, (dtype, torch.float32), device)
    check_tokens("sin_BNR", sin_BNR, shape, (cos_BNR.dtype,), device)
    impl = resolve_impl(impl, device)
    heads = (query_BHND, key_BHND)
    query, key = heads if part == size else (x[..., :part] for x in heads)
    query, key = _Rotary.apply(query, key, cos_BNR, sin_BNR, impl)
    if part == size:
        return query, key
    return torch.cat([query, query_BHND[..., part:]], -1), torch.cat(
        [key, key_BHND[..., part:]], -1
    )


@with_launcher(_KERNELS)
def gated(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) * up"""
    return F.silu(gate_TF).mul_(up_TF)


@with_launcher(_KERNELS)
def gated_gradient(gate: Tensor, up: Tensor, dout: Tensor, needs_out: bool) -> Gradients:
    """(dgate, dup, silu(gate) * up once more)"""
    silu_TF = F.silu(gate)
    out_TF = silu_TF * up if needs_out else None
    return torch.ops.aten.silu_backward(dout * up, gate), silu_TF.mul_(dout), out_TF


class _SwiGLU(torch.autograd.Function):
    """With a weight, a linear layer behind it, whose input is not saved either."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight_DF: Tensor | None, impl: str) -> Tensor:
        ctx.save_for_backward(gate, up, weight_DF)
        ctx.impl = impl
        out_TF = gated(impl, gate, up)
        return out_TF if weight_DF is None else out_TF @ weight_DF.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Gradients:
        gate, up, weight_DF = ctx.saved_tensors
        needs_out = ctx.needs_input_grad[2]
        dout_TF = dout if weight_DF is None else dout @ weight_DF
        dgate, dup, out_TF = gated_gradient(ctx.impl, gate, up, dout_TF, needs_out)
        return dgate, dup, dout.t() @ out_TF if needs_out else None, None


def swiglu(
    gate: Tensor, up: Tensor, weight_DF: Tensor | None = None, *, impl: str = "auto"
) -> Tensor:
    """Return silu(gate) * up, or that times weight^T; saves these arguments alone.

    Args:
        gate: [..., F] fp32, bf16 or fp16; rows may lie apart, as halves of one tensor do.
        up: the same.
        weight_DF: [D, F] of the same dtype; the result is [..., D] then.
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    num_columns, like = gate.shape[-1], ((gate.dtype,), gate.device)
    check_tokens("gate", gate, gate.shape, DTYPES, gate.device)
    check_tokens("up", up, gate.shape, *like)
    if weight_DF is not None:
        check_tokens("weight_DF", weight_DF, (len(weight_DF), num_columns), *like)
    rows = [x.reshape(math.prod(gate.shape[:-1]), num_columns) for x in (gate, up)]
    out: Tensor = _SwiGLU.apply(*rows, weight_DF, resolve_impl(impl, gate.device))
    return out.view(*gate.shape[:-1], out.shape[-1])
