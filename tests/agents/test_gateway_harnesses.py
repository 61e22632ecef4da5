"""Harnesses as their vendors publish them, each where it is installed: they solve a task with a
tool of their own, and what they made of the history is trained id by id.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from gateway_runs import calls_of, logging_engine, make_agent, roll_out

from flowtrain.types import Trajectory

EXAMPLES = Path(__file__).parents[2] / "examples" / "gateway"
HARNESSES = {
    "claude": ("claude_code.sh", {"name": "Bash", "key": "command", "description": "look"}),
    "codex": ("codex.sh", {"name": "exec_command", "key": "cmd"}),
}
"""By the program that must be there: how it is run, and its tool for a shell."""


def solve(script: str, tool: dict[str, str]) -> Trajectory:
    name, key, *_ = tool.values()
    given = {key: "echo seen-by-$((40 + 2))", **dict([*tool.items()][2:])}
    call = f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>"
    engine = logging_engine(f"Let me look.\n{call}", "<answer>1284</answer>", max_tokens=200_000)
    agent = make_agent(engine, command=[str(EXAMPLES / script)], agent={"rollout_timeout_s": 100.0})
    try:
        trajectory = roll_out(agent, limit_s=110)
    finally:
        agent.close()
    assert trajectory.error == "", trajectory.error
    assert calls_of(trajectory) == engine.log
    (prompt, said), (later, _) = engine.log
    assert later[: len(prompt) + len(said)] == prompt + said
    return trajectory


@pytest.mark.timeout(120)
@pytest.mark.parametrize("program", HARNESSES)
def test_a_harness_is_trained_as_it_is(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    trajectory = solve(*HARNESSES[program])
    assert trajectory.answer == "1284"
    (call,) = trajectory.turns[0].tool_calls
    assert "seen-by-42" in call.result.output
