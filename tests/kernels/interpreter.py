"""A faster start of functions in Triton's interpreter, which tests of kernels spend half of their
time on.

The interpreter replaces the functions of `triton.language` when a kernel is launched and once more
at every call of a function inside it, though they are in place then. Here the inner calls leave
them alone. It also works out the same few types and shapes for each of its tensors; here they are
kept. And it checks each addition of integers for overflow, which takes ten operations more: the
tests whose numbers are large ask for that by `check_overflow`. Nothing that a kernel computes
changes, but for one thing: fp32 is rounded to bf16 as a GPU does it, where the interpreter cuts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.runtime import interpreter


@functools.cache
def _languages(fn: Any) -> frozenset[str]:
    """The modules of triton.language that a function uses."""
    values = fn.__globals__.values()
    return frozenset(value.__name__ for value in values if value is tl or value is tl.core)


class Launch:
    """The replaced functions during one launch."""

    def __init__(self) -> None:
        self._patch: Callable[[Any], Any] = interpreter._patch_lang
        self._patched: set[frozenset[str]] = set()
        self._scope: Any = None

    def __call__(self, fn: Any) -> Any:
        """Replace what `fn` uses of triton.language; the first call of a launch gets the scope."""
        used = _languages(fn)
        is_first = not self._patched
        if used not in self._patched:
            self._patched.add(used)
            scope = self._patch(fn)
        if is_first:
            self._scope = scope
            return self
        return None

    def restore(self) -> None:
        self._patched.clear()
        self._scope.restore()


@functools.cache
def _block_shape(sizes: tuple[int, ...]) -> tuple[Any, int]:
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    return tl.tuple(sizes), validate_block_shape(sizes)


def _init_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Iterable[Any]) -> None:
    self.element_ty = element_ty
    sizes = tuple([x.value if isinstance(x, tl.constexpr) else x for x in shape])
    self.shape, self.numel = _block_shape(sizes)
    self.name = f"<{sizes}, {element_ty.name}>"


@functools.cache
def _constant_shape(sizes: tuple[int, ...]) -> tuple[tl.constexpr, Any]:
    return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])


def _init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.numel, self.shape = _constant_shape(tuple(type.shape.values) if type.is_block() else ())


def _cached_by_name(get: Callable[[tl.dtype], Any]) -> Callable[[tl.dtype], Any]:
    known: dict[str, Any] = {}

    def cached(dtype: tl.dtype) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = get(dtype)
        return known[name]

    return cached


def _rounding(convert: Callable[..., Any]) -> Callable[..., Any]:
    def converted(data: Any, given: tl.dtype, wanted: tl.dtype, mode: Any) -> Any:
        if (given.name, wanted.name) != ("fp32", "bf16"):
            return convert(data, given, wanted, mode)
        bits = np.ascontiguousarray(data).view(np.uint32)
        nearest = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
        return np.where(np.isnan(data), bits >> 16 | 1, nearest).astype(np.uint16)

    return converted


def check_overflow(is_checked: bool) -> None:
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=is_checked)
    interpreter.interpreter_builder.options = options


def speed_up() -> None:
    if not isinstance(interpreter._patch_lang, Launch):
        interpreter._patch_lang = Launch()
        interpreter._convert_float = _rounding(interpreter._convert_float)
        interpreter._get_np_dtype = _cached_by_name(interpreter._get_np_dtype)
        tl.block_type.__init__ = _init_block_type
        tl.tensor.__init__ = _init_tensor
        check_overflow(False)
