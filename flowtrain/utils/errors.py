"""Errors of libraries and foreign code as one line that names the key; clean-up after errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from flowtrain.records import UserError
from flowtrain.utils.text import printable

_MAX_CHARS = 500


@contextmanager
def user_error(
    problem: str, *kinds: type[BaseException], raises: type[UserError] = UserError
) -> Iterator[None]:
    """Raise `UserError("problem: reason")` in place of the given kinds of error inside the block.

    Args:
        problem: names the key or file, and its value: "model.path='runs/warm' is no model".
        kinds: errors that a user's mistake causes in the block; others pass through.
        raises: the subclass of `UserError` to raise.
    """
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise raises(f"{problem}: {reason}") from error


@contextmanager
def foreign(problem: str, raises: type[Exception] = UserError) -> Iterator[None]:
    """Raise `UserError("problem: TYPE: reason")` in place of any error inside the block, which runs
    code of other people: of a package, a program, or a user's file.

    Args:
        problem: names the key or the package.
        raises: what to raise instead of `UserError`; errors of this class pass through.
    """
    try:
        yield
    except raises:
        raise
    # Foreign code may fail in any way, and a traceback would show our lines before its own.
    except (Exception, SystemExit) as error:
        raise raises(f"{problem}: {one_line(error)}") from error


@contextmanager
def on_failure(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` when an exception of any class leaves the block."""
    with ExitStack() as failed:
        failed.callback(undo)
        yield
        failed.pop_all()


def one_line(error: BaseException) -> str:
    """Return "TYPE: text" on one line of bounded length, which a terminal shows as it is."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return printable(line, keep="")[:_MAX_CHARS]


def text_of(error: BaseException) -> str:
    """Return the text of an error for one who will not see its class."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
