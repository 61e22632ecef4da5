"""Rewards by the checkers of reasoning-gym, each answer in a process of its own with limits.

The checkers were written for honest answers: some evaluate them, some take for ever, some raise.
So they run in the sandbox of the tool Python_Coder, and an answer that cannot be scored gets 0 for
a reason that `Trajectory.scored_by` names.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path

from flowtrain.tools.sandbox import make_checker_sandbox
from flowtrain.tools.sandbox.host import ProcessSandbox
from flowtrain.types import Task, UserError
from flowtrain.utils.per_loop import Together

NAME = "reasoning-gym"
"""The scorer in `Task.scorer`."""
MAX_CHARS = 8000
"""Characters of an answer; a longer one is not scored."""
TIME_LIMIT_S = 5.0
"""CPU time for one answer."""
MEMORY_MB = 2048
"""Address space for one answer; numpy and sympy alone take some hundred MiB of it."""
FAILURES = ("too long", "time limit", "memory limit", "checker raised", "process died")
"""Why an answer gets 0 without the checker's word, as `scored_by` has it after the name."""

_SOURCE = Path(__file__).with_name("gym_child.py")


def check(task: Task) -> None:
    """Raise UserError for a task without the data that its checker needs."""
    if not task.entry:
        raise UserError(
            f"task {task.id!r}: scorer {NAME!r} is for tasks of tasks.name={NAME!r} alone"
        )


def start() -> None:
    """Make the sandbox before there is an answer; raises UserError where it does not work here."""
    _sandbox()


def failure_of(scored_by: str) -> str:
    """Return the reason in a `scored_by`, or "" where there is none."""
    name, _, failure = scored_by.partition(": ")
    return failure if name == NAME else ""


async def score(task: Task, answer: str) -> tuple[float, str]:
    """Return the reward of a final answer, from 0 to 1 with partial credit, and `scored_by`; equal
    ones side by side are scored once.
    """
    return await _together((task.entry, answer))


async def _check_one(cases: Sequence[tuple[str, str]]) -> list[tuple[float, str]]:
    return [await _checked(*case) for case in cases]


_together = Together(_check_one)


async def _checked(entry: str, answer: str) -> tuple[float, str]:
    if not answer:
        return 0.0, NAME
    if len(answer) > MAX_CHARS:
        return _failed("too long")
    ran = await _sandbox().run(
        f"{_SOURCE.read_text('utf-8')}\nprint(score({entry!r}, {answer!r}))\n"
    )
    if ran.error is not None:
        return _failed(_failure(ran.error))
    try:
        found = json.loads(ran.output.rstrip().rpartition("\n")[2])
        reward = float(found["reward"])
    except (ValueError, KeyError, TypeError):  # {"error": ...}, or nothing of ours
        return _failed("checker raised")
    if not math.isfinite(reward):
        return _failed("checker raised")
    return min(max(reward, 0.0), 1.0), NAME


def _failed(reason: str) -> tuple[float, str]:
    return 0.0, f"{NAME}: {reason}"


def _failure(problem: str) -> str:
    """Name the failure that the sandbox describes."""
    if "time limit" in problem:
        return "time limit"
    if "memory limit" in problem or "MemoryError" in problem:
        return "memory limit"
    return "process died"


@functools.cache
def _sandbox() -> ProcessSandbox:
    """Make the sandbox with the first answer; its processes end with this one."""
    return make_checker_sandbox("reasoning_gym", TIME_LIMIT_S, MEMORY_MB, only_parses=False)
