"""Decoder layers that save only their inputs for the backward pass: RMSNorm, rotary embedding and
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

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flowkernels.arguments import check_tokens
from flowkernels.implementations import resolve_impl, with_launcher

FORMS = ("llama", "olmo2", "gemma")
"""The forms of RMSNorm. The normalised x is rounded before it is weighted (llama) or after; gemma's
weight is 1 + w."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Pair = tuple[Tensor, Tensor]
Saved = tuple[Tensor, Tensor, Tensor]
Gradients = Any
"""A tuple of tensors, and None where no gradient is asked for."""
_KERNELS = "flowkernels.layers_triton"


@with_launcher(_KERNELS)
def norm(hidden: Tensor, weight_D: Tensor, eps: float, form: str) -> Pair:
    """Return (output, r [..., 1] in fp32)."""
    x = hidden.float()
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    scale_D = _scale(weight_D, form)
    return ((x * r).to(scale_D.dtype) * scale_D).to(hidden.dtype), r


@with_launcher(_KERNELS)
def norm_gradient(saved: Saved, dout: Tensor, form: str, needs_weight: bool) -> Gradients:
    """Return (dhidden, dweight), by the steps that autograd takes; saved: hidden, weight and r."""
    hidden, weight_D, r = saved
    x, scale_D, dweight_D = hidden.float(), _scale(weight_D, form), None
    dout = dout.to(scale_D.dtype)
    if needs_weight:
        row_dweight = (x * r).to(scale_D.dtype).mul_(dout)
        dweight_D = row_dweight.flatten(0, -2).sum(0).to(weight_D.dtype)
    slope = (dout * scale_D).float()
    mean = (slope * x).sum(-1, keepdim=True) * r.pow(3) / x.shape[-1]
    return (slope * r).sub_(x * mean).to(hidden.dtype), dweight_D


def _scale(weight_D: Tensor, form: str) -> Tensor:
    """Return the factor of the normalised x, in the dtype of their product."""
    if form == "llama":
        return weight_D
    return weight_D.float() + 1 if form == "gemma" else weight_D.float()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_D: Tensor, eps: float, *options: str) -> Tensor:
        ctx.form, ctx.impl = options
        out, r = norm(ctx.impl, hidden, weight_D, eps, ctx.form)
        ctx.save_for_backward(hidden, weight_D, r)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Gradients:
        needs_weight = ctx.needs_input_grad[1]
        gradients = norm_gradient(ctx.impl, ctx.saved_tensors, dout, ctx.form, needs_weight)
        return *gradients, None, None, None


