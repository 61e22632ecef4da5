"""Attempts end by their deadline, and pauses between them keep clients apart."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from typing import Any

import pytest

from flowtrain.utils.net.retries import GaveUp, Transient, may_pass, pause_s, retried, retry_after_s
from tests import virtual_time


def run(attempt: Callable[[], Awaitable[Any]], limit_s: float = 5.0, **options: Any) -> Any:
    async def body() -> Any:
        return await retried(attempt, time.monotonic() + limit_s, (0.001, 0.002), **options)

    return virtual_time.run(body())


def failing(*failures: Exception) -> tuple[Callable[[], Awaitable[str]], list[float]]:
    """Return an attempt that fails so often, then succeeds, and the times of its calls."""
    left, times = list(failures), list[float]()

    async def attempt() -> str:
        times.append(time.monotonic())
        if left:
            raise left.pop(0)
        return "done"

    return attempt, times


def test_it_goes_on_until_an_attempt_succeeds() -> None:
    attempt, times = failing(Transient("busy"), Transient("cut"))
    said: list[tuple[int, str]] = []
    assert run(attempt, on_retry=lambda number, why: said.append((number, str(why)))) == "done"
    assert len(times) == 3 and said == [(1, "busy"), (2, "cut")]


def test_another_error_is_the_callers() -> None:
    attempt, times = failing(Transient("busy"), KeyError("x"))
    with pytest.raises(KeyError):
        run(attempt)
    assert len(times) == 2


def test_the_last_retry_says_so() -> None:
    attempt, times = failing(*(Transient(f"busy {number}") for number in range(9)))
    with pytest.raises(GaveUp, match=r"^busy 2 \(attempt 3, the last\)$") as end:
        run(attempt, max_retries=2)
    assert len(times) == 3 and end.value.problem == "busy 2"
    assert str(end.value.failure) == "busy 2"


def test_a_pause_that_outlasts_the_deadline_is_not_waited_for() -> None:
    attempt, times = failing(Transient("busy", 3600.0))
    with pytest.raises(
        GaveUp, match=r"^busy; the deadline leaves no time for another attempt after 3600\.0 s"
    ):
        run(attempt)
    assert len(times) == 1


def test_a_server_may_ask_for_a_longer_pause() -> None:
    attempt, times = failing(Transient("busy", 4.0))
    assert run(attempt) == "done"
    assert times[1] - times[0] == 4.0


def test_the_deadline_cuts_an_attempt_off() -> None:
    left = [Transient("busy")]

    async def attempt() -> None:
        if left:
            raise left.pop()
        await asyncio.sleep(60)

    for problem in ("busy", "it is silent"):
        with pytest.raises(GaveUp, match=rf"^no answer within 0\.2 s: {problem}$") as end:
            run(attempt, 0.2)
        assert end.value.failure is None


def test_pauses_double_up_to_the_longest_give_or_take_a_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number, middle in ((1, 0.5), (2, 1.0), (4, 4.0), (6, 10.0), (100_000, 10.0)):
        drawn = [pause_s(number, 0.5, 10.0) for _ in range(200)]
        assert 0.5 * middle <= min(drawn) < 0.7 * middle
        assert 1.3 * middle < max(drawn) <= 1.5 * middle
    monkeypatch.setattr(random, "uniform", lambda low, high: 1.0)
    assert [pause_s(number, 0.5, 10.0) for number in (1, 2, 3, 4, 5, 6)] == [0.5, 1, 2, 4, 8, 10]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("", 0), ("soon", 0), ("-5", 0), ("nan", 0), ("inf", 0), ("1e3", 1000), ("Mon", 0), ("7", 7)],
)
def test_odd_retry_after_headers(header: str, seconds: float) -> None:
    assert retry_after_s(header) == seconds


def test_retry_after_may_be_a_date(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_800_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    assert retry_after_s(formatdate(now + 10, usegmt=True)) == 10
    assert retry_after_s("Fri, 20 Nov 2026 00:00:00 GMT") == 0


def test_what_may_pass() -> None:
    assert all(map(may_pass, (408, 409, 425, 429, 500, 502, 503, 504)))
    assert not any(map(may_pass, (200, 206, 301, 400, 401, 403, 404, 410, 416)))
