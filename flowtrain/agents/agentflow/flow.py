"""The turn loop of AgentFlow.

Planner, executor, tool, verifier and memory take turns until STOP or a limit; then the generator
answers.

                        +------------------------------------------+
question --> analyst --> planner --> executor --> tool --> verifier --> generator --> answer
                        ^ (trained)                        |  CONTINUE
                        +------------- memory <------------+

Verifier and refiner can be policies of their own and be trained too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from flowtrain.agents.agentflow.analyst import Analyst
from flowtrain.agents.agentflow.executor import Executed, Executor
from flowtrain.agents.agentflow.generator import Answer, Generator
from flowtrain.agents.agentflow.memory import Budget, Memory, MemoryEntry
from flowtrain.agents.agentflow.planner import Plan, Planner
from flowtrain.agents.agentflow.refiner import Refiner
from flowtrain.agents.agentflow.verifier import Verifier
from flowtrain.agents.deadlines import Cutoff, Deadline, TurnsEnded
from flowtrain.agents.policy import Moment, PromptTooLong, opening
from flowtrain.inference.protocol import EngineError
from flowtrain.records import BranchStart, Call, PolicyName, Task, Trajectory, Turn, Verdict
from flowtrain.tasks.sub_goals import Hints
from flowtrain.utils.seeds import derive_seed

MALFORMED = "the action was malformed"
MODULE_TIMEOUT_S = 120.0
"""Seconds that a frozen module may take for one reply, retries included."""


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """Limits at which a rollout ends without STOP, and the size of its memory."""

    max_turns: int
    timeout_s: float
    """Seconds after which no turn starts; a running turn is bounded by the remaining time."""
    module_timeout_s: float = MODULE_TIMEOUT_S
    """Seconds for each verdict and for the answer, which gets them even after the timeout."""
    memory_tokens: int = 0
    """The `Budget` of the memory; 0: none."""


class _RoleFailed(Exception):
    """A frozen module failed, so the rollout says nothing about the planner."""


@dataclass(slots=True)
class _Rollout:
    """The state of a rollout, to which turns are added only as a whole."""

    task: Task
    seed: int
    deadline: Deadline
    budget: Budget
    memory: Memory = field(default_factory=Memory)
    """The complete memory."""
    shown: Memory = field(default_factory=Memory)
    """The memory within its budget, which the modules read."""
    turns: list[Turn] = field(default_factory=list)
    prefix: Call | None = None
    """The beginning of a branch's first turn."""
    hint_turn: int | None = None

    def module_seed(self, role: str) -> int:
        """Return the seed of a module in the present turn."""
        return derive_seed(self.seed, len(self.turns), role)


