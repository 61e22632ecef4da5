"""Benchmark of the flow:  python -m bench.flow [--json F]

It measures rollouts per minute with SIMULATED latencies of language models and tools, on the real
turn loop: 256 rollouts in flight on one event loop against 16 workers that roll out one at a time
each, which is AgentFlow's released design. Both get the same latencies. Then it measures the cost
of the loop per turn when every module answers at once, and of a sandbox call.

The latencies are random, because no public run states them. AgentFlow's trainer expects 150 s per
rollout and cuts a tool command at 120 s and a rollout at 500 s; its rollouts of T turns make 2 + 3
T calls of a language model and T of a tool, and T is about 2 where 3 are allowed. The log-normal
calls below give 150 s per rollout on average, with a long tail.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.measure import report
from flowtrain.agents.agentflow.executor import Executed, Executor
from flowtrain.agents.agentflow.flow import Flow, FlowLimits
from flowtrain.agents.agentflow.generator import Answer, Generator
from flowtrain.agents.agentflow.memory import Memory
from flowtrain.agents.agentflow.planner import ModelPlanner, Plan
from flowtrain.agents.agentflow.prompts import CompactPrompt
from flowtrain.agents.agentflow.verifier import RuleVerifier, Verification
from flowtrain.agents.collect import collect
from flowtrain.agents.policy import Policy, ResponsePrefix
from flowtrain.tools import ToolCard
from flowtrain.tools.base_generator import GuessGenerator
from flowtrain.tools.sandbox import bubblewrap, limits, seccomp
from flowtrain.tools.sandbox.host import ProcessSandbox
from flowtrain.tools.sandbox.server import Backend
from flowtrain.types import (
    Action,
    Call,
    Completion,
    FinishReason,
    Sampling,
    Task,
    Verdict,
)
from flowtrain.utils.seeds import derive_seed

CHAT_MEDIAN_S, CHAT_SPREAD = 7.5, 0.8
TOOL_MEDIAN_S, TOOL_SPREAD = 20.0, 1.0
TOOL_TIMEOUT_S, ROLLOUT_TIMEOUT_S, MAX_TURNS = 120.0, 500.0, 3
STOP_SHARE = 0.36
"""Chance that the verifier stops after a turn: 2.05 turns on average."""
NUM_WORKERS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", metavar="F", help="write the rows to this file")
    add("--scale", type=float, default=400.0, help="speed-up of the latencies (default: 400)")
    add("--in-flight", type=int, default=256, help="rollouts on the event loop (default: 256)")
    add("--calls", type=int, default=100, help="timed calls of each sandbox (default: 100)")
    args = parser.parse_args()
    parts = [
        [
            row
            for number in (args.in_flight, 4 * args.in_flight)
            for row in rate_rows(number, args.in_flight, args.scale)
        ],
        [overhead_row(args.in_flight, 3)],
        [sandbox_row(name, make, code, args.calls) for name, make, code in sandboxes()],
    ]
    report(args.json, *parts)


# ---- rollouts per minute


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds of a call, which depend on rollout, turn and purpose alone."""

    scale: float

    def chat_s(self, key: str, purpose: str) -> float:
        return self._draw(key, purpose, CHAT_MEDIAN_S, CHAT_SPREAD)

    def tool_s(self, key: str) -> float:
        return self._draw(key, "tool", TOOL_MEDIAN_S, TOOL_SPREAD)

    def _draw(self, key: str, purpose: str, median_s: float, spread: float) -> float:
        return median_s * random.Random(f"{key} {purpose}").lognormvariate(0.0, spread) / self.scale


@dataclass(frozen=True, slots=True)
class Simulated:
    """Planner, verifier, generator and tool that only wait; a sub-goal names rollout and turn."""

    latencies: Latencies

    card = ToolCard("Simulated", "Waits.")

    async def plan(
        self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
    ) -> Plan:
        key = f"{seed} {turn}"
        if turn == 0:
            await asyncio.sleep(self.latencies.chat_s(key, "analysis"))
        await asyncio.sleep(self.latencies.chat_s(key, "plan"))
        return Plan(Call((), (), (), (), FinishReason.STOP), Action("", "", key, "Simulated"))

    async def execute(self, query: str) -> str:
        await asyncio.sleep(self.latencies.tool_s(query))
        return "result"

    async def resume(self, prefix: ResponsePrefix, turn: int, seed: int, deadline_s: float) -> Plan:
        raise AssertionError("nobody branches here")

    def measure(self, memory: Memory) -> int:
        return 0

    async def verify(
        self, task: Task, memory: Memory, seed: int, deadline_s: float
    ) -> Verification:
        key = memory.entries[-1].sub_goal
        await asyncio.sleep(self.latencies.chat_s(key, "verdict"))
        return Verification(
            Verdict.STOP if random.Random(f"{key} stop").random() < STOP_SHARE else Verdict.CONTINUE
        )

    async def answer(self, task: Task, memory: Memory, seed: int, deadline_s: float) -> Answer:
        await asyncio.sleep(self.latencies.chat_s(memory.entries[-1].sub_goal, "answer"))
        return Answer("answer")

    def close(self) -> None:
        """Release nothing."""


@dataclass(frozen=True, slots=True)
class SimulatedExecutor:
    """Waits for the command, then runs it as every executor does."""

    latencies: Latencies
    runner: Executor

    async def execute(
        self, question: str, action: Action, seed: int, deadline_s: float
    ) -> Executed:
        await asyncio.sleep(self.latencies.chat_s(action.sub_goal, "command"))
        return await self.runner.execute(question, action, seed, deadline_s)


