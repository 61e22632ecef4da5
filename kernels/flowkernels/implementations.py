"""The two implementations of a function: a reference in torch, and kernels in Triton."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Concatenate, ParamSpec, TypeVar

import torch

IMPLS = ("auto", "triton", "torch")
P = ParamSpec("P")
R = TypeVar("R")


def warps(num_threads: int) -> int:
    """Return the warps of a program of at most 1024 threads: 32 of them each, on AMD 64."""
    return max(1, num_threads // (64 if torch.version.hip else 32))


def resolve_impl(impl: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """Return "triton" or "torch"; "auto" is Triton on a GPU, torch elsewhere and for float64."""
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r} must be one of {', '.join(map(repr, IMPLS))}")
    if impl == "auto":
        return "triton" if device.type == "cuda" and dtype != torch.float64 else "torch"
    if impl == "triton" and dtype == torch.float64:
        raise ValueError("impl='triton' takes float32, bfloat16 or float16, got float64")
    if impl == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "impl='triton' needs tensors on a GPU, got cpu (TRITON_INTERPRET=1 interprets the "
            "kernels on the CPU)"
        )
    return impl


def with_launcher(module: str) -> Callable[[Callable[P, R]], Callable[Concatenate[str, P], R]]:
    """Decorate a reference: it gets a first argument, `impl`, and "triton" calls the function of
    the same name in that module in its place, on the device of the first tensor that it is given.
    """

    def decorate(reference: Callable[P, R]) -> Callable[Concatenate[str, P], R]:
        @functools.wraps(reference)
        def function(impl: str, *args: P.args, **kwargs: P.kwargs) -> R:
            if impl == "torch":
                return reference(*args, **kwargs)
            launcher = getattr(importlib.import_module(module), reference.__name__)
            # Triton launches on the device that is the thread's, wherever the tensors are.
            with torch.cuda.device_of(next(_tensors((*args, *kwargs.values())))):
                result: R = launcher(*args, **kwargs)
            return result

        return function

    return decorate


def _tensors(arguments: Iterable[object]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors(argument)
