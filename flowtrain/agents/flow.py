"""The turn loop: planner -> executor -> tool -> verifier -> memory, until STOP or a limit; then the
generator.

                        +------------------------------------------+
question --> analyst --> planner --> executor --> tool --> verifier --> generator --> answer
                        ^ (trained)                        |  CONTINUE
                        +------------- memory <------------+

The verifier can be a policy of its own, and be trained too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from flowtrain.agents.analyst import Analyst
from flowtrain.agents.cutoff import Cutoff, TurnsEnded
from flowtrain.agents.executor import NO_COMMAND, Executor
from flowtrain.agents.generator import Generator
from flowtrain.agents.hints import Hints
from flowtrain.agents.memory import Memory, MemoryEntry, bounded
from flowtrain.agents.planner import Planner, PromptTooLong, ResponsePrefix
from flowtrain.agents.refiner import Refiner
from flowtrain.agents.verifier import Verifier
from flowtrain.engines.protocol import EngineError
from flowtrain.types import (
    Action,
    BranchPoint,
    Call,
    PolicyName,
    Task,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
)
from flowtrain.utils.seeds import derive_seed

MALFORMED = "the action was malformed"


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """When a rollout ends without STOP, and what it may hold."""

    max_turns: int
    timeout_s: float
    """No turn starts later than this; a running one is bounded by the time that is left."""
    module_timeout_s: float = 120.0
    """Seconds for each verdict and for the answer; the answer gets them also when the time is up.
    """
    memory_tokens: int = 0
    """Budget of the memory, see `bounded`; 0: none."""


class _RoleFailed(Exception):
    """A frozen module could not do its part, so the rollout says nothing about the planner."""


@dataclass(slots=True)
class _Rollout:
    """What one rollout has come to so far. A turn enters it as a whole or, when it is cut, not at
    all.
    """

    task: Task
    seed: int
    started: float
    memory: Memory = field(default_factory=Memory)
    """All that was found."""
    shown: Memory = field(default_factory=Memory)
    """As much of it as the budget allows: what the modules read."""
    turns: list[Turn] = field(default_factory=list)
    opening: ResponsePrefix | None = None
    """How a branch's first turn begins."""
    hint_turn: int | None = None


@dataclass(frozen=True, slots=True)
class BranchStart:
    """Where a branch begins: at a place within a rollout that is done."""

    root: Trajectory
    point: BranchPoint

    def turns(self) -> list[Turn]:
        """What happened before the turn that is sampled anew, in part or in whole."""
        return list(self.root.turns[: self.point.turn])

    def opening(self) -> ResponsePrefix:
        return ResponsePrefix.of(self.root.turns[self.point.turn], self.point.token)


