"""Turn an error that a user's mistake causes in a library into one line that names the key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flowtrain.types import UserError


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


def text_of(error: BaseException) -> str:
    """Return the text of an error for one who will not see its class."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
