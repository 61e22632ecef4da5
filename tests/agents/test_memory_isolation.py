"""A rollout's memory is its own: many rollouts through one flow, each with a secret, and no prompt
holds another's.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence

import pytest
from char_tokenizer import CharTokenizer

from flowtrain.agents.executor import RuleExecutor
from flowtrain.agents.flow import Flow, FlowLimits
from flowtrain.agents.generator import RuleGenerator, last_result
from flowtrain.agents.memory import Memory
from flowtrain.agents.planner import PolicyPlanner
from flowtrain.agents.policy import Policy
from flowtrain.agents.prompts import CompactPrompt, FullPrompt, PlannerPrompt
from flowtrain.agents.verifier import RuleVerifier
from flowtrain.tools import ToolCard
from flowtrain.types import Completion, FinishReason, Sampling, Task, Trajectory

SECRET = re.compile(r"SECRET-\d+-END")
NUM_ROLLOUTS = 20


class FakeEngine:
    """Repeats the first secret of the prompt as the sub-goal, after a wait that mixes the rollouts
    up; remembers every prompt.
    """

    version, max_tokens = 0, 100_000

    def __init__(self, label: str) -> None:
        self.prompts: list[str] = []
        self._label = label

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        prompt = "".join(map(chr, prompt_ids))
        self.prompts.append(prompt)
        for _ in range(random.Random(sampling.seed).randrange(10)):
            await asyncio.sleep(0)
        secret = SECRET.findall(prompt)[0]
        ids = tuple(map(ord, f"{self._label} tell {secret}\nTool Name: Echo"))
        return Completion(ids, (0.0,) * len(ids), (), FinishReason.STOP)

    def load(self, version: int) -> None:
        raise NotImplementedError


class FakeEcho:
    """A tool that every rollout shares."""

    card = ToolCard("Echo", "Says the query again.")

    async def execute(self, query: str) -> str:
        await asyncio.sleep(0)
        return f"heard {query}"

    def close(self) -> None:
        pass


def never(question: str, memory: Memory) -> bool:
    return False


@pytest.mark.parametrize(
    ("prompt", "label"),
    [(CompactPrompt(), ""), (FullPrompt([FakeEcho()], CharTokenizer()), "Sub-Goal:")],
)
def test_no_prompt_holds_the_secret_of_another_rollout(prompt: PlannerPrompt, label: str) -> None:
    engine = FakeEngine(label)
    planner = PolicyPlanner(Policy(engine, CharTokenizer(), 100, 1.0, 30.0), prompt, ("Echo",))
    executor = RuleExecutor({"Echo": FakeEcho()}, 30.0, 200)
    flow = Flow(
        planner, executor, RuleVerifier(never), RuleGenerator(last_result), FlowLimits(4, 60.0)
    )

    async def all_at_once() -> list[Trajectory]:
        tasks = [
            Task(f"task-{i}", f"What is behind SECRET-{i}-END?", ("",)) for i in range(NUM_ROLLOUTS)
        ]
        return list(
            await asyncio.gather(*(flow.run(task, seed) for seed, task in enumerate(tasks)))
        )

    trajectories = asyncio.run(all_at_once())
    assert len(engine.prompts) == 4 * NUM_ROLLOUTS
    for text in engine.prompts:
        assert len(set(SECRET.findall(text))) == 1, text
    for i, trajectory in enumerate(trajectories):
        assert trajectory.answer == f"heard tell SECRET-{i}-END"
        # The last prompt holds three turns of its own, so that the check above had something to
        # look at.
        last = "".join(map(chr, trajectory.turns[-1].calls["planner"].prompt_ids))
        assert last.count(f"heard tell SECRET-{i}-END") == 3
    order = [SECRET.findall(text)[0] for text in engine.prompts]
    assert order != sorted(order, key=lambda secret: order.index(secret)), (
        "the rollouts did not overlap"
    )


def test_a_rollout_after_another_starts_with_an_empty_memory() -> None:
    engine = FakeEngine("")
    planner = PolicyPlanner(
        Policy(engine, CharTokenizer(), 100, 1.0, 30.0), CompactPrompt(), ("Echo",)
    )
    executor = RuleExecutor({"Echo": FakeEcho()}, 30.0, 200)
    flow = Flow(
        planner, executor, RuleVerifier(never), RuleGenerator(last_result), FlowLimits(2, 60.0)
    )
    for i in range(2):
        asyncio.run(flow.run(Task("t", f"SECRET-{i}-END", ("",)), 0))
    assert engine.prompts[2] == "Question: SECRET-1-END\nSub-Goal:"
