"""Waits: silent when short; else what, how far, and for how long."""

from __future__ import annotations

import io
import re
import threading
from types import SimpleNamespace

import pytest

from flowtrain.utils import waiting as module
from flowtrain.utils.waiting import waiting


class Screen(io.StringIO):
    """A stream that tells when it was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if text.strip():
            self.written.set()
        return count

    def next(self) -> None:
        """Wait for the next line."""
        self.written.clear()
        assert self.written.wait(20)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    made = Screen()
    # Not sys.stderr, which pytest sets anew before it calls the test.
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=made))
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    return made


def test_a_short_wait_says_nothing(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 60.0)
    with waiting("loading") as tick:
        tick()
    assert screen.getvalue() == ""


def test_a_log_file_gets_lines_with_the_count(screen: Screen) -> None:
    with waiting("rollouts", total=3) as tick:
        screen.next()
        tick()
        tick()
        screen.next()
        screen.next()
        tick()
    lines = screen.getvalue().splitlines()
    assert lines[0] == "rollouts: 0 of 3 ..."
    assert "rollouts: 2 of 3, 0 s ..." in lines
    assert re.fullmatch(r"rollouts: 3 of 3, done in \d s", lines[-1])


def test_what_it_is_told_cannot_write_over_lines(screen: Screen) -> None:
    with waiting("reading\x1b[2K\rhidden"):
        screen.next()
    assert "\x1b" not in screen.getvalue() and "\r" not in screen.getvalue()


def test_an_error_speaks_for_itself(screen: Screen) -> None:
    with pytest.raises(ValueError, match="broken"), waiting("loading"):
        screen.next()
        raise ValueError("broken")
    assert "done" not in screen.getvalue()


def test_the_other_ranks_are_silent_and_still_count(screen: Screen) -> None:
    with waiting("loading", total=1, is_shown=False) as tick:
        tick()
    assert screen.getvalue() == ""
