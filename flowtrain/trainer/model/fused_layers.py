"""Layers of a decoder that `flowkernels.layers` computes, with the same bits and less memory.

No family is known by name. A layer is tried: where it gives, on a few small random tensors, the
bits of one of those layers, its forward pass is replaced by that. Its weights, their names and what
wraps it stay as they are; any other layer keeps its own.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import product
from types import FunctionType
from typing import Any

import torch
from flowkernels.layers import FORMS, rms_norm, rotary, swiglu
from torch import Tensor, nn
from transformers import PreTrainedModel

_ROTATION = "apply_rotary_pos_emb"
"""The name under which the attention of every family finds the function."""
_ROWS, _SIZE = 5, 16


@torch.no_grad()
def fuse_layers(model: PreTrainedModel) -> None:
    """Replace the layers in place, before the model is sharded, whether or not it has weights."""
    for module in model.modules():
        kind = type(module)
        if found := _norm(module):
            module.__class__ = type(kind.__name__, (FusedNorm, kind), {})
            module.form, module.eps_of_form = found
        elif _is_gated(module):
            module.__class__ = type(kind.__name__, (FusedMLP, kind), {})
        elif forward := _rotating(kind):
            module.__class__ = type(kind.__name__, (FusedRotation, kind), {"forward": forward})


def fused_text(model: nn.Module) -> str:
    """Count what is fused, for a person; "" where nothing is."""
    kinds = {FusedNorm: "norms", FusedRotation: "rotary embeddings", FusedMLP: "gated MLPs"}
    found = Counter(name for m in model.modules() for k, name in kinds.items() if isinstance(m, k))
    return ", ".join(f"{found[name]} {name}" for name in kinds.values() if found[name])


class FusedNorm(nn.Module):
    """Before an RMSNorm."""

    weight: nn.Parameter
    form: str
    eps_of_form: float

    def forward(self, hidden: Tensor) -> Any:
        if hidden.dtype != self.weight.dtype:  # transformers would compute in the wider one
            return super().forward(hidden)
        return rms_norm(hidden, self.weight, self.eps_of_form, form=self.form)


class FusedMLP(nn.Module):
    """Before an MLP whose product of two projections, or of halves of one, goes through another."""

    gate_proj: nn.Module
    up_proj: nn.Module
    gate_up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Any:
        if "gate_up_proj" in self._modules:
            gate, up = self.gate_up_proj(x).chunk(2, -1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        if type(self.down_proj) is nn.Linear and self.down_proj.bias is None:
            return swiglu(gate, up, self.down_proj.weight)
        return self.down_proj(swiglu(gate, up))


class FusedRotation(nn.Module):
    """Before an attention."""


# ---- what a layer computes


def _norm(module: nn.Module) -> tuple[str, float] | None:
    """(form, eps) of an RMSNorm"""
    weight = module._parameters.get("weight")
    alone = list(module._parameters) == ["weight"] and not (module._modules or module._buffers)
    if weight is None or not alone or weight.dim() != 1:
        return None
    numbers = [value for value in vars(module).values() if isinstance(value, float)]
    found = set(product(FORMS, numbers))
    for dtype in (torch.bfloat16, torch.float32):
        x, other = _drawn((_ROWS, len(weight)), dtype)
        x[0] *= 1e-3  # eps counts there
        twin = _twin(module, _parameters={"weight": nn.Parameter(other[0])})
        try:
            given = twin(x)
        except TypeError:  # it wants a gate
            return None
        found = {f for f in found if _same(given, rms_norm(x, other[0], f[1], form=f[0]))}
    return min(found, default=None)


def _is_gated(module: nn.Module) -> bool:
    stubs: dict[str, Callable[[Tensor], Tensor]] = {
        "gate_proj": lambda x: x,
        "up_proj": lambda x: x.flip(-1),
        "gate_up_proj": lambda x: torch.cat([x, x.flip(-1)], -1),
        "down_proj": lambda x: x,
    }
    projections = {name: stub for name, stub in stubs.items() if name in module._modules}
    if list(projections) not in (["gate_proj", "up_proj", "down_proj"], list(stubs)[2:]):
        return False
    if len(module._modules) != len(projections) + 1:  # and the activation
        return False
    twin = _twin(module, training=True, _modules={**module._modules, **projections})
    x = 8 * _drawn((_ROWS, _SIZE), torch.bfloat16)[0]  # far enough for a clamp
    return _same(twin(x), swiglu(x, x.flip(-1)))


def _rotating(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """The forward pass of an attention, which finds our rotation in the place of its own."""
    forward: Any = inspect.unwrap(kind.forward)
    if not (inspect.isfunction(forward) and _ROTATION in forward.__code__.co_names):
        return None
    original = forward.__globals__[_ROTATION]
    is_proven = functools.cache(functools.partial(_is_rotary, original))
    if not is_proven(torch.float32, torch.float32):
        return None

    def rotate(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any
    ) -> Any:
        share = 1 if query.shape[-1] == cos.shape[-1] else 2
        is_plain = cos.dtype in (query.dtype, torch.float32) and not (rest or more)
        if is_plain and is_proven(query.dtype, cos.dtype, share):
            return rotary(query, key, cos, sin)
        return original(query, key, cos, sin, *rest, **more)

    return with_names(forward, {_ROTATION: rotate})


def with_names(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """Copy a function whose module has other things under some names."""
    copied = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _is_rotary(
    function: Callable[..., Any], dtype: torch.dtype, of_tables: torch.dtype, share: int = 1
) -> bool:
    """Return whether it rotates queries and keys, or their first half (share 2), as we do."""
    query, key = _drawn((1, 3, _ROWS, _SIZE), dtype)
    tables = _drawn((1, _ROWS, _SIZE // share), of_tables)
    expected = rotary(query, key[:, :1], *tables)
    try:
        found = function(query, key[:, :1], *tables)
    except RuntimeError:  # it wants tables of another size, as gpt-oss does
        return False
    return all(map(_same, found, expected))


def _twin(module: nn.Module, **parts: Any) -> nn.Module:
    """A module of that kind, with other parts and no weights of its own."""
    twin = copy.copy(module)
    vars(twin).update(parts)
    return twin


def _drawn(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)  # on the CPU, whatever the default device is
    first, second = (torch.randn(shape, generator=rng, device="cpu").to(dtype) for _ in range(2))
    return first, second


def _same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)
