"""Scripted experts that warm policies up; they know each task's plan and err on purpose."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from flowtrain.agents.agentflow.flow import Flow
from flowtrain.agents.agentflow.memory import Memory
from flowtrain.agents.agentflow.planner import ModelPlanner
from flowtrain.agents.agentflow.refiner import ModelRefiner, best_passage
from flowtrain.agents.agentflow.verifier import ModelVerifier
from flowtrain.agents.policy import Moment, Policy, Prompt
from flowtrain.records import Action, Call, PlanStep, Task, Verdict
from flowtrain.tasks.gameof24 import random_expression

T = TypeVar("T")

EARLY_STOP = 0.3
"""Probability per turn that a demonstrated verifier says STOP whatever the memory holds."""

WRONG_PASSAGE = 0.3
"""Probability per search that a demonstrated refiner copies whatever passage."""


Script = Callable[[Moment, random.Random], Action | Verdict | str]
"""Decides what to say at a moment, in the form that `Prompt.write` takes; errs on purpose."""


@dataclass(frozen=True, slots=True)
class ScriptVoice:
    """Says what a script decides, in the tokens of the policy that learns from it."""

    is_frozen: ClassVar[bool] = False

    policy: Policy
    script: Script

    async def reply(self, prompt: Prompt, moment: Moment, *, seed: int, deadline_s: float) -> Call:
        text = prompt.write(self.script(moment, random.Random(seed)))
        return self.policy.imitate(self.policy.read(prompt, moment), text, prompt.is_message)

    def measure(self, text: str) -> int:
        return self.policy.measure(text)


def plan_script(error: float) -> Script:
    """Take the next step of `task.plan`; with probability `error` guess instead.

    A guess has the step's sub-goal, but asks the base generator; in the game of 24 it is any
    expression of the numbers.
    """

    def next_action(moment: Moment, rng: random.Random) -> Action:
        task = moment.task
        assert task.plan, f"task {task.id} has no plan to follow"
        step = next_step(task, moment.memory)
        if rng.random() >= error:
            return Action("", "", step.sub_goal, step.tool_name)
        if task.scorer == "gameof24":
            return Action("", "", random_expression(task.answers, rng), step.tool_name)
        return Action("", "", step.sub_goal, "Base_Generator")

    return next_action


def verdict_script(early_stop: float) -> Script:
    """Say STOP once the memory has all of `task.plan`; with probability `early_stop` at once."""

    def verdict(moment: Moment, rng: random.Random) -> Verdict:
        stops = rng.random() < early_stop or not steps_left(moment.task, moment.memory)
        return Verdict.STOP if stops else Verdict.CONTINUE

    return verdict


def passage_script(error: float) -> Script:
    """Copy the passage that `RuleRefiner` picks, or with probability `error` any of them."""

    def passage(moment: Moment, rng: random.Random) -> str:
        passages = [line for line in moment.passages.splitlines() if line.strip()]
        errs = rng.random() < error and passages
        return rng.choice(passages) if errs else best_passage(moment)

    return passage


def scripted(flow: Flow, error: float) -> Flow:
    """Return the flow with scripts in the place of its policies; its tasks must have plans.

    Args:
        error: see `plan_script`.
    """
    return replace(
        flow,
        planner=with_script(flow.planner, plan_script(error)),
        verifier=with_script(flow.verifier, verdict_script(EARLY_STOP)),
        refiner=with_script(flow.refiner, passage_script(WRONG_PASSAGE)),
    )


def with_script(module: T, script: Script) -> T:
    """Return a module with a script as its voice, where a policy has been that."""
    match module:
        case ModelPlanner() | ModelVerifier() | ModelRefiner() if isinstance(module.voice, Policy):
            return replace(module, voice=ScriptVoice(module.voice, script))
    return module


def next_step(task: Task, memory: Memory) -> PlanStep:
    """Return the first step of the plan that is left, or the last one when none is left."""
    steps = steps_left(task, memory)
    return steps[0] if steps else task.plan[-1]


def steps_left(task: Task, memory: Memory) -> list[PlanStep]:
    """Return the steps of the plan that the memory does not have yet, in order."""
    steps = list(task.plan)
    for entry in memory.entries:
        if steps and (entry.sub_goal, entry.tool_name) == (steps[0].sub_goal, steps[0].tool_name):
            steps.pop(0)
    return steps
