"""Waits that a person should know of: what takes longer than two seconds says what it is."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flowtrain.utils.text import printable

PATIENCE_S = 2.0
"""A wait that is shorter says nothing."""
_AGAIN_S = 30.0
"""Seconds between two lines."""


@contextmanager
def waiting(what: str, is_shown: bool = True, *, total: int = 0) -> Iterator[Callable[[], None]]:
    """Report on stderr what the block waits for, once it has lasted `PATIENCE_S`, and then how far
    it is: "held-out rollouts: 40 of 120, 38 s ...".

    Args:
        what: what is done, as a person says it: "loading the model".
        is_shown: false on all ranks but one.
        total: how many things are counted; 0: nothing is.

    Yields:
        What to call whenever one of the things is done, from any thread.
    """
    ended, counter = threading.Event(), itertools.count(1)
    num_done = [0]
    started_s = time.monotonic()

    def tick() -> None:
        num_done[0] = next(counter)  # which threads may share

    def say(state: str) -> None:
        count = f": {num_done[0]} of {total}" if total else ""
        print(f"{printable(what, keep='')}{count}{state}", file=sys.stderr, flush=True)

    def seconds() -> str:
        return f"{time.monotonic() - started_s:.0f} s"

    def report() -> None:
        if not ended.wait(PATIENCE_S):
            say(" ...")
            while not ended.wait(_AGAIN_S):
                say(f", {seconds()} ...")

    reporter = threading.Thread(target=report, name="waiting", daemon=True)
    if is_shown:
        reporter.start()
    try:
        yield tick
    finally:
        ended.set()
        if is_shown:
            reporter.join()
    # An error would speak for itself.
    if is_shown and time.monotonic() - started_s > PATIENCE_S:
        say(f", done in {seconds()}")
