"""The turn loop: planner -> executor -> tool -> verifier -> memory, until STOP or a limit; then the generator.

             +------------------------------------------+
question --> planner --> executor --> tool --> verifier --> generator --> answer
             ^ (trained)                        |  CONTINUE
             +------------- memory <------------+
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from flowtrain.agents.executor import NO_COMMAND, Executor
from flowtrain.agents.generator import Generator
from flowtrain.agents.memory import Memory, MemoryEntry
from flowtrain.agents.planner import Planner, PromptTooLong
from flowtrain.agents.verifier import Verifier
from flowtrain.types import Action, Task, ToolResult, Trajectory, Turn, Verdict

MALFORMED = "the action was malformed"


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """When a rollout ends without STOP."""

    max_turns: int
    timeout_s: float
    """No turn starts later than this; a running one is bounded by the time that is left."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Four modules and their limits. It holds no state of a rollout, so any number of them run at once."""

    planner: Planner
    executor: Executor
    verifier: Verifier
    generator: Generator
    limits: FlowLimits

    async def run(self, task: Task, seed: int) -> Trajectory:
        """Roll out one task. A malformed action, an unknown tool or a failed one spends its turn and is seen by the next."""
        started = time.monotonic()
        memory, truncated = Memory(), "turns"
        turns: list[Turn] = []
        while len(turns) < self.limits.max_turns:
            left_s = self.limits.timeout_s - (time.monotonic() - started)
            if left_s <= 0:
                truncated = "time"
                break
            try:
                turn, memory = await self._turn(task, memory, len(turns), seed, left_s)
            except PromptTooLong:
                truncated = "prompt"
                break
            turns.append(turn)
            if turn.verdict is Verdict.STOP:
                truncated = ""
                break
        answer = await self.generator.answer(task.question, memory)
        return Trajectory(task, tuple(turns), answer, time.monotonic() - started, seed, truncated)

    async def _turn(self, task: Task, memory: Memory, index: int, seed: int, left_s: float) -> tuple[Turn, Memory]:
        started = time.monotonic()
        plan = await self.planner.plan(task, memory, index, seed, left_s)
        plan_s = time.monotonic() - started
        if plan.action is None:
            command, result = NO_COMMAND, ToolResult(error=MALFORMED)
        else:
            command, result = await self.executor.execute(plan.action, max(0.0, left_s - plan_s))
        memory = memory.add(_entry(plan.action, command, result))
        verdict = await self.verifier.verify(task.question, memory)
        done = plan.completion
        turn = Turn(
            prompt_ids=plan.prompt_ids,
            response_ids=done.ids,
            response_logprobs=done.logprobs,
            spans=done.spans,
            finish_reason=done.finish_reason,
            response_text=plan.text,
            action=plan.action,
            command=command,
            result=result,
            verdict=verdict,
            seconds=time.monotonic() - started,
            plan_s=plan_s,
        )
        return turn, memory


def _entry(action: Action | None, command: str, result: ToolResult) -> MemoryEntry:
    if action is None:
        return MemoryEntry("None", "None", command, result.text)
    return MemoryEntry(action.tool_name, action.sub_goal, command, result.text)
