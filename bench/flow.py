"""What a turn of the flow and a call of a sandbox cost:  python -m bench.flow [--json F]

First the cost of the loop per turn when every module answers at once, then that of a sandbox call,
one after another on a warm worker.
"""

from __future__ import annotations

import asyncio
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from bench.measure import new_parser, report, time_in_turn
from flowtrain.agents.agentflow.executor import Executor
from flowtrain.agents.agentflow.flow import Flow, FlowLimits
from flowtrain.agents.agentflow.generator import Generator
from flowtrain.agents.agentflow.planner import ModelPlanner
from flowtrain.agents.agentflow.prompts import CompactPrompt
from flowtrain.agents.agentflow.verifier import RuleVerifier
from flowtrain.agents.collect import collect
from flowtrain.agents.policy import Policy
from flowtrain.records import Call, FinishReason, Sampling, Task
from flowtrain.tools.base_generator import GuessGenerator
from flowtrain.tools.sandbox import bubblewrap, limits, seccomp
from flowtrain.tools.sandbox.host import ProcessSandbox
from flowtrain.tools.sandbox.server import Backend


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rollouts", type=int, default=256, help="at a time")
    parser.add_argument("--calls", type=int, default=100, help="timed calls of each sandbox")
    args = parser.parse_args()

    def rows() -> Iterator[dict[str, Any]]:
        yield overhead_row(args.rollouts, 3)
        for name, make, code in sandboxes():
            yield sandbox_row(name, make, code, args.calls)

    report(args.json, rows())


class InstantEngine:
    """Always gives the same answer, at once."""

    version, max_tokens = 0, 1 << 20

    def __init__(self, text: str) -> None:
        self._ids = tuple(map(ord, text))

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Call:
        zeros = (0.0,) * len(self._ids)
        return Call(tuple(prompt_ids), self._ids, zeros, (), FinishReason.STOP)


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
    seconds = statistics.median(time_in_turn({"loop": run}, 5, warmup=1)["loop"])
    return {
        "loop": "all modules instant",
        "rollouts": num_rollouts,
        "turns": num_turns,
        "ms_per_turn": 1e3 * seconds / (num_rollouts * num_turns),
    }


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


if __name__ == "__main__":
    main()
