"""Waits that a person should know of: what takes longer than two seconds says what it is."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flowtrain.utils.terminal import bare
from flowtrain.utils.text import printable

PATIENCE_S = 2.0
"""A wait that is shorter says nothing."""
_AGAIN_S = 1.0
"""Seconds between two states on a terminal, where each takes the place of the one before."""
_LOGGED_S = 30.0
"""Seconds between two states in a log file."""


@contextmanager
def waiting(what: str, is_shown: bool = True, *, total: int = 0) -> Iterator[Callable[[], None]]:
    """Tell on stderr what the block waits for, once it has lasted `PATIENCE_S`, and then how far it
    is: "held-out rollouts: 40 of 120, 8 s ...". On a terminal nothing is left of it in the end.

    Args:
        what: what is done, as a person says it: "loading the model".
        is_shown: false on all ranks but one.
        total: how many things are counted; 0: nothing is.

    Yields:
        What to call whenever one of the things is done, from any thread.
    """
    wait = _Wait(what, total)
    teller = threading.Thread(target=wait.tell, name="waiting", daemon=True)
    if is_shown:
        teller.start()
    try:
        yield wait.tick
        wait.is_done = True
    finally:
        wait.over.set()
        if is_shown:
            teller.join()


class _Wait:
    def __init__(self, what: str, total: int) -> None:
        self.over = threading.Event()
        self.is_done = False
        """It ended without an error, which would speak for itself."""
        self._what, self._total, self._count = what, total, 0
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def tick(self) -> None:
        with self._lock:
            self._count += 1

    def tell(self) -> None:
        """Say how things stand until the wait is over; the body of a thread."""
        if self.over.wait(PATIENCE_S):
            return
        self._say(" ...")
        while not self.over.wait(_AGAIN_S if self._is_terminal else _LOGGED_S):
            self._say(f", {self._seconds():.0f} s ...")
        if self._is_terminal:
            self._draw("")  # the next line begins where this one did
        elif self.is_done:
            self._say(f", done in {self._seconds():.0f} s")

    def _say(self, state: str) -> None:
        line = self._text() + state
        if self._is_terminal:
            self._draw(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def _text(self) -> str:
        return printable(self._what, keep="") + (
            f": {self._count} of {self._total}" if self._total else ""
        )

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    @staticmethod
    def _draw(line: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        stream = bare(sys.stderr)  # which lets carriage returns of our own through
        stream.write(f"\r{line[:width].ljust(width)}\r")
        stream.flush()
