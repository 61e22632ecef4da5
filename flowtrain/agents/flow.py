"""The turn loop: planner -> executor -> tool -> verifier -> memory, until STOP or a limit; then the generator.

                        +------------------------------------------+
question --> analyst --> planner --> executor --> tool --> verifier --> generator --> answer
                        ^ (trained)                        |  CONTINUE
                        +------------- memory <------------+
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from flowtrain.agents.analyst import Analyst
from flowtrain.agents.cutoff import Cutoff, TurnsEnded
from flowtrain.agents.executor import NO_COMMAND, Executor
from flowtrain.agents.generator import Generator
from flowtrain.agents.memory import Memory, MemoryEntry, bounded
from flowtrain.agents.planner import Planner, PromptTooLong
from flowtrain.agents.verifier import Verifier
from flowtrain.rollout.engine import EngineError
from flowtrain.seeds import derive_seed
from flowtrain.types import Action, Task, ToolResult, Trajectory, Turn, Verdict

MALFORMED = "the action was malformed"


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """When a rollout ends without STOP, and what it may hold."""

    max_turns: int
    timeout_s: float
    """No turn starts later than this; a running one is bounded by the time that is left."""
    module_timeout_s: float = 120.0
    """Seconds for each verdict and for the answer; the answer gets them also when the time is up."""
    memory_tokens: int = 0
    """Budget of the memory, see `bounded`; 0: none."""


class _RoleFailed(Exception):
    """A frozen module could not do its part, so the rollout says nothing about the planner."""


@dataclass(slots=True)
class _Rollout:
    """What one rollout has come to so far. A turn enters it as a whole or, when it is cut, not at all."""

    task: Task
    seed: int
    started: float
    memory: Memory = field(default_factory=Memory)
    """All that was found."""
    shown: Memory = field(default_factory=Memory)
    """As much of it as the budget allows: what the modules read."""
    turns: list[Turn] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Flow:
    """The modules and their limits. It holds no state of a rollout, so any number of them run at once."""

    planner: Planner
    executor: Executor
    verifier: Verifier
    generator: Generator
    limits: FlowLimits
    analyst: Analyst | None = None

    async def run(self, task: Task, seed: int, cutoff: Cutoff | None = None) -> Trajectory:
        """Roll out one task. A malformed action, an unknown tool or a failed one spends its turn and is seen by the next."""
        rollout = _Rollout(task, seed, time.monotonic())
        truncated, answer, output, error = "", "", "", ""
        try:
            truncated = await self._turns(rollout, cutoff or Cutoff())
            with _role("generator"):
                deadline_s = self.limits.module_timeout_s
                answer, output = await self.generator.answer(task.question, rollout.shown, derive_seed(seed, "generator"), deadline_s)
        except _RoleFailed as failed:
            error = str(failed)
        return Trajectory(
            task=task,
            turns=tuple(rollout.turns),
            answer=answer,
            seconds=time.monotonic() - rollout.started,
            seed=seed,
            truncated=truncated,
            analysis=rollout.memory.analysis,
            output=output,
            error=error,
        )

    async def _turns(self, rollout: _Rollout, cutoff: Cutoff) -> str:
        """Analyse, then take turns; why they ended before STOP, or ""."""
        try:
            async with cutoff():
                if self.analyst is not None:
                    with _role("analyst"):
                        analysis = await self.analyst.analyse(rollout.task.question)
                    rollout.memory = rollout.shown = Memory(analysis=analysis)
                while len(rollout.turns) < self.limits.max_turns:
                    left_s = self.limits.timeout_s - (time.monotonic() - rollout.started)
                    if left_s <= 0:
                        return "time"
                    if await self._turn(rollout, left_s) is Verdict.STOP:
                        return ""
                return "turns"
        except PromptTooLong:
            return "prompt"
        except TurnsEnded:
            return "straggler"

    async def _turn(self, rollout: _Rollout, left_s: float) -> Verdict:
        started = time.monotonic()
        task, index = rollout.task, len(rollout.turns)
        plan = await self.planner.plan(task, rollout.shown, index, rollout.seed, left_s)
        plan_s = time.monotonic() - started
        if plan.action is None:
            command, result = NO_COMMAND, ToolResult(error=MALFORMED)
        else:
            seed, left_now_s = derive_seed(rollout.seed, index, "executor"), max(0.0, left_s - plan_s)
            command, result = await self.executor.execute(task.question, plan.action, seed, left_now_s)
        memory = rollout.memory.add(_entry(plan.action, command, result))
        shown = bounded(memory, self.limits.memory_tokens, self.planner.measure) if self.limits.memory_tokens else memory
        seed, left_now_s = derive_seed(rollout.seed, index, "verifier"), max(0.0, left_s - (time.monotonic() - started))
        verdict, verdict_text = await self.verifier.verify(task.question, shown, seed, min(self.limits.module_timeout_s, left_now_s))
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
            verdict_text=verdict_text,
            plan_s=plan_s,
            response_kept=done.kept,
        )
        rollout.memory, rollout.shown = memory, shown
        rollout.turns.append(turn)
        return verdict


@contextmanager
def _role(name: str) -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise _RoleFailed(f"{name}: {error}") from error


def _entry(action: Action | None, command: str, result: ToolResult) -> MemoryEntry:
    if action is None:
        return MemoryEntry("None", "None", command, result.text)
    return MemoryEntry(action.tool_name, action.sub_goal, command, result.text)
