"""A faster start of functions in Triton's interpreter, which tests of kernels spend half of their
time on.

The interpreter replaces the functions of `triton.language` when a kernel is launched and once more
at every call of a function inside it, though they are in place then. Here the inner calls leave
them alone. Nothing that a kernel computes changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class Launch:
    """The replaced functions during one launch."""

    def __init__(self) -> None:
        self._patch: Callable[[Any], Any] = interpreter._patch_lang
        self._patched: set[frozenset[str]] = set()
        self._scope: Any = None

    def __call__(self, fn: Any) -> Any:
        """Replace what `fn` uses of triton.language; the first call of a launch gets the scope."""
        used = frozenset(
            value.__name__
            for value in fn.__globals__.values()
            if inspect.ismodule(value) and value in (tl, tl.core)
        )
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


def speed_up() -> None:
    if not isinstance(interpreter._patch_lang, Launch):
        interpreter._patch_lang = Launch()
