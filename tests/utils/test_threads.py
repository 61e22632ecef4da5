"""Calls on threads of their own."""

from __future__ import annotations

import sys
import threading

import pytest

from flowtrain.utils.threads import background


def test_a_call_in_the_background_cannot_be_cancelled() -> None:
    gate = threading.Event()
    names: list[str] = []

    def work() -> int:
        assert gate.wait(20)
        names.append(threading.current_thread().name)
        assert threading.current_thread().daemon
        return 7

    future = background(work, "seven")
    assert not future.cancel()
    gate.set()
    assert future.result(20) == 7 and names == ["seven"]


def test_those_who_wait_get_whatever_it_raises() -> None:
    with pytest.raises(SystemExit):
        background(lambda: sys.exit(3), "exit").result(20)