def rms_norm(
    hidden: Tensor, weight_D: Tensor, eps: float, *, form: str = "llama", impl: str = "auto"
) -> Tensor:
    """Return rows divided by their root mean square and multiplied by the weight; saves `hidden`
    and r for the backward pass.

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
    out: Tensor = _RMSNorm.apply(hidden, weight_D, eps, form, resolve_impl(impl, hidden.device))
    return out


@with_launcher(_KERNELS)
def rotate(heads: Pair, tables: Pair, inverse: bool) -> Pair:
    """Return rotated queries and keys; inverse: gradients of these, back. tables: cos and sin."""
    half, (cos, sin) = tables[0].shape[-1] // 2, (x[:, None] for x in tables)
    to_second, to_first = sin[..., half:], -sin[..., :half]
    if inverse:
        to_first, to_second = to_second, to_first

    def rotated(x: Tensor) -> Tensor:
        out = x * cos
        out[..., :half].add_(x[..., half:] * to_first)
        out[..., half:].add_(x[..., :half] * to_second)
        return out.to(x.dtype)

    return rotated(heads[0]), rotated(heads[1])


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, impl: str) -> Pair:
        ctx.save_for_backward(cos, sin)
        ctx.impl = impl
        return rotate(impl, (query, key), (cos, sin), False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dquery: Tensor, dkey: Tensor) -> Gradients:
        return *rotate(ctx.impl, (dquery, dkey), ctx.saved_tensors, True), None, None, None


def rotary(
    query_BHND: Tensor, key_BHND: Tensor, cos_BNR: Tensor, sin_BNR: Tensor, *, impl: str = "auto"
) -> Pair:
    """Return queries and keys with the first R numbers of each head rotated by the angles of its
    position; saves cos and sin for the backward pass.

    Args:
        query_BHND: [B, H, N, D] fp32, bf16 or fp16, of any memory layout.
        key_BHND: the same with any number of heads.
        cos_BNR: [B or 1, N, R] of the same dtype, or fp32, to which products are then rounded. No
            gradient. R is even.
        sin_BNR: the same.
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    num_batch, _, num_positions, size = query_BHND.shape
    dtype, device, num_rotated = query_BHND.dtype, query_BHND.device, cos_BNR.shape[-1]
    check_tokens("query_BHND", query_BHND, query_BHND.shape, DTYPES, device)
    shape: tuple[int, ...] = (num_batch, key_BHND.shape[1], num_positions, size)
    check_tokens("key_BHND", key_BHND, shape, (dtype,), device)
    shape = (1 if len(cos_BNR) == 1 else num_batch, num_positions, min(num_rotated // 2 * 2, size))
    check_tokens("cos_BNR", cos_BNR, shape, (dtype, torch.float32), device)
    check_tokens("sin_BNR", sin_BNR, shape, (cos_BNR.dtype,), device)
    impl = resolve_impl(impl, device)
    heads = (query_BHND, key_BHND)
    query, key = heads if num_rotated == size else (x[..., :num_rotated] for x in heads)
    query, key = _Rotary.apply(query, key, cos_BNR, sin_BNR, impl)
    if num_rotated == size:
        return query, key
    return torch.cat([query, query_BHND[..., num_rotated:]], -1), torch.cat(
        [key, key_BHND[..., num_rotated:]], -1
    )


@with_launcher(_KERNELS)
def gated(gate: Tensor, up: Tensor, dout: Tensor | None, needs_out: bool) -> Gradients:
    """Return (silu(gate) * up, and its gradients by both), as far as they are asked for."""
    silu = F.silu(gate)
    if dout is None:
        return silu.mul_(up), None, None
    out = silu * up if needs_out else None
    return out, torch.ops.aten.silu_backward.default(dout * up, gate), silu.mul_(dout)


class _SwiGLU(torch.autograd.Function):
    """SwiGLU; with a weight, a linear layer follows, whose input is not saved either."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight_DF: Tensor | None, impl: str) -> Tensor:
        ctx.save_for_backward(gate, up, weight_DF)
        ctx.impl = impl
        out: Tensor = gated(impl, gate, up, None, True)[0]
        return out if weight_DF is None else F.linear(out, weight_DF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Gradients:
        gate, up, weight_DF = ctx.saved_tensors
        needs_out = ctx.needs_input_grad[2]
        dproduct = dout if weight_DF is None else dout @ weight_DF
        # The input of the linear layer is computed again, for the gradient of its weight.
        out, *gradients = gated(ctx.impl, gate, up, dproduct, needs_out)
        dweight_DF = dout.flatten(0, -2).t() @ out.flatten(0, -2) if needs_out else None
        return *gradients, dweight_DF, None


def swiglu(
    gate: Tensor, up: Tensor, weight_DF: Tensor | None = None, *, impl: str = "auto"
) -> Tensor:
    """Return silu(gate) * up, or this product times weight^T; saves only these arguments for the
    backward pass.

    Args:
        gate: [..., F] fp32, bf16 or fp16; rows may be strided, as in halves of one tensor.
        up: the same.
        weight_DF: [D, F] of the same dtype; the result is then [..., D].
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    num_columns, form = gate.shape[-1], ((gate.dtype,), gate.device)
    check_tokens("gate", gate, gate.shape, DTYPES, gate.device)
    check_tokens("up", up, gate.shape, *form)
    if weight_DF is not None:
        check_tokens("weight_DF", weight_DF, (len(weight_DF), num_columns), *form)
    out: Tensor = _SwiGLU.apply(gate, up, weight_DF, resolve_impl(impl, gate.device))
    return out
