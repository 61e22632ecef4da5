"""Benchmark of rollouts that wait for tools: the real flow, collector and engine, and slow tools.

Each call takes a log-normal time, with a long tail, that its question and turn decide, so both
rivals wait for the same calls.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from flowtrain.agents.agentflow.executor import Executor
from flowtrain.agents.agentflow.flow import Flow, FlowLimits
from flowtrain.agents.agentflow.generator import Generator
from flowtrain.agents.agentflow.memory import Memory
from flowtrain.agents.agentflow.planner import Plan
from flowtrain.agents.agentflow.verifier import RuleVerifier
from flowtrain.agents.collect import collect
from flowtrain.agents.policy import ResponsePrefix
from flowtrain.engines.protocol import Engine
from flowtrain.tools import ToolCard
from flowtrain.types import Action, Call, Sampling, Task

MEDIAN_S, SIGMA = 0.2, 0.8
"""Log-normal time of a tool call: 1 % take 1.3 s or more, the longest of a run about 3 s."""
TURNS, GROUP_SIZE, NEW_TOKENS = 3, 8, 4
"""Few tokens and short prompts, so that sampling on a CPU does not hide the waiting."""
IN_FLIGHT, WORKERS = 256, 16


class SimulatedTool:
    """Sleeps for a time that its query decides, and records it."""

    card = ToolCard("Simulated", "Sleeps.")

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def execute(self, query: str) -> str:
        self.seconds.append(random.Random(query).lognormvariate(log(MEDIAN_S), SIGMA))
        await asyncio.sleep(self.seconds[-1])
        return "done"

    def close(self) -> None:
        """Release nothing."""


@dataclass(frozen=True, slots=True)
class SamplingPlanner:
    """Samples a response as the policy does, then always calls the tool."""

    engine: Engine

    async def plan(
        self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
    ) -> Plan:
        order = random.Random(task.id)
        prompt = tuple(order.randrange(5, 250) for _ in range(8 + 4 * turn))
        done = await self.engine.generate(
            prompt, Sampling(NEW_TOKENS, ignore_end=True, seed=seed + turn, deadline_s=deadline_s)
        )
        action = Action("", "", f"{task.id} {seed} {turn}", SimulatedTool.card.name)
        return Plan(Call.of(prompt, done, ""), action)

    async def resume(self, prefix: ResponsePrefix, turn: int, seed: int, deadline_s: float) -> Plan:
        raise AssertionError("nobody branches here")

    def measure(self, memory: Memory) -> int:
        """Its prompts do not show the memory."""
        return 0


def measure(engine: Engine, num_rollouts: int) -> list[dict[str, Any]]:
    """Run each rival once."""
    tasks = [Task(f"simulated-{index}", "?", ("",)) for index in range(num_rollouts // GROUP_SIZE)]
    rivals = {f"{IN_FLIGHT} rollouts in flight": IN_FLIGHT, f"{WORKERS} workers": WORKERS}
    found = {name: _run(engine, tasks, number) for name, number in rivals.items()}
    ours = next(iter(found.values()))[0]
    return [
        {
            "prompts": "flow, simulated tools",
            "path": name,
            "rollouts": len(tasks) * GROUP_SIZE,
            "tool_calls": len(waits),
            "tool_s_mean": sum(waits) / len(waits),
            "tool_s_max": max(waits),
            "seconds": seconds,
            "times_ours": seconds / ours,
        }
        for name, (seconds, waits) in found.items()
    ]


def _run(engine: Engine, tasks: Sequence[Task], max_in_flight: int) -> tuple[float, list[float]]:
    """Return the seconds of the whole run, and of each tool call."""
    tool = SimulatedTool()
    executor = Executor({tool.card.name: tool}, timeout_s=300.0, max_chars=10)
    goes_on = RuleVerifier(lambda task, memory: False)
    flow = Flow(
        SamplingPlanner(engine),
        executor,
        goes_on,
        Generator(),
        FlowLimits(TURNS, 600.0),
    )
    started = time.perf_counter()
    collect(flow, tasks, group_size=GROUP_SIZE, seed=0, max_in_flight=max_in_flight)
    return time.perf_counter() - started, tool.seconds
