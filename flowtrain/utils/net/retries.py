"""Attempts at what may fail for a moment, with growing pauses between them, up to a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import itertools
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
_PASSING = (408, 409, 425, 429)


class Transient(Exception):
    """An attempt failed; another one may succeed, after `pause_s` at least."""

    def __init__(self, problem: str, pause_s: float = 0.0) -> None:
        super().__init__(problem)
        self.pause_s = pause_s


class GaveUp(Exception):
    """No attempt succeeded, and there is none left."""

    def __init__(self, text: str, problem: str, failure: Transient | None = None) -> None:
        super().__init__(text)
        self.problem = problem
        """The problem of the last time."""
        self.failure = failure
        """The last attempt's; None where that was cut off by the deadline."""


async def retried(
    attempt: Callable[[], Awaitable[T]],
    deadline: float,
    pauses_s: tuple[float, float],
    *,
    max_retries: float = math.inf,
    on_retry: Callable[[int, Transient], None] | None = None,
    silence: str = "it is silent",
) -> T:
    """Attempt until that returns, or raises something else than Transient.

    Args:
        deadline: of time.monotonic(); an attempt under way is cancelled then.
        pauses_s: seconds of the first pause, and of the longest.
        on_retry: called before each pause with the number of failures and the last one.
        silence: what is wrong where the deadline cuts off the first attempt.

    Raises:
        GaveUp: by the deadline; before it where no time is left for another attempt.
    """
    limit_s, problem = deadline - time.monotonic(), silence
    try:
        async with asyncio.timeout(limit_s):
            for number in itertools.count(1):
                try:
                    return await attempt()
                except Transient as failed:
                    failure, problem = failed, str(failed)
                wait_s = max(failure.pause_s, pause_s(number, *pauses_s))
                if number > max_retries:
                    raise GaveUp(f"{problem} (attempt {number}, the last)", problem, failure)
                if time.monotonic() + wait_s >= deadline:
                    reason = f"the deadline leaves no time for another attempt after {wait_s:.1f} s"
                    raise GaveUp(f"{problem}; {reason}", problem, failure)
                if on_retry is not None:
                    on_retry(number, failure)
                await asyncio.sleep(wait_s)
    except TimeoutError:
        raise GaveUp(f"no answer within {limit_s:.1f} s: {problem}", problem) from None
    raise AssertionError("the attempts end by themselves")


def pause_s(num_failures: int, first_s: float, longest_s: float) -> float:
    """Return a pause that doubles with each failure, give or take a half, so that clients that were
    cut off together do not come back together.
    """
    return min(longest_s, first_s * 2 ** min(num_failures - 1, 10)) * random.uniform(0.5, 1.5)


def may_pass(status: int) -> bool:
    """Return whether a request with this HTTP status may succeed later."""
    return status in _PASSING or status >= 500


def retry_after_s(header: str) -> float:
    """Return the seconds that a header asks for, as a number or as a date; 0 for anything else."""
    for parse in (float, _seconds_until):
        with contextlib.suppress(ValueError, OverflowError):
            seconds = parse(header)
            return max(0.0, seconds) if math.isfinite(seconds) else 0.0
    return 0.0


def _seconds_until(date: str) -> float:
    return email.utils.parsedate_to_datetime(date).timestamp() - time.time()