@dataclass(frozen=True, slots=True)
class Flow:
    """The modules and their limits. It holds no state of a rollout, so any number of them run at
    once.
    """

    planner: Planner
    executor: Executor
    verifier: Verifier
    generator: Generator
    limits: FlowLimits
    analyst: Analyst | None = None
    hints: Hints | None = None
    refiner: Refiner | None = None
    passage_tools: frozenset[str] = frozenset()
    """Tools whose results the refiner reads before the memory gets them."""

    async def run(
        self, task: Task, seed: int, cutoff: Cutoff | None = None, start: BranchStart | None = None
    ) -> Trajectory:
        """Roll out one task. A malformed action, an unknown tool or a failed one spends its turn
        and is seen by the next.

        With `start` the rollout leaves another one: what comes before that place is taken over,
        tool results included.
        """
        rollout = _Rollout(task, seed, time.monotonic())
        if start is not None:
            self._rewind(rollout, start)
        truncated, answer, output, error = "", "", "", ""
        try:
            truncated = await self._turns(rollout, cutoff or Cutoff())
            with _role("generator"):
                deadline_s = self.limits.module_timeout_s
                answer, output = await self.generator.answer(
                    task.question, rollout.shown, derive_seed(seed, "generator"), deadline_s
                )
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
            branch=None if start is None else start.point,
            hint_turn=rollout.hint_turn,
        )

    def _rewind(self, rollout: _Rollout, start: BranchStart) -> None:
        """Bring the rollout to where it leaves the other one."""
        rollout.memory, rollout.turns = _memory_before(start.root, start.point.turn), start.turns()
        rollout.shown, rollout.opening = self._shown(rollout.memory), start.opening()

    def shown_before(self, trajectory: Trajectory, turn: int) -> Memory:
        """What the modules of that turn read, a hint apart."""
        return self._shown(_memory_before(trajectory, turn))

    def _shown(self, memory: Memory) -> Memory:
        return (
            bounded(memory, self.limits.memory_tokens, self.planner.measure)
            if self.limits.memory_tokens
            else memory
        )

    async def _turns(self, rollout: _Rollout, cutoff: Cutoff) -> str:
        """Analyse, then take turns; why they ended before STOP, or ""."""
        try:
            async with cutoff():
                if self.analyst is not None and rollout.opening is None:
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
        self._hint(rollout)
        opening, rollout.opening = rollout.opening, None
        if opening is None:
            plan = await self.planner.plan(task, rollout.shown, index, rollout.seed, left_s)
        else:
            plan = await self.planner.resume(opening, index, rollout.seed, left_s)
        plan_s = time.monotonic() - started
        if plan.action is None:
            command, result = NO_COMMAND, ToolResult(error=MALFORMED)
        else:
            seed, left_now_s = (
                derive_seed(rollout.seed, index, "executor"),
                max(0.0, left_s - plan_s),
            )
            command, result = await self.executor.execute(
                task.question, plan.action, seed, left_now_s
            )
        result, retrieved = await self._refined(
            rollout, plan.action, result, max(0.0, left_s - (time.monotonic() - started))
        )
        memory = rollout.memory.add(MemoryEntry.of(plan.action, command, result))
        shown = self._shown(memory)
        seed, left_now_s = (
            derive_seed(rollout.seed, index, "verifier"),
            max(0.0, left_s - (time.monotonic() - started)),
        )
        verified = await self.verifier.verify(
            task, shown, seed, min(self.limits.module_timeout_s, left_now_s)
        )
        calls: dict[PolicyName, Call] = {"planner": plan.call}
        if verified.call is not None:
            calls["verifier"] = verified.call
        turn = Turn(
            calls=calls,
            action=plan.action,
            command=command,
            result=result,
            verdict=verified.verdict,
            seconds=time.monotonic() - started,
            verdict_text=verified.text,
            plan_s=plan_s,
            retrieved=retrieved,
        )
        rollout.memory, rollout.shown = memory, shown
        rollout.turns.append(turn)
        return verified.verdict

    def _hint(self, rollout: _Rollout) -> None:
        """One hint per rollout at most; it stays in sight."""
        hint = (
            self.hints.give(rollout.task, rollout.turns, rollout.seed)
            if self.hints and rollout.hint_turn is None
            else ""
        )
        if hint:
            rollout.hint_turn, rollout.memory = (
                len(rollout.turns),
                replace(rollout.memory, hint=hint),
            )
            rollout.shown = self._shown(rollout.memory)

    async def _refined(
        self, rollout: _Rollout, action: Action | None, result: ToolResult, left_s: float
    ) -> tuple[ToolResult, str]:
        """(what the memory gets, what the tool gave where that differs). Passages that the refiner
        fails on stay as they are.
        """
        if (
            self.refiner is None
            or action is None
            or action.tool_name not in self.passage_tools
            or result.error is not None
        ):
            return result, ""
        seed, deadline_s = (
            derive_seed(rollout.seed, len(rollout.turns), "refiner"),
            min(self.limits.module_timeout_s, left_s),
        )
        question, sub_goal, passages = rollout.task.question, action.sub_goal, result.output
        try:
            text = await self.refiner.refine(
                question, rollout.shown, sub_goal, passages, seed, deadline_s
            )
        except EngineError:
            return result, ""
        return (replace(result, output=text), passages) if text.strip() else (result, "")


@contextmanager
def _role(name: str) -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise _RoleFailed(f"{name}: {error}") from error


def _memory_before(trajectory: Trajectory, turn: int) -> Memory:
    memory = Memory(analysis=trajectory.analysis)
    for done in trajectory.turns[:turn]:
        memory = memory.add(MemoryEntry.of(done.action, done.command, done.result))
    return memory
