"""The event loop of this process, on which all rollouts and their clients live."""

from __future__ import annotations

from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from flowtrain.records import UserError
from flowtrain.utils.threads import LoopThread

T = TypeVar("T")
_shared = LoopThread("event loop")
_call: ContextVar[object] = ContextVar("call", default=None)


def run_to_end(work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """Run a coroutine on the event loop of this process and wait for it, on any other thread; among
    its failures a UserError comes first.

    Ctrl-C and `timeout_s` are those of `LoopThread.run`.
    """
    _call.set(object())  # its tasks inherit that
    try:
        return _shared.run(work, timeout_s)
    except ExceptionGroup as failures:
        if error := first_of(failures, UserError):
            raise error from None
        raise


def begin(work: Coroutine[Any, Any, Any]) -> None:
    """Begin a coroutine on the event loop of this process, without waiting for it."""
    _shared.start(work)


def current_call() -> object:
    """Return what stands for the call of `run_to_end` that the caller is part of."""
    return _call.get()


def first_of(failures: ExceptionGroup[Any], *kinds: type[Exception]) -> Exception | None:
    """Return the first exception of these kinds among the failures of a task group."""
    error: Any = failures.subgroup(kinds)
    while isinstance(error, ExceptionGroup):  # groups nest
        error = error.exceptions[0]
    return error
