"""The limits of time: computing and sleeping count, waiting for a core does not."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.agents.executor import Executor
from flowtrain.config import Config
from flowtrain.tools import ToolContext, python_coder, run_tool
from flowtrain.tools.python_coder import PythonCoder
from flowtrain.tools.sandbox import clocks, server
from flowtrain.tools.sandbox.clocks import Clock, TimeLimit
from flowtrain.tools.sandbox.host import ProcessSandbox, Ran
from flowtrain.types import Action
from tests.attacks.sandboxes import KINDS, backend

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the clocks are Linux's")

LOOP = "while True: pass"
SLEEP = "import time\ntime.sleep(1000)"
DOZE = "import time\nwhile True: time.sleep(0.001)"
UNTIL = "import time\nend = time.monotonic() + {}\nwhile time.monotonic() < end: pass\nprint(1)"
"""Computes as long as it has a core, until some seconds of wall time have passed."""


def run(box: ProcessSandbox, code: str) -> Ran:
    return asyncio.run(box.run(code))


def _in_our_session(start: Any, *args: Any, **options: Any) -> Any:
    """Start a process in a group of its own, but in our session: where the kernel shares cores
    among sessions (autogroup), one that only idles in a session of its own gets half a core.
    """
    return start(*args, **{**options, "start_new_session": False, "process_group": 0})


@contextmanager
def starved(timeout_s: float, wall_s: float = 240.0) -> Iterator[ProcessSandbox]:
    """A sandbox whose runs get no core while another process wants it, and one does."""
    core = min(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", functools.partial(_in_our_session, subprocess.Popen))
        box = ProcessSandbox(backend("seccomp"), num_workers=1, timeout_s=timeout_s)
        run(box, "1")
    pid = box._workers.idle[-1].pid
    os.sched_setaffinity(pid, {core})
    os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    pin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\n{LOOP}"
    hog = subprocess.Popen([sys.executable, "-c", pin], stdout=subprocess.PIPE)
    try:
        assert hog.stdout is not None and hog.stdout.readline()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TimeLimit, "wall_s", wall_s)
            yield box
    finally:
        hog.kill()
        hog.communicate()
        box.close()


def test_a_wait_for_a_core_does_not_count() -> None:
    with starved(timeout_s=0.4) as box:
        ran = run(box, UNTIL.format(1.2))
    assert (ran.output, ran.error) == ("1\n", None)
    assert ran.wall_s > 1.2 and ran.cpu_s < 0.4


def test_waits_between_naps_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LOOK_S", 0.005)  # so that many looks find it asleep
    with starved(timeout_s=0.7) as box:
        ran = run(box, "import time\nfor _ in range(40): time.sleep(0.01)\nprint(1)")
    assert (ran.output, ran.error) == ("1\n", None)
    assert ran.wall_s > 0.7


def test_the_same_program_with_a_core_exceeds_the_limit() -> None:
    box = ProcessSandbox(backend("seccomp"), num_workers=1, timeout_s=0.1)
    ran = run(box, UNTIL.format(100))
    box.close()
    assert ran.error == "CPU time limit of 0.1 s exceeded" and 0.1 <= ran.cpu_s < 5.0


@pytest.mark.parametrize("code", [UNTIL.format(0.5), f"print('x', flush=True)\n{LOOP}"])
def test_what_it_computed_counts_to_the_end(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Also where the host has no core for a look, and the code ends or meets its cap in between."""
    monkeypatch.setattr(server, "LOOK_S", 60.0)
    box = ProcessSandbox(backend("seccomp"), num_workers=1, timeout_s=0.05)
    ran = run(box, code)
    box.close()
    assert (ran.output, ran.error) == ("", "CPU time limit of 0.05 s exceeded")


def test_a_sleeper_is_not_mistaken_for_a_waiter() -> None:
    with starved(timeout_s=0.2) as box:
        ran = run(box, "import time\nwhile True: time.sleep(0.02)")
    assert ran.error == "time limit of 0.2 s exceeded, asleep"


def test_the_wall_limit_ends_what_gets_no_core() -> None:
    with starved(timeout_s=0.4, wall_s=0.5) as box:
        ran = run(box, LOOP)
    assert ran.error == "wall time limit of 0.5 s exceeded" and ran.cpu_s < 0.4 < ran.wall_s


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", [SLEEP, DOZE])
def test_an_idle_program_does_not_hold_its_worker(kind: str, code: str) -> None:
    box = ProcessSandbox(backend(kind), num_workers=1, timeout_s=0.2)
    ran = run(box, code)
    box.close()
    assert ran.error == "time limit of 0.2 s exceeded, asleep"
    assert ran.wall_s >= 0.2 > ran.cpu_s


def test_a_kernel_without_schedstat_still_ends_sleepers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "waited_s", lambda clock: 0.0)
    box = ProcessSandbox(backend("seccomp"), num_workers=1, timeout_s=0.2)
    errors = [run(box, code).error for code in (SLEEP, LOOP)]
    box.close()
    assert errors == ["time limit of 0.2 s exceeded, asleep", "CPU time limit of 0.2 s exceeded"]


