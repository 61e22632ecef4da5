"""Foreign errors on one line, and what is undone after a failure."""

from __future__ import annotations

import pytest

from flowtrain.records import UserError
from flowtrain.utils.errors import foreign, on_failure


class Other(Exception):
    """What a caller wants instead of UserError."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("KEY"), "a tool: KeyError: 'KEY'"),
        (SystemExit(2), "a tool: SystemExit: 2"),
        (ValueError("one\n  two\x1b[2J"), "a tool: ValueError: one two\\x1b[2J"),
        (UserError("tools.x=3: no"), "tools.x=3: no"),
    ],
)
def test_a_foreign_error_is_one_line(error: BaseException, line: str) -> None:
    with pytest.raises(UserError) as raised, foreign("a tool"):
        raise error
    assert str(raised.value) == line
    assert raised.value is error or raised.value.__cause__ is error


def test_a_foreign_error_is_of_the_class_that_was_asked_for() -> None:
    with pytest.raises(Other, match=r"^a tool: UserError: no$"), foreign("a tool", Other):
        raise UserError("no")
    with pytest.raises(Other, match=r"^mine$"), foreign("a tool", Other):
        raise Other("mine")


def test_ctrl_c_is_no_foreign_error() -> None:
    with pytest.raises(KeyboardInterrupt), foreign("a tool"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("error", [None, ValueError(), KeyboardInterrupt()])
def test_only_a_failure_is_undone(error: BaseException | None) -> None:
    undone: list[str] = []
    try:
        with on_failure(lambda: undone.append("done")):
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt) as raised:
        assert raised is error
    assert undone == ([] if error is None else ["done"])