def simulated_flow(scale: float) -> Flow:
    latencies = Latencies(scale)
    modules: Any = Simulated(latencies)
    executor: Any = SimulatedExecutor(
        latencies, Executor({"Simulated": modules}, TOOL_TIMEOUT_S / scale, 400)
    )
    return Flow(
        modules, executor, modules, modules, FlowLimits(MAX_TURNS, ROLLOUT_TIMEOUT_S / scale)
    )


def rate_rows(num_rollouts: int, in_flight: int, scale: float) -> list[dict[str, Any]]:
    """Time the event loop and the workers on the same rollouts; rates are without the speed-up."""
    flow = simulated_flow(scale)
    tasks = [Task(str(n), "?", ("answer",)) for n in range(num_rollouts)]
    # The seeds of `collect`.
    seeds = [derive_seed(0, index, task.id, 0) for index, task in enumerate(tasks)]

    def workers() -> None:
        with ThreadPoolExecutor(NUM_WORKERS) as pool:
            list(pool.map(lambda task, seed: asyncio.run(flow.run(task, seed)), tasks, seeds))

    loop_s = _seconds(partial(collect, flow, tasks, group_size=1, seed=0, max_in_flight=in_flight))
    workers_s = _seconds(workers)
    return [
        {
            "simulated": f"{num_rollouts} rollouts",
            "path": path,
            "in_flight": at_once,
            "scale": scale,
            "seconds": seconds,
            "rollouts_per_min": 60 * num_rollouts / (seconds * scale),
            "times_workers": workers_s / seconds,
        }
        for path, at_once, seconds in (
            ("event loop", in_flight, loop_s),
            ("blocking workers", NUM_WORKERS, workers_s),
        )
    ]


# ---- overhead of the loop


class InstantEngine:
    """Always gives the same answer, at once."""

    version, max_tokens = 0, 1 << 20

    def __init__(self, text: str) -> None:
        ids = tuple(map(ord, text))
        self._completion = Completion(ids, (0.0,) * len(ids), (), FinishReason.STOP)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        return self._completion


class Characters:
    """A very cheap tokenizer with one token per character."""

    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))


def overhead_row(num_rollouts: int, num_turns: int) -> dict[str, Any]:
    """Time the real modules of the embedded default around an engine that answers at once."""
    engine: Any = InstantEngine(" area of Chad\nTool Name: Base_Generator")
    tokenizer: Any = Characters()
    tools = {"Base_Generator": GuessGenerator(["1284"])}
    policy = Policy(engine, tokenizer, 48, temperature=1.0, request_timeout_s=60.0)
    planner = ModelPlanner(policy, CompactPrompt(), tool_names=("Base_Generator",))
    flow = Flow(
        planner,
        Executor(tools, 2.0, 400),
        RuleVerifier(lambda task, memory: False),
        Generator(),
        FlowLimits(num_turns, 500.0),
    )
    tasks = [Task(str(n), "What is the area of Chad?", ("1284",)) for n in range(num_rollouts)]
    run = partial(collect, flow, tasks, group_size=1, seed=0)
    run()
    seconds = statistics.median(_seconds(run) for _ in range(5))
    return {
        "loop": "all modules instant",
        "rollouts": num_rollouts,
        "turns": num_turns,
        "ms_per_turn": 1e3 * seconds / (num_rollouts * num_turns),
    }


# ---- the sandbox

COMPUTE = "print(sum(n * n for n in range(1000)))"
WITH_NUMPY = "import numpy as np\nprint(np.linalg.det(np.eye(20)))"
WITH_FILE = "with open('x', 'w') as f: f.write('1')\nprint(open('x').read())"


def sandboxes() -> list[tuple[str, Callable[[], Backend], str]]:
    """Return the sandboxes that work here: name, backend, code."""
    found: list[tuple[str, Callable[[], Backend], str]] = [("seccomp", seccomp.backend, COMPUTE)]
    if reason := bubblewrap.why_not(bubblewrap.backend(())):
        print(f"{reason}: not measured\n")
    else:
        found += [("bubblewrap", partial(bubblewrap.backend, ()), COMPUTE)]
        found += [("bubblewrap, numpy", partial(bubblewrap.backend, ["numpy"]), WITH_NUMPY)]
        found += [("bubblewrap, a file per run", partial(bubblewrap.backend, ()), WITH_FILE)]
    return [*found, ("limits", partial(limits.backend, ()), COMPUTE)]


def sandbox_row(
    name: str, make: Callable[[], Backend], code: str, num_calls: int
) -> dict[str, Any]:
    """Time one call after another, on one warm worker."""
    with warnings.catch_warnings(action="ignore"):
        sandbox = ProcessSandbox(make(), num_workers=1, timeout_s=10.0)

    async def calls() -> list[float]:
        seconds = []
        for _ in range(num_calls + 3):
            started = time.perf_counter()
            await sandbox.run(code)
            seconds.append(time.perf_counter() - started)
        return sorted(seconds[3:])

    seconds = asyncio.run(calls())
    sandbox.close()
    return {
        "sandbox": name,
        "calls": num_calls,
        "median_ms": 1e3 * statistics.median(seconds),
        "p95_ms": 1e3 * seconds[int(0.95 * num_calls)],
    }


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