def test_where_proc_is_hidden_the_wall_limit_ends_sleepers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clocks, "state", lambda pid: "")
    box = ProcessSandbox(backend("seccomp"), num_workers=1, timeout_s=0.2)
    looping = run(box, LOOP)
    monkeypatch.setattr(TimeLimit, "wall_s", 1.0)
    sleeping = run(box, SLEEP)
    box.close()
    assert looping.error == "CPU time limit of 0.2 s exceeded"
    assert sleeping.error == "wall time limit of 1 s exceeded"


class Fixed(Clock):
    """A clock that stands."""

    def __init__(self, wall_s: float, cpu_s: float, waited_s: float) -> None:
        super().__init__(1)
        self.times = wall_s, cpu_s, waited_s

    def wall_s(self) -> float:
        return self.times[0]

    def cpu_s(self) -> float:
        return self.times[1]

    def waited_s(self) -> float:
        return self.times[2]


CPU, IDLE, WALL = (
    "CPU time limit of 2 s exceeded",
    "time limit of 2 s exceeded, asleep",
    "wall time limit of 60 s exceeded",
)


@pytest.mark.parametrize(
    ("wall_s", "cpu_s", "waited_s", "state", "error"),
    [
        (1.9, 1.9, 0.0, "R", ""),
        (2.0, 2.0, 0.0, "R", CPU),
        (9.0, 2.0, 7.0, "S", CPU),
        (2.0, 0.0, 0.0, "S", IDLE),
        (2.0, 0.0, 0.0, "T", IDLE),
        (2.0, 1.0, 0.0, "S", IDLE),
        (2.0, 0.0, 0.1, "S", ""),
        (59.0, 1.0, 57.0, "S", IDLE),
        (59.0, 1.0, 57.1, "S", ""),
        (59.0, 1.0, 0.0, "R", ""),  # its wait is not over, so it is not in the count
        (59.0, 1.0, 0.0, "D", ""),
        (59.0, 1.0, 0.0, "Z", ""),
        (59.0, 1.0, 0.0, "", ""),
        (60.0, 1.0, 58.9, "R", WALL),
        (60.0, 1.0, 58.9, "Z", WALL),
    ],
)
def test_which_limit_strikes(
    monkeypatch: pytest.MonkeyPatch,
    wall_s: float,
    cpu_s: float,
    waited_s: float,
    state: str,
    error: str,
) -> None:
    monkeypatch.setattr(clocks, "state", lambda pid: state)
    assert TimeLimit(2.0).exceeded(Fixed(wall_s, cpu_s, waited_s)) == error


@given(st.floats(0.01, 3600), st.floats(0, 10), st.floats(0, 10))
def test_no_wait_below_the_wall_limit_matters(limit_s: float, used: float, waited: float) -> None:
    limit = TimeLimit(limit_s)
    cpu_s, waited_s = used * limit_s / 11, waited * limit.wall_s / 11
    error = limit.exceeded(Fixed(cpu_s + waited_s, cpu_s, waited_s))
    assert error == "" or cpu_s + waited_s >= limit.wall_s


def test_a_process_has_a_clock_and_a_state() -> None:
    mine = Clock(os.getpid())
    before = mine.cpu_s()
    assert sum(range(10**6)) and mine.cpu_s() > before > 0 and mine.wall_s() > 0
    assert mine.waited_s() >= 0 and clocks.state(os.getpid()) == "R"
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    gone = Clock(ended.pid)
    assert (gone.cpu_s(), gone.waited_s(), clocks.state(ended.pid)) == (0.0, 0.0, "")


# ---- around the sandbox


def coder(**agent: float) -> PythonCoder:
    tool = python_coder.make(ToolContext(Config.model_validate({"agent": agent})))
    assert isinstance(tool, PythonCoder)
    return tool


def test_the_tool_reports_the_times_of_the_code_also_when_it_fails() -> None:
    tool = coder(tool_timeout_s=0.3)
    computed, slept, failed, refused = (
        asyncio.run(run_tool(tool, {"query": query}, 60.0, 100))
        for query in (
            "sum(range(10 ** 6))",
            "import time\ntime.sleep(0.1)\nprint(1)",
            LOOP,
            "",
        )
    )
    tool.close()
    assert 0 < computed.cpu_s <= computed.seconds and computed.wall_s <= computed.seconds
    assert slept.cpu_s < 0.1 <= slept.wall_s
    assert failed.error == "CPU time limit of 0.3 s exceeded" and failed.cpu_s >= 0.3
    assert (refused.error, refused.wall_s, refused.cpu_s) == ("no code given", 0.0, 0.0)


def test_the_tool_s_deadline_leaves_the_sandbox_alone_but_the_rollout_s_does_not() -> None:
    """Ten runs of 0.2 s on one worker: the last waits for longer than `tool_timeout_s`."""
    tool = PythonCoder(ProcessSandbox(backend("seccomp"), num_workers=1, timeout_s=0.5))
    executor = Executor({"Python_Coder": tool}, timeout_s=0.5, max_chars=100)
    action = Action("", "", "import time\ntime.sleep(0.2)\nprint(1)", "Python_Coder")

    async def main(num: int, left_s: float) -> list[str]:
        done = await asyncio.gather(*(executor.execute("?", action, 0, left_s) for _ in range(num)))
        return [each.result.text for each in done]

    assert asyncio.run(main(10, 60.0)) == ["1"] * 10
    assert asyncio.run(main(10, 0.1)) == ["Error: timed out after 0.1 s"] * 10
    tool.close()
