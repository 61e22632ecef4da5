"""The clocks of a run, and its limits of time, which strike alike on idle and loaded machines.

A process computes, sleeps, or waits for a core. Only the third depends on what else the machine
does, so the first two count. Linux tells them apart: a CPU clock per process, and in /proc its
state and the time that it has waited for cores. Where a kernel does not tell the latter, a sleeping
run's waits count as well; where it shows nothing at all, only the CPU clock and wall time do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from flowtrain.tools.sandbox.child import CPU_ERROR

ASLEEP = frozenset("STt")
"""States of a process that waits for something else than a core or a disk."""
_WHOLE_PROCESS = 2
"""Of the clock ids of Linux: the time of all threads."""


def state(pid: int) -> str:
    """Return the letter of the process's state, see proc(5); "" when it is gone or hidden."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class Clock:
    """The time that a process takes, from now on."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._started = time.monotonic()

    def wall_s(self) -> float:
        return time.monotonic() - self._started

    def cpu_s(self) -> float:
        """Return its CPU time since its birth; 0 when it is gone."""
        try:
            return time.clock_gettime(~self.pid << 3 | _WHOLE_PROCESS)
        except OSError:
            return 0.0

    def waited_s(self) -> float:
        """Return the time that it has waited for a core, up to the last time that it got one."""
        try:
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        except OSError:
            return 0.0


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The limits of one run."""

    seconds: float
    """Of computing, or of computing and sleeping together."""

    @property
    def wall_s(self) -> float:
        """Return the seconds that have passed.

        It ends what the other two cannot, so it may be generous: only a run that keeps asking for a
        core and gets less than a thirtieth of one comes so far.
        """
        return max(10.0, 30 * self.seconds)

    def exceeded(self, clock: Clock) -> str:
        """Return the error of a run that has exceeded a limit; "" for any other.

        A run is only taken for a sleeper while it sleeps, because a wait for a core counts as one
        when it is over, and not before.
        """
        wall_s = clock.wall_s()  # first, so that what passes between the readings counts for it
        if clock.cpu_s() >= self.seconds:
            return CPU_ERROR.format(self.seconds)
        if state(clock.pid) in ASLEEP and wall_s - clock.waited_s() >= self.seconds:
            return f"time limit of {self.seconds:g} s exceeded, asleep"
        if wall_s >= self.wall_s:
            return f"wall time limit of {self.wall_s:g} s exceeded"
        return ""
