"""Scripted experts that warm policies up; they know each task's plan and err on purpose."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flowtrain.agents.conversation import Conversation
from flowtrain.agents.flow import Flow
from flowtrain.agents.generator import last_result
from flowtrain.agents.memory import Memory, MemoryEntry
from flowtrain.agents.planner import Plan, Planner, PolicyPlanner
from flowtrain.agents.refiner import Evidence, Finding, PolicyRefiner, best_passage
from flowtrain.agents.session import Session
from flowtrain.agents.tool_calling import ToolCallingAgent
from flowtrain.agents.tool_formats import WrittenCall
from flowtrain.agents.verifier import PolicyVerifier, Verification
from flowtrain.tasks.gameof24 import random_expression
from flowtrain.types import (
    Action,
    Call,
    Completion,
    FinishReason,
    PlanStep,
    PolicyName,
    Task,
    Verdict,
)
from flowtrain.utils.seeds import derive_seed

EARLY_STOP = 0.3
"""Probability per turn that a demonstrated verifier says STOP whatever the memory holds."""

WRONG_PASSAGE = 0.3
"""Probability per search that a demonstrated refiner copies whatever passage."""


@dataclass(frozen=True, slots=True)
class ScriptedPlanner(Planner):
    """Takes the next step of `task.plan`; with probability `error` it guesses instead.

    A guess has the step's sub-goal, but asks the base generator; in the game of 24 it is any
    expression of the numbers. Its tokens are those of `like`, the planner that learns from it.
    """

    like: PolicyPlanner
    error: float
    end_id: int
    """End-of-sequence token."""

    async def plan(
        self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
    ) -> Plan:
        assert task.plan, f"task {task.id} has no plan to follow"
        step = next_step(task, memory)
        rng = random.Random(derive_seed(seed, turn))
        action = (
            _guess(task, step, rng)
            if rng.random() < self.error
            else Action("", "", step.sub_goal, step.tool_name)
        )
        text = self.like.prompt.write(action)
        return Plan(self.like.imitate(task.prompt, memory, text, self.end_id), action)

    def measure(self, memory: Memory) -> int:
        return self.like.measure(memory)


@dataclass(frozen=True, slots=True)
class ScriptedVerifier:
    """Says STOP once the memory has all of `task.plan`; with probability `early_stop` at once.

    Its tokens and log-probs are made as those of `ScriptedPlanner`.
    """

    like: PolicyVerifier
    early_stop: float
    end_id: int

    async def verify(
        self, task: Task, memory: Memory, seed: int, deadline_s: float
    ) -> Verification:
        stops = random.Random(seed).random() < self.early_stop or not steps_left(task, memory)
        verdict = Verdict.STOP if stops else Verdict.CONTINUE
        text = self.like.prompt.write(verdict)
        call = self.like.imitate(task.prompt, memory, text, self.end_id)
        return Verification(verdict, self.like.prompt.prefix + text, call)


@dataclass(frozen=True, slots=True)
class ScriptedRefiner:
    """Copies the passage that `RuleRefiner` picks, or with probability `error` any of them.

    Its tokens and log-probs are made as those of `ScriptedPlanner`.
    """

    like: PolicyRefiner
    error: float
    end_id: int

    async def refine(self, finding: Finding, seed: int, deadline_s: float) -> Evidence:
        rng = random.Random(seed)
        passages = [line for line in finding.passages.splitlines() if line.strip()]
        errs = rng.random() < self.error and passages
        text = rng.choice(passages) if errs else best_passage(finding)
        return self.like.imitate(finding, text, self.end_id)


class ScriptedCaller(ToolCallingAgent):
    """Calls the tools of `task.plan` one by one, then answers with the last result.

    With probability `error` per call it asks the base generator instead, and answers with that.
    Its tokens are those of the agent that learns from it.
    """

    def __init__(self, like: ToolCallingAgent, error: float, end_id: int) -> None:
        super().__init__(like.context)
        self._error = error
        self._end_id = end_id

    async def respond(self, session: Session, conversation: Conversation) -> Call:
        task = session.task
        assert task.plan, f"task {task.id} has no plan to follow"
        memory = _memory(session)
        left = steps_left(task, memory)
        if not left or (memory.entries and memory.entries[-1].tool_name == "Base_Generator"):
            text = last_result(memory)
        else:
            rng = random.Random(derive_seed(session.seed, len(session.turns)))
            tool = "Base_Generator" if rng.random() < self._error else left[0].tool_name
            arguments = json.dumps({"query": left[0].sub_goal}, ensure_ascii=False)
            text = self.chat.format.write([WrittenCall(tool, arguments)])
        ids = (*self.chat.template.encode(text), self._end_id)
        completion = Completion(ids, (0.0,) * len(ids), (), FinishReason.STOP)
        return session.record(Call.of(conversation.prompt_ids, completion, text))


def _memory(session: Session) -> Memory:
    """Return the results so far as the steps of a plan."""
    memory = Memory()
    for used in (used for turn in session.turns for used in turn.tool_calls):
        query = str(json.loads(used.arguments).get("query", ""))
        memory = memory.add(MemoryEntry(used.name, query, used.arguments, used.result.text))
    return memory


def scripted(
    agent: Flow | ToolCallingAgent, error: float, ends: Mapping[PolicyName, int]
) -> Flow | ToolCallingAgent:
    """Return the agent with scripts in the place of its policies; its tasks must have plans.

    Args:
        error: see `ScriptedPlanner` and `ScriptedCaller`.
        ends: the end-of-sequence token of each policy.
    """
    if isinstance(agent, ToolCallingAgent):
        return ScriptedCaller(agent, error, ends["planner"])
    assert isinstance(agent.planner, PolicyPlanner), "scripts write in a policy's tokens"
    verifier = agent.verifier
    if isinstance(verifier, PolicyVerifier):
        verifier = ScriptedVerifier(verifier, EARLY_STOP, ends["verifier"])
    refiner = agent.refiner
    if isinstance(refiner, PolicyRefiner):
        refiner = ScriptedRefiner(refiner, WRONG_PASSAGE, ends["refiner"])
    planner = ScriptedPlanner(agent.planner, error, ends["planner"])
    return replace(agent, planner=planner, verifier=verifier, refiner=refiner)


def _guess(task: Task, step: PlanStep, rng: random.Random) -> Action:
    if task.scorer == "gameof24":
        return Action("", "", random_expression(task.answers, rng), step.tool_name)
    return Action("", "", step.sub_goal, "Base_Generator")


def next_step(task: Task, memory: Memory) -> PlanStep:
    """Return the first step of the plan that is left, or the last one when none is left."""
    left = steps_left(task, memory)
    return left[0] if left else task.plan[-1]


def steps_left(task: Task, memory: Memory) -> list[PlanStep]:
    """Return the steps of the plan that the memory does not have yet, in order."""
    left = list(task.plan)
    for entry in memory.entries:
        if left and (entry.sub_goal, entry.tool_name) == (left[0].sub_goal, left[0].tool_name):
            left.pop(0)
    return left
