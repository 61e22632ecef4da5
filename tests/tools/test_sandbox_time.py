"""The limits of time: computing counts, and wall time ends what does not compute."""

from __future__ import annotations

import asyncio
import sys

import pytest

from flowtrain.agents.agentflow.executor import Executor
from flowtrain.config import Config
from flowtrain.records import Action
from flowtrain.tools import ToolContext, python_coder, run_tool
from flowtrain.tools.python_coder import PythonCoder
from flowtrain.tools.sandbox.host import CodeResult, ProcessSandbox
from tests.attacks.sandboxes import KINDS, backend

pytestmark = [
    pytest.mark.clock,
    pytest.mark.skipif(sys.platform != "linux", reason="the clocks are Linux's"),
]

LOOP = "while True: pass"
SLEEP = "import time\ntime.sleep(1000)"
DOZE = "import time\nwhile True: time.sleep(0.001)"


def run(box: ProcessSandbox, code: str) -> CodeResult:
    return asyncio.run(box.run(code))


@pytest.mark.parametrize(("code", "printed"), [(LOOP, ""), (f"print('x')\n{LOOP}", "x\n")])
def test_a_loop_ends_at_its_limit_of_computing(code: str, printed: str) -> None:
    box = ProcessSandbox(backend("seccomp"), num_workers=1, timeout_s=0.1)
    ran = run(box, code)
    box.close()
    assert (ran.output, ran.error) == (printed, "CPU time limit of 0.1 s exceeded")
    assert 0.1 <= ran.cpu_s < 1.0


def test_what_it_computed_counts_to_the_end() -> None:
    """Also where it ends between two looks at its clock."""
    box = ProcessSandbox(backend("seccomp"), num_workers=1, timeout_s=0.01)
    ran = run(box, "import time\nwhile time.process_time() < 0.03: pass\nprint(1)")
    box.close()
    assert (ran.output, ran.error) == ("1\n", "CPU time limit of 0.01 s exceeded")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", [SLEEP, DOZE])
def test_wall_time_ends_an_idle_program(kind: str, code: str) -> None:
    box = ProcessSandbox(backend(kind), num_workers=1, timeout_s=0.5)
    assert box._workers.limits["wall_s"] == 10.0
    box._workers.limits["wall_s"] = 0.2
    ran = run(box, code)
    box.close()
    assert ran.error == "wall time limit of 0.2 s exceeded"
    assert ran.wall_s >= 0.2 > ran.cpu_s


# ---- around the sandbox


def coder(**agent: float) -> PythonCoder:
    tool = python_coder.make(ToolContext(Config.model_validate({"agent": agent})))
    assert isinstance(tool, PythonCoder)
    return tool


def test_the_tool_reports_the_times_of_the_code_also_when_it_fails() -> None:
    tool = coder(tool_timeout_s=0.3)
    computed, slept, failed, refused = (
        asyncio.run(run_tool(tool, {"query": query}, 60.0, 100))
        for query in ("sum(range(10 ** 6))", "import time\ntime.sleep(0.1)\nprint(1)", LOOP, "")
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
        return [each.tool_call.result.text for each in done if each.tool_call]

    assert asyncio.run(main(10, 60.0)) == ["1"] * 10
    assert asyncio.run(main(10, 0.1)) == ["Error: timed out after 0.1 s"] * 10
    tool.close()
