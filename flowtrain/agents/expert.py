"""The scripted expert that warms a planner up: it knows each task's plan and errs on purpose."""

from __future__ import annotations

import random
from dataclasses import dataclass

from flowtrain.agents.memory import Memory
from flowtrain.agents.planner import Opening, Plan, PolicyPlanner
from flowtrain.seeds import derive_seed
from flowtrain.tasks.gameof24 import random_expression
from flowtrain.types import Action, Completion, FinishReason, PlanStep, Task


@dataclass(frozen=True, slots=True)
class ScriptedPlanner:
    """Follows `task.plan` from where the memory has got to; with probability `error` it guesses instead.

    A guess has the step's sub-goal, but asks the base generator; in the game of 24 it is any expression of the numbers. Its tokens are
    those of `like`, the planner that shall learn from it; its log-probs are 0, because nobody sampled them.
    """

    like: PolicyPlanner
    error: float
    end_id: int
    """End-of-sequence token."""

    async def plan(self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float) -> Plan:
        assert task.plan, f"task {task.id} has no plan to follow"
        step = next_step(task, memory)
        rng = random.Random(derive_seed(seed, turn))
        action = _guess(task, step, rng) if rng.random() < self.error else Action("", "", step.sub_goal, step.tool_name)
        text = self.like.prompt.write(action)
        ids = (*self.like.tokenizer.encode(text, add_special_tokens=False), self.end_id)
        completion = Completion(ids, (0.0,) * len(ids), (), FinishReason.STOP)
        return Plan(self.like.encode(task.question, memory), completion, text, action)

    def measure(self, memory: Memory) -> int:
        return self.like.measure(memory)

    async def resume(self, opening: Opening, turn: int, seed: int, deadline_s: float) -> Plan:
        raise AssertionError("nobody branches from an expert")


def _guess(task: Task, step: PlanStep, rng: random.Random) -> Action:
    if task.scorer == "gameof24":
        return Action("", "", random_expression(task.answers, rng), step.tool_name)
    return Action("", "", step.sub_goal, "Base_Generator")


def next_step(task: Task, memory: Memory) -> PlanStep:
    """The first step of the plan that the memory has not done yet, in order; the last one when all are done."""
    remaining = list(task.plan)
    for entry in memory.entries:
        if len(remaining) > 1 and (entry.sub_goal, entry.tool_name) == (remaining[0].sub_goal, remaining[0].tool_name):
            remaining.pop(0)
    return remaining[0]
