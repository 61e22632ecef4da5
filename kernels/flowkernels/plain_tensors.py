"""Conversion of tensors in batches, under autocast or sharded by FSDP2 to the plain tensors [T,
...] that the functions take.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Head = tuple[Tensor, Tensor, Tensor | None]
"""Hidden states, weight and bias."""


def flat_rows(name: str, rows: Tensor, *, may_copy: bool = True) -> Tensor:
    """Return [..., X] as [T, X]: a view, or a copy where the rows do not lie at one distance from
    each other and one may be made.
    """
    check_plain(name, rows)
    if rows.dim() <= 2:
        return rows
    shape = (math.prod(rows.shape[:-1]), rows.shape[-1])
    if may_copy:
        return rows.reshape(shape)
    try:
        return rows.view(shape)
    except RuntimeError:
        raise ValueError(
            f"{name} must have its rows at one distance from each other for inplace=True, got "
            f"{tuple(rows.shape)} with strides {rows.stride()}; to leave out the last position, "
            "pass all of them with a negative target there"
        ) from None


def plain_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Head:
    """Return flat hidden states, full weight and bias, in one dtype if autocast chooses it."""
    weight = _gather(weight)
    bias = None if bias is None else _gather(bias)
    head = flat_rows("hidden_TD", hidden), weight, bias
    dtypes = {x.dtype for x in head if x is not None}
    device = hidden.device.type
    is_mixed = len(dtypes) > 1 and dtypes <= {torch.float32, torch.bfloat16, torch.float16}
    if not is_mixed or not torch.is_autocast_enabled(device):
        return head
    dtype = torch.get_autocast_dtype(device)
    return head[0].to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def check_plain(name: str, tensor: Tensor) -> None:
    if _as_dtensor(tensor) is not None:
        raise ValueError(
            f"{name} must be a plain tensor, got a DTensor; pass its to_local() or full_tensor()"
        )


def _gather(tensor: Tensor) -> Tensor:
    """Return all of a DTensor. Its gradient is the mean over the ranks, as FSDP2 takes it, who have
    tokens of their own; the mean of one and the same gradient is right too.
    """
    sharded = _as_dtensor(tensor)
    if sharded is None:
        return tensor
    from torch.distributed.tensor import Partial

    placements = [Partial("avg")] * sharded.device_mesh.ndim
    full_tensor: Tensor = sharded.full_tensor(grad_placements=placements)
    return full_tensor


def _as_dtensor(tensor: Tensor) -> Any:
    """Return the tensor if it is a DTensor, whose module is slow to import and seldom needed."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None
