"""Run a coroutine to its end on a loop of its own; what comes out is what the caller can use."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from flowtrain.types import UserError

T = TypeVar("T")


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new event loop; among its failures a UserError comes first."""
    try:
        with asyncio.Runner() as runner:
            runner.get_loop().set_exception_handler(_unless_interrupted)
            return runner.run(work)
    except ExceptionGroup as failures:
        if mistake := next(user_errors(failures), None):
            raise mistake from None
        raise


def _unless_interrupted(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # A signal amid a task's step is raised to the caller and kept by the task as well, which then
    # complains that nobody asked for it.
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)


def user_errors(failures: BaseExceptionGroup[BaseException]) -> Iterator[UserError]:
    """Yield the UserErrors among the failures of a task group."""
    for failure in failures.exceptions:
        if isinstance(failure, BaseExceptionGroup):
            yield from user_errors(failure)
        elif isinstance(failure, UserError):
            yield failure
