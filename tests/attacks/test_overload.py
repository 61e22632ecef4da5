"""Verdicts on a loaded machine: equal to those on an idle one, which rewards follow from."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flowtrain.tools.sandbox import seccomp
from flowtrain.tools.sandbox.host import CodeResult, ProcessSandbox
from tests.attacks.composer import PIECES
from tests.attacks.conftest import MINUTES
from tests.attacks.tally import Tally

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")

LOOPS_PER_CORE = 8
TIMEOUT_S = 0.4
PROGRAMS = PIECES["verdicts"]


@contextmanager
def busy(num_loops: int) -> Iterator[None]:
    """Run so many other processes that want a core."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_loops)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def verdicts(num_rounds: int) -> list[CodeResult]:
    box = ProcessSandbox(seccomp.backend(), num_workers=4, timeout_s=TIMEOUT_S, memory_mb=128)
    box._workers.limits["wall_s"] = 60.0  # none of them sleeps for long

    async def all_of_them() -> list[CodeResult]:
        return await asyncio.gather(*map(box.run, PROGRAMS * num_rounds))

    try:
        return asyncio.run(all_of_them())
    finally:
        box.close()


def is_cut(ran: CodeResult) -> bool:
    """Return whether a limit ended the run, before which it printed more or less."""
    return "limit of" in (ran.error or "")


def test_verdicts_do_not_depend_on_the_load(tally: Tally) -> None:
    """Servers start under the load, too."""
    num_rounds = max(1, min(8, round(MINUTES)))
    idle = verdicts(num_rounds)
    started = time.monotonic()
    with busy(LOOPS_PER_CORE * (os.cpu_count() or 1)):
        loaded = verdicts(num_rounds)
    different = [
        (code, one, other)
        for code, one, other in zip(PROGRAMS * num_rounds, idle, loaded, strict=True)
        if one.error != other.error or (one.output != other.output and not is_cut(one))
    ]
    tally.add("runs on an overloaded machine", len(loaded), len(different))
    longest = max(ran.wall_s for ran in loaded)
    print(f"{len(loaded)} runs in {time.monotonic() - started:.1f} s, the longest {longest:.1f} s")
    assert not different
