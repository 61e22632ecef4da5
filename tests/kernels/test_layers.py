"""RMSNorm, rotary embedding and SwiGLU: transformers' bits, and gradients against fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flowkernels import rms_norm, rotary, swiglu
from kernel_truth import device_of
from torch import Tensor

pytest.importorskip("transformers")
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

EPS = 1e-5
NORMS = {"llama": LlamaRMSNorm, "olmo2": Olmo2RMSNorm, "gemma": GemmaRMSNorm}
HEADS, KEYS = (2, 5, 14, 64), (2, 5, 2, 64)
SHAPES = {
    **{f"{f} {d}": ((t, d), (d,)) for f in NORMS for t, d in ((300, 64), (9, 896), (5, 3584))},
    "rotary": (HEADS, KEYS, (1, 5, 64), (1, 5, 64)),
    "half rotary": (HEADS, KEYS, (2, 5, 32), (2, 5, 32)),
    "swiglu": ((3, 4, 896), (3, 4, 896)),
    "swiglu, linear": ((9, 3584), (9, 3584), (64, 3584)),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Run = Callable[..., Any]


def layers(name: str, impl: str) -> tuple[Run, Run]:
    """Ours, and what transformers does; in fp64 that is the truth."""
    kind = name.split()[0]
    if kind in NORMS:
        return partial(rms_norm, eps=EPS, form=kind, impl=impl), partial(_norm, kind)
    if "rotary" in name:
        return partial(_rotary, impl), partial(_rotary, "")

    def plain(gate: Tensor, up: Tensor, *weight: Tensor) -> Tensor:
        return F.linear(F.silu(gate) * up, *weight) if weight else F.silu(gate) * up

    return partial(swiglu, impl=impl), plain


def _norm(form: str, hidden: Tensor, weight: Tensor) -> Tensor:
    if hidden.dtype == torch.float64:  # their modules compute in fp32
        normed = hidden / (hidden.square().mean(-1, keepdim=True) + EPS).sqrt()
        return normed * (weight + 1 if form == "gemma" else weight)
    return torch.func.functional_call(NORMS[form](len(weight), EPS), {"weight": weight}, hidden)


def _rotary(impl: str, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads come as a linear layer leaves them; `impl` "": transformers' function."""
    heads, part = (query.transpose(1, 2), key.transpose(1, 2)), cos.shape[-1]
    if impl:
        found = rotary(*heads, cos.detach(), sin.detach(), impl=impl)
    else:
        turned = apply_rotary_pos_emb(*(x[..., :part] for x in heads), cos.detach(), sin.detach())
        found = [torch.cat([t, x[..., part:]], -1) for t, x in zip(turned, heads, strict=True)]
    return torch.cat([x.flatten() for x in found])


def drawn(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32, impl: str = "torch"
) -> list[Tensor]:
    rng = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=rng).to(device_of(impl), dtype) for shape in shapes]


def results(run: Run, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What comes out, and the gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = run(*leaves)
    (dout,) = drawn([tuple(out.shape)], tensors[0].dtype)
    out.backward(dout.to(out))
    return [x.cpu() for x in (out.detach(), *(leaf.grad for leaf in leaves)) if x is not None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_values_are_those_of_transformers_and_gradients_as_exact(
    name: str, dtype: str, impl: str
) -> None:
    ours, theirs = layers(name, impl)
    tensors = drawn(SHAPES[name], DTYPES[dtype])
    found = results(ours, drawn(SHAPES[name], DTYPES[dtype], impl))
    rival = results(theirs, tensors)
    truth = results(theirs, [x.double() for x in tensors])
    if impl == "torch" or "rotary" in name:
        assert all(map(torch.equal, found[: None if dtype != "fp32" else 1], rival))
    elif dtype != "fp32":  # sums in another order, and exp to the last bit or not
        assert (found[0] != rival[0]).float().mean() < 2e-3
    for ours_x, their_x, true_x in zip(found, rival, truth, strict=True):
        assert ours_x.dtype == their_x.dtype
        error, baseline = ((x.double() - true_x).norm() for x in (ours_x, their_x))
        assert error <= 1.02 * baseline + 1e-7 * true_x.norm()


def test_wider_tables_keep_products_unrounded(impl: str) -> None:
    """As OLMo has it: bf16 heads, fp32 cosines."""
    heads = drawn(SHAPES["rotary"][:2], torch.bfloat16, impl)
    ours, theirs = (
        run(*heads, *drawn([(1, 5, 64)] * 2, impl=impl)) for run in layers("rotary", impl)
    )
    assert torch.equal(ours, theirs.bfloat16()) and ours.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["gemma 896", "half rotary", "swiglu", "swiglu, linear"])
def test_tensors_may_lie_in_memory_in_any_way(name: str, impl: str) -> None:
    """Between others, by halves, turned; and a gradient that is one number."""
    run, _ = layers(name, impl)
    tensors = drawn(SHAPES[name], impl=impl)
    spread = [torch.stack([x, x], -1)[..., 0] for x in tensors]
    halves = [torch.cat([x, x], -1)[..., : x.shape[-1]] for x in tensors]
    turned = [x.mT.contiguous().mT if x.dim() > 1 else x for x in tensors]
    whole = results(run, tensors)
    for others in (spread, halves, turned):
        # A library may sum in another order where the strides are others.
        for found, expected in zip(results(run, others), whole, strict=True):
            atol = 2e-6 * float(expected.abs().max())
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    leaf = tensors[0].clone().requires_grad_()
    out = run(leaf, *tensors[1:])
    out.sum().backward()
    (expected,) = torch.autograd.grad(run(leaf, *tensors[1:]), leaf, torch.ones_like(out))
    torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize("num", [0, 1])
def test_one_row_and_none(num: int, impl: str) -> None:
    for name, shapes in {
        "llama": [(num, 64), (64,)],
        "rotary": [(1, num, 3, 8), (1, num, 1, 8), (1, num, 8), (1, num, 8)],
        "swiglu, linear": [(num, 64), (num, 64), (5, 64)],
    }.items():
        ours, theirs = (results(run, drawn(shapes, impl=impl)) for run in layers(name, impl))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["llama 896", "rotary", "swiglu", "swiglu, linear"])
def test_only_inputs_are_saved(name: str, impl: str) -> None:
    tensors = [x.requires_grad_() for x in drawn(SHAPES[name], torch.bfloat16, impl)]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        layers(name, impl)[0](*tensors)
    known = {x.data_ptr() for x in (tensors[2:] if name == "rotary" else tensors)}
    others = {x.data_ptr(): x.nbytes for x in saved if x.data_ptr() not in known}
    assert sum(others.values()) == (4 * len(tensors[0]) if name == "llama 896" else 0)


@pytest.mark.parametrize("name", ["llama 896", "swiglu, linear"])
def test_a_frozen_weight_gets_no_gradient(name: str, impl: str) -> None:
    first, *others = drawn(SHAPES[name], impl=impl)
    layers(name, impl)[0](first.requires_grad_(), *others).sum().backward()
    assert first.grad is not None and others[-1].grad is None
