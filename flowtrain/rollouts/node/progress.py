"""The progress of a node: a bar or log lines for people, busy and idle time for the dataflow."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from flowtrain.utils.terminal import bar
from flowtrain.utils.text import printable

_LINE_S = 30.0


class NodeProgress:
    """Shows groups pushed, their rate, versions, rollouts under way, and why the node waits."""

    def __init__(self, num_groups: int = 0) -> None:
        """`num_groups`: groups to push until the node ends; 0: no end."""
        # disable=None: no bar without a terminal
        self._bar = bar(total=num_groups or None, unit="group", dynamic_ncols=True, disable=None)
        self._num_pushed = 0
        self._is_shown = False
        self._started = self._line_at = time.monotonic()

    def pushed(self) -> None:
        self._num_pushed += 1
        self._bar.update()

    def show(self, versions: Mapping[str, int], num_rollouts: int, waiting: str) -> None:
        """Show the current state. `waiting`: why the node waits, if it does."""
        weights = ", ".join(f"{policy} {version}" for policy, version in versions.items())
        text = f"weights: {weights}, {num_rollouts} rollouts under way"
        if waiting:
            text += f", waits: {waiting}"
        self._bar.set_postfix_str(printable(text, keep=""))
        now = time.monotonic()
        if self._bar.disable and (now - self._line_at > _LINE_S or not self._is_shown):
            rate = 60 * self._num_pushed / max(now - self._started, 1e-9)
            line = f"{self._num_pushed} groups pushed ({rate:.1f} per minute), {text}"
            print(line, file=sys.stderr, flush=True)
            self._line_at = now
            self._is_shown = True

    def close(self) -> None:
        self._bar.close()


class BusyClock:
    """Counts seconds with rollouts under way and seconds without, since it was last read."""

    def __init__(self) -> None:
        self._is_busy = False
        self._since = time.monotonic()
        self._seconds = {True: 0.0, False: 0.0}

    def set_busy(self, is_busy: bool) -> None:
        """Note that rollouts are under way from now on, or that none is."""
        now = time.monotonic()
        self._seconds[self._is_busy] += now - self._since
        self._is_busy = is_busy
        self._since = now

    def read(self) -> tuple[float, float]:
        """Return (busy, idle) seconds and start again from 0."""
        self.set_busy(self._is_busy)
        busy_s = self._seconds[True]
        idle_s = self._seconds[False]
        self._seconds = {True: 0.0, False: 0.0}
        return busy_s, idle_s

    def discard_idle(self) -> None:
        """Forget the idle time so far: the dataflow was not its reason."""
        self.set_busy(self._is_busy)
        self._seconds[False] = 0.0
