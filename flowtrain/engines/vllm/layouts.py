"""What vLLM makes of weights once its loader has written them, seen by value.

A loader writes words in the order of the checkpoint. Before the first request vLLM may pack,
transpose or replace a parameter for its kernels, and words that are written there later, in the
loader's order, would be read as others. Names of classes do not tell where that happens: so each
parameter is digested before and after. What this cannot see is a permutation of equal words, such
as zeros; the random weights of a model that starts without a checkpoint have none.

One rearrangement is known and composed into the plan: the kernel for experts on a CPU
(`cpu_prepack_moe_weight` of vLLM, instruction set "vec") reads 16 rows at a time, column by column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flowtrain.engines.vllm.plan import Load
from flowtrain.engines.vllm.sharded_target import LoadPlan
from flowtrain.types import UserError
from flowtrain.weights.format.tensor_shards import digest_of
from flowtrain.weights.load.strided_view import StridedView

_BLOCK = 16
"""Rows of an expert's weight that the kernel reads together."""
_seen: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()
"""By model: its rearranged parameters, True for those that are in blocks of rows."""


def watch_processing(is_used: Callable[[], bool]) -> None:
    """Note from now on what vLLM rearranges in each model that it loads while `is_used`."""
    from vllm.model_executor.model_loader import base_loader

    process = base_loader.process_weights_after_loading

    def watched(model: nn.Module, *args: Any, **options: Any) -> None:
        before = {name: _content(tensor) for name, tensor in _named(model)} if is_used() else {}
        process(model, *args, **options)
        if before:
            _seen[model] = {
                name: _is_blocked(tensor, before.get(name))
                for name, tensor in _named(model)
                if _content(tensor) != before.get(name)
            }

    base_loader.process_weights_after_loading = watched


def prefer_known_kernels(is_used: Callable[[], bool]) -> None:
    """Let vLLM on a CPU take the kernel for experts whose order is known, in place of those of one
    architecture (AMX, NEON), for models that it loads while `is_used`.
    """
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:  # an older vLLM, whose experts are refused if their order is another
        return
    for kernel in CPUUnquantizedExperts.__subclasses__():
        can_run = kernel._supports_current_device
        kernel._supports_current_device = staticmethod(
            lambda can_run=can_run: not is_used() and can_run()
        )


def blocked_parameters(model: nn.Module) -> list[Tensor]:
    """Return the parameters that are in blocks of rows.

    Raises:
        UserError: vLLM rearranged another one, in a way that is not known, or computes with a copy
            of one; the message names it.
    """
    if model not in _seen:
        raise UserError(
            "sparse_delta has not seen how vLLM loaded this model; take load_format 'auto' or "
            "'dummy'"
        )
    named = dict(_named(model))
    for name, is_blocked in _seen[model].items():
        if not is_blocked:
            raise UserError(
                f"sparse_delta does not support {name!r}: vLLM rearranges it after loading, in a "
                "way that is not known"
            )
    places = {parameter.untyped_storage().data_ptr() for parameter in named.values()}
    for name, module in model.named_modules():
        sinks = getattr(getattr(module, "impl", None), "sinks", None)
        if sinks is not None and sinks.untyped_storage().data_ptr() not in places:
            raise UserError(
                f"sparse_delta does not support {name!r}: its attention computes with a copy of "
                "the sinks; take another attention backend"
            )
    return [named[name] for name in _seen[model]]


def in_blocks(plan: LoadPlan, parameters: Iterable[Tensor]) -> LoadPlan:
    """Return the plan for parameters that are in blocks of rows, where the loader knows nothing of
    blocks. Raises ValueError for views that begin or end within a block.
    """
    blocked = {_place(parameter): parameter for parameter in parameters}

    def moved(view: StridedView) -> StridedView:
        parameter = blocked.get(view.memory.data_ptr())
        return view if parameter is None else _moved(view, parameter)

    views = {name: [moved(view) for view in views] for name, views in plan.views.items()}
    return replace(plan, views=views)


def loader(load: Load, plan: LoadPlan, parameters: Iterable[Tensor]) -> Load:
    """Return a `load_weights` that finds the rows of parameters in blocks where it expects them."""
    blocked = {_place(parameter): parameter for parameter in parameters}

    @torch.no_grad()
    def whole(found: Iterable[tuple[str, Tensor]]) -> object:
        found = list(found)
        places = set(blocked)
        if not any(name in plan.dense for name, _ in found):
            places &= {v.memory.data_ptr() for name, _ in found for v in plan.views[name]}
        for place in places:
            blocked[place].copy_(_rows(blocked[place]))
        try:
            return load(found)
        finally:
            for place in places:
                blocked[place].copy_(_blocks(blocked[place]))

    return whole


def _moved(view: StridedView, parameter: Tensor) -> StridedView:
    """Split the dimensions of a view where a block, a row and an element begin, because the steps
    between those are others in blocks. What is cut within a block otherwise, `prove` finds.
    """
    num = parameter.dtype.itemsize // 2  # words
    row = parameter.shape[-1] * num
    steps = [(_BLOCK * row, _BLOCK * row), (row, num), (num, _BLOCK * num), (1, 1)]
    steps = steps[:3] if num == 1 else steps
    to_first, rest = 0, view.to_first
    for plain, there in steps:
        to_first += rest // plain * there
        rest %= plain
    dims: list[tuple[int, int, int]] = []
    for size, stride, to_stride in zip(view.sizes, view.strides, view.to_strides, strict=True):
        n = size
        for plain, there in steps:
            if n == 1 or n * to_stride <= plain:
                continue
            inner, times = max(1, plain // to_stride), max(1, to_stride // plain)
            if inner * to_stride != times * plain or n % inner:
                raise ValueError("a weight of experts is cut within a block of 16 rows")
            dims.append((n // inner, stride * inner, times * there))
            n = inner
    sizes, strides, to_strides = zip(*(dims or [(1, 1, 1)]), strict=True)
    return StridedView(view.memory, view.first, to_first, sizes, strides, to_strides)


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def _content(tensor: Tensor) -> tuple[object, ...]:
    if tensor.is_meta or tensor.dtype.itemsize < 2:
        return tensor.dtype, tensor.shape
    return tensor.dtype, tensor.shape, digest_of(tensor.detach().contiguous().view(-1))


def _is_blocked(parameter: Tensor, before: object) -> bool:
    can_be = parameter.dim() == 3 and parameter.shape[1] % _BLOCK == 0
    return can_be and _content(_rows(parameter)) == before


def _rows(blocked: Tensor) -> Tensor:
    """[E, O, I] whose memory is [E, O / 16, I, 16], in plain order."""
    num_experts, rows, columns = blocked.shape
    parts = blocked.detach().view(num_experts, rows // _BLOCK, columns, _BLOCK)
    return parts.transpose(2, 3).reshape(blocked.shape)


def _blocks(plain: Tensor) -> Tensor:
    """The reverse of `_rows`."""
    num_experts, rows, columns = plain.shape
    parts = plain.detach().view(num_experts, rows // _BLOCK, _BLOCK, columns)
    return parts.transpose(2, 3).reshape(plain.shape)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
