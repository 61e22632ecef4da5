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
from flowtrain.tools.sandbox.host import ProcessSandbox, Ran
from tests.attacks.conftest import MINUTES
from tests.attacks.tally import Tally

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")

LOOPS_PER_CORE = 8
TIMEOUT_S = 0.4
PROGRAMS = (
    "6 * 7",
    "print('both', 'words')",
    "sum(range(10 ** 5))",
    "sum(range(4 * 10 ** 6))",
    "x = 0\nfor i in range(10 ** 6): x += i\nprint(x)",
    "import math\nprint(math.factorial(500) % 1009)",
    "import time\ntime.sleep(0.05)\nprint('slept')",
    "import time\nfor _ in range(20): time.sleep(0.002)\nprint('dozed')",
    "import random\nprint(sorted(random.sample(range(10 ** 4), 5)))",
    "print('x' * 3000)",
    "1 / 0",
    "x = = 1",
    "def f(): return f()\nf()",
    "raise SystemExit(3)",
    "while True: pass",
    "9 ** 9 ** 9",
    "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
    "while True: print('x' * 100)",
    "import sys\nwhile True: sys.stderr.write('x' * 100)",
    "bytearray(10 ** 9)",
    "a = []\nwhile True: a.append(bytearray(8 << 20))",
)


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


def verdicts(num_rounds: int) -> list[Ran]:
    box = ProcessSandbox(seccomp.backend(), num_workers=4, timeout_s=TIMEOUT_S, memory_mb=128)
    box._workers.limits["wall_s"] = 60.0  # none of them sleeps for long

    async def all_of_them() -> list[Ran]:
        return await asyncio.gather(*map(box.run, PROGRAMS * num_rounds))

    try:
        return asyncio.run(all_of_them())
    finally:
        box.close()


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
        if (one.output, one.error) != (other.output, other.error)
    ]
    tally.add("runs on an overloaded machine", len(loaded), len(different))
    longest = max(ran.wall_s for ran in loaded)
    print(f"{len(loaded)} runs in {time.monotonic() - started:.1f} s, the longest {longest:.1f} s")
    assert not different
