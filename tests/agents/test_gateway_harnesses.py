"""Harnesses as their vendors publish them, each where it is installed: they solve a task with a
tool of their own, and what they made of the history is trained id by id.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from gateway_runs import calls_of, logging_engine, make_agent, roll_out

EXAMPLES = Path(__file__).parents[2] / "examples" / "gateway"
ANSWER = "<answer>1284</answer>"


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


LOOK = "echo seen-by-$((40 + 2))"
SUBMIT = f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo '{ANSWER}'"
HARNESSES = {
    "claude": ("claude_code.sh", call("Bash", command=LOOK, description="look"), ANSWER),
    "codex": ("codex.sh", call("exec_command", cmd=LOOK), ANSWER),
    "openhands": (
        "openhands.sh",
        call("terminal", command=LOOK, security_risk="LOW"),
        call("finish", message=ANSWER, security_risk="LOW"),
    ),
    "mini": ("mini_swe_agent.sh", call("bash", command=LOOK), call("bash", command=SUBMIT)),
}
"""By the program that must be there: how it is run, a call of its shell, and how it answers."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("program", HARNESSES)
def test_a_harness_is_trained_as_it_is(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    script, look, answer = HARNESSES[program]
    engine = logging_engine(f"Let me look.\n{look}", answer, max_tokens=200_000)
    command = [str(EXAMPLES / script)]
    agent = make_agent(engine, command=command, agent={"rollout_timeout_s": 100.0})
    try:
        trajectory = roll_out(agent, limit_s=110)
    finally:
        agent.close()
    assert trajectory.error == "", trajectory.error
    assert trajectory.answer == "1284" and calls_of(trajectory) == engine.log
    (prompt, said), (later, _) = engine.log
    assert later[: len(prompt) + len(said)] == prompt + said
    (used,) = trajectory.turns[0].tool_calls
    assert "seen-by-42" in used.result.output
