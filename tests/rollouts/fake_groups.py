"""Small groups, ledgers and clocks for the tests of the dataflow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import make
from toy_options import toy

from flowtrain.config import Config
from flowtrain.records import Action, Group, Task, ToolResult, Turn, Verdict, VersionSpan
from flowtrain.rollouts.codec import pack_group
from flowtrain.rollouts.contract import Join, Lease, LeaseRequest, Push, Register
from flowtrain.rollouts.ledger import Ledger
from flowtrain.rollouts.ledger.prompts import Event, read_events
from flowtrain.rollouts.rules import Rules
from flowtrain.tasks.cursor import TaskCursor

TASKS = [
    Task(
        f"task-{number}", f"What is {number}?", (str(number),), "even" if number % 2 == 0 else "odd"
    )
    for number in range(12)
]
LAYOUT = "layout-1"
VOCAB_SIZE, MAX_POSITIONS = 1 << 16, 1 << 16


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def turn(spans: tuple[VersionSpan, ...], num_prompt: int = 5) -> Turn:
    num = spans[-1].end if spans else 0
    said = make.call(num, num_prompt, -0.5, spans=spans, text="text")
    action = Action("because", "", "look", "Search")
    return make.turn(said, action, result=ToolResult("found"), verdict=Verdict.STOP)


def group(
    task: Task,
    num: int = 2,
    version: int = 0,
    num_tokens: int = 4,
    rewards: tuple[float | None, ...] = (0.0, 1.0),
    verifier: int | None = None,
) -> Group:
    """A reward of None: that rollout failed. `verifier`: the version of its tokens."""
    one = turn(_span(num_tokens, version))
    if verifier is not None:
        call = make.call((3, 4, 5), (1, 2), -0.1, spans=_span(3, verifier))
        one = replace(one, calls={**one.calls, "verifier": call})
    rollouts = (
        make.rollout(
            one,
            task=task,
            answer="answer",
            seed=seed,
            reward=reward,
            sub_goals=0.0,
            error="" if reward is not None else "generator: down",
        )
        for seed, reward in zip(range(num), rewards * num, strict=False)
    )
    return make.group(*rollouts)


def _span(num_tokens: int, version: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(0, num_tokens, version),) if num_tokens else ()


def options(
    both: bool = False, plugins: Mapping[str, Any] | None = None, **dataflow: Any
) -> Config:
    """`both`: the verifier is a policy, too."""
    own: dict[str, Any] = {"roles": {"verifier": "own"}} if both else {}
    rollout = {"group_size": 2, "num_questions": 4}
    own |= {"plugins": plugins or {}}
    return toy({"rollout": rollout, "train": {"num_minibatches": 1}, "dataflow": dataflow, **own})


def ledger(
    database: str | Path,
    clock: Callable[[], float] | None = None,
    make_rules: Callable[[], Rules] | None = None,
    both: bool = False,
    **dataflow: Any,
) -> Ledger:
    return Ledger(database, options(both, **dataflow), TaskCursor(TASKS, 0), make_rules, clock)


def begun(
    database: str | Path, *given: Any, trainer: Register | None = None, **options: Any
) -> Ledger:
    """A ledger that a trainer, of the planner unless told, and the node n1 have joined."""
    flow = ledger(database, *given, **options)
    flow.register(trainer or planner())
    joined(flow)
    return flow


def planner(
    num_groups: int = 4, max_staleness: int = 1, step: int = 0, policy: str = "planner"
) -> Register:
    return Register(
        policy,
        LAYOUT,
        "weights",
        num_groups,
        max_staleness,
        vocab_size=VOCAB_SIZE,
        max_positions=MAX_POSITIONS,
        step=step,
    )


def joined(flow: Any, node: str = "n1", life: str = "a") -> None:
    flow.join(Join(node, life))


def lease(
    flow: Any,
    num: int = 1,
    node: str = "n1",
    life: str = "a",
    key: str = "",
    versions: Mapping[str, int] | None = None,
) -> list[Lease]:
    return list(flow.lease(LeaseRequest(node, life, num, versions or {}, key=key)).leases)


def push(flow: Any, lease: Lease, version: int = 0, node: str = "n1", **kind: Any) -> str:
    return flow.push(
        Push(
            node,
            lease.work_item,
            lease.attempt,
            pack_group(group(lease.task, version=version, **kind)),
        )
    ).status


def events(flow: Ledger) -> list[Event]:
    """All that prompt filters may observe."""
    with flow.database.read() as transaction:
        return read_events(transaction, 0, 1 << 62)


def rows(flow: Ledger, table: str, order: str) -> list[Any]:
    with flow.database.read() as transaction:
        return transaction.all(f"SELECT * FROM {table} ORDER BY {order}")