@dataclass(frozen=True, slots=True)
class Flow:
    """AgentFlow's agent: its modules and their limits. See `Agent`."""

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
        """Roll out one task.

        A malformed action, an unknown tool or a failed tool spends its turn, and the next turn
        reads the error. With `start` the rollout is a branch, which copies its parent up to that
        point, including tool results.
        """
        started = time.monotonic()
        deadline = Deadline(self.limits.timeout_s)
        rollout = _Rollout(task, seed, deadline, self._budget())
        if start is not None:
            parent, point = start.parent, start.point
            rollout.turns = list(parent.turns[: point.turn])
            rollout.memory = self._memory_before(parent, point.turn)
            rollout.shown = rollout.budget.bounded(rollout.memory)
            rollout.prefix = opening(parent.turns[point.turn].call, point.token)
        truncated, answer, error = "", Answer(""), ""
        try:
            truncated = await self._turns(rollout, cutoff or Cutoff())
            with _role("generator"):
                answer = await self.generator.answer(
                    task,
                    rollout.shown,
                    seed=derive_seed(seed, "generator"),
                    deadline_s=self.limits.module_timeout_s,
                )
        except _RoleFailed as failed:
            error = str(failed)
        return Trajectory(
            task=task,
            turns=tuple(rollout.turns),
            answer=answer.text,
            seconds=time.monotonic() - started,
            seed=seed,
            truncated=truncated,
            analysis=rollout.memory.analysis,
            output=answer.output,
            rescued=tuple(f"generator/{rule}" for rule in answer.rescued),
            error=error,
            branch=None if start is None else start.point,
            hint_turn=rollout.hint_turn,
        )

    def with_hints(self, hints: Hints | None) -> Flow:
        return replace(self, hints=hints)

    def close(self) -> None:
        """Do nothing: the creator of the flow owns its tools and engines."""

    def shown_before(self, trajectory: Trajectory, turn: int) -> Memory:
        """Return the memory that the modules read in the given turn, without hints."""
        return self._budget().bounded(self._memory_before(trajectory, turn))

    def _memory_before(self, trajectory: Trajectory, turn: int) -> Memory:
        memory = Memory(analysis=trajectory.analysis)
        for past_turn in trajectory.turns[:turn]:
            memory = memory.add(MemoryEntry.of(past_turn))
        return memory

    def _budget(self) -> Budget:
        return Budget(self.limits.memory_tokens, lambda memory: self.planner.measure(memory))

    async def _turns(self, rollout: _Rollout, cutoff: Cutoff) -> str:
        """Run the analyst and the turns; return why they ended before STOP, or ""."""
        try:
            async with cutoff():
                # A branch has its parent's analysis in its memory.
                if self.analyst is not None and rollout.prefix is None:
                    with _role("analyst"):
                        analysis = await self.analyst.analyse(rollout.task)
                    rollout.memory = rollout.shown = Memory(analysis=analysis)
                while len(rollout.turns) < self.limits.max_turns:
                    if not rollout.deadline.left_s():
                        return "time"
                    if await self._turn(rollout) is Verdict.STOP:
                        return ""
                return "turns"
        except PromptTooLong:
            return "prompt"
        except TurnsEnded:
            return "straggler"

    async def _turn(self, rollout: _Rollout) -> Verdict:
        started = time.monotonic()
        self._hint(rollout)
        plan = await self._plan(rollout)
        plan_s = time.monotonic() - started
        executed = Executed(None, MALFORMED)
        if plan.action is not None:
            executed = await self.executor.execute(
                rollout.task.prompt,
                plan.action,
                seed=rollout.module_seed("executor"),
                deadline_s=rollout.deadline.left_s(),
            )
        turn = Turn(
            calls={"planner": plan.call},
            action=plan.action,
            verdict=Verdict.CONTINUE,
            seconds=0.0,
            plan_s=plan_s,
            tool_calls=() if executed.tool_call is None else (executed.tool_call,),
            problem=executed.problem,
        )
        turn = await self._refine(rollout, turn)
        memory = rollout.memory.add(MemoryEntry.of(turn))
        shown = rollout.budget.bounded(memory)
        verified = await self.verifier.verify(
            rollout.task,
            shown,
            seed=rollout.module_seed("verifier"),
            deadline_s=self._module_s(rollout),
        )
        turn = replace(
            turn,
            calls=_with_call(turn.calls, "verifier", verified.call),
            verdict=verified.verdict,
            seconds=time.monotonic() - started,
            verdict_text=verified.text,
            rescued=(
                *(f"planner/{rule}" for rule in plan.rescued),
                *(f"executor/{rule}" for rule in executed.rescued),
                *(f"verifier/{rule}" for rule in verified.rescued),
            ),
        )
        rollout.memory = memory
        rollout.shown = shown
        rollout.turns.append(turn)
        return verified.verdict

    async def _plan(self, rollout: _Rollout) -> Plan:
        index = len(rollout.turns)
        seed = rollout.seed
        left_s = rollout.deadline.left_s()
        prefix = rollout.prefix
        rollout.prefix = None  # only the first turn of a branch completes a response
        if prefix is not None:
            return await self.planner.resume(prefix, index, seed, left_s)
        return await self.planner.plan(rollout.task, rollout.shown, index, seed, left_s)

    def _module_s(self, rollout: _Rollout) -> float:
        return min(self.limits.module_timeout_s, rollout.deadline.left_s())

    def _hint(self, rollout: _Rollout) -> None:
        """Give a stuck rollout its one hint, which then stays in its prompts."""
        if self.hints is None or rollout.hint_turn is not None:
            return
        if hint := self.hints.give(rollout.task, rollout.turns, rollout.seed):
            rollout.hint_turn = len(rollout.turns)
            rollout.memory = replace(rollout.memory, hint=hint)
            rollout.shown = rollout.budget.bounded(rollout.memory)

    async def _refine(self, rollout: _Rollout, turn: Turn) -> Turn:
        """Condense search results with the refiner; without evidence the passages stay."""
        action = turn.action
        if self.refiner is None or action is None or action.tool_name not in self.passage_tools:
            return turn
        (search,) = turn.tool_calls
        if search.result.error is not None:
            return turn
        moment = Moment(rollout.task, rollout.shown, action.sub_goal, search.result.output)
        text, call = await self.refiner.refine(
            moment, seed=rollout.module_seed("refiner"), deadline_s=self._module_s(rollout)
        )
        evidence = text if text.strip() else ""
        return replace(turn, calls=_with_call(turn.calls, "refiner", call), evidence=evidence)


def _with_call(
    calls: Mapping[PolicyName, Call], name: PolicyName, call: Call | None
) -> Mapping[PolicyName, Call]:
    return calls if call is None else {**calls, name: call}


@contextmanager
def _role(name: str) -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise _RoleFailed(f"{name}: {error}") from error
