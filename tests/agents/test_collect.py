"""Many rollouts over one event loop: the same on any number of ranks, and no failure hidden."""

from __future__ import annotations

import asyncio
import gc
import random
from dataclasses import dataclass, field, replace
from typing import Any

import make
import pytest

from flowtrain.agents.agentflow.executor import Executor
from flowtrain.agents.agentflow.flow import Flow, FlowLimits
from flowtrain.agents.agentflow.generator import Generator
from flowtrain.agents.agentflow.planner import Plan
from flowtrain.agents.agentflow.verifier import RuleVerifier
from flowtrain.agents.collect import RolloutRequest, _collect, collect, collect_branches
from flowtrain.agents.policy import joined
from flowtrain.records import (
    Action,
    BranchPoint,
    Call,
    Group,
    Task,
    Trajectory,
    UserError,
)
from flowtrain.tools import ToolCard
from tests import virtual_time


@dataclass
class FakePlanner:
    """Says a number drawn from its seed, after a wait of its own; counts who is at work."""

    now: int = 0
    most: int = 0
    seeds: list[int] = field(default_factory=list)
    broken_task: str = ""
    cancelled: int = 0
    error: BaseException | None = None
    """What it raises at once."""
    slow: tuple[str, ...] = ()
    """Tasks at whose second turn it hangs, for so many `seconds`."""
    seconds: float = 3600.0

    async def plan(
        self, task: Task, _memory: Any, turn: int, seed: int, _deadline_s: float
    ) -> Plan:
        if self.error is not None:
            raise self.error
        if task.id in self.slow and turn == 1:
            await asyncio.sleep(self.seconds)
        self.seeds.append(seed)
        self.now += 1
        self.most = max(self.most, self.now)
        rng = random.Random(f"{seed}/{turn}")
        try:
            for _ in range(1 + rng.randrange(4)):
                await asyncio.sleep(0)
            if task.id == self.broken_task:
                raise KeyError("a bug of ours")
            if self.broken_task:
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.now -= 1
        said = rng.randrange(10**6)
        call = make.call((said,), (turn,), text=str(said))
        return Plan(call, Action("", "", str(said), "Echo" if rng.random() < 0.5 else "None"))

    async def resume(self, prefix: Call, turn: int, seed: int, deadline_s: float) -> Plan:
        rest = make.call((1000 + seed % 1000,), (), -2.0)
        return Plan(joined(prefix, rest), Action("", "", "resumed", "Echo"))


TASKS = [Task(f"task-{i}", f"question {i}", ("x",)) for i in range(7)]


def flow(planner: Any = None) -> Flow:
    executor = Executor({"Echo": make.Tool(ToolCard("Echo", ""), lambda query: query)}, 30.0, 100)
    verifier = RuleVerifier(lambda task, memory: False)
    return Flow(planner or FakePlanner(), executor, verifier, Generator(), FlowLimits(3, 60.0))


def rolled(
    planner: Any = None, size: int = 3, tasks: list[Task] = TASKS, **how: Any
) -> list[Group]:
    return collect(flow(planner), tasks, group_size=size, **{"seed": 1, **how})


def said(trajectory: Trajectory) -> tuple[object, ...]:
    """A rollout without its times."""
    return (
        trajectory.task,
        trajectory.seed,
        trajectory.answer,
        trajectory.truncated,
        [turn.calls["planner"].response_ids for turn in trajectory.turns],
    )


def content(groups: list[Group]) -> dict[int, list[tuple[object, ...]]]:
    return {group.index: [*map(said, group.trajectories)] for group in groups}


def rollouts(groups: list[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def test_groups_are_in_task_order() -> None:
    groups = rolled(size=4)
    assert [group.index for group in groups] == list(range(7))
    for group in groups:
        assert len(group.trajectories) == 4
        assert {trajectory.task for trajectory in group.trajectories} == {TASKS[group.index]}
    assert len({each.answer for each in rollouts(groups)}) > 14, "rollouts of a group differ"


def test_same_seed_gives_same_rollouts_under_concurrency() -> None:
    first = content(rolled())
    assert content(rolled(max_in_flight=2)) == first != content(rolled(seed=2))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_share_the_same_groups_out(num_ranks: int) -> None:
    shares = [content(rolled(rank=rank, num_ranks=num_ranks)) for rank in range(num_ranks)]
    for rank, share in enumerate(shares):
        assert list(share) == list(range(rank, 7, num_ranks))
    whole = {index: group for share in shares for index, group in share.items()}
    assert whole == content(rolled())


def test_every_rollout_has_a_seed_of_its_own() -> None:
    planner = FakePlanner()
    rolled(planner, size=5)
    assert len(set(planner.seeds)) == 35


def test_repeated_task_gets_other_samples() -> None:
    """As in a batch larger than the task file."""
    first, second = rolled(tasks=[TASKS[0], TASKS[0]])
    assert {t.seed for t in first.trajectories}.isdisjoint(t.seed for t in second.trajectories)


@pytest.mark.parametrize(("max_in_flight", "most"), [(1, 1), (5, 5), (512, 28)])
def test_so_many_rollouts_are_under_way_and_no_more(max_in_flight: int, most: int) -> None:
    planner = FakePlanner()
    rolled(planner, size=4, max_in_flight=max_in_flight)
    assert planner.most == most


def test_no_task_gives_no_group() -> None:
    assert rolled(tasks=TASKS[:1], rank=1, num_ranks=2) == []


def test_an_unforeseen_failure_comes_out_and_stops_the_rest() -> None:
    planner = FakePlanner(broken_task="task-3")
    with pytest.raises(ExceptionGroup) as caught:
        rolled(planner, size=2)
    assert caught.group_contains(KeyError, match="a bug of ours")
    assert planner.cancelled > 0, "the others were told, so this did not wait a minute for them"


# ---- stragglers


@dataclass
class SlowPlanner(FakePlanner):
    """Says at which turn of which task it is."""

    async def plan(self, task: Task, memory: Any, turn: int, *rest: Any) -> Plan:
        plan = await super().plan(task, memory, turn, *rest)
        return replace(plan, action=Action("", "", f"{task.id} turn {turn}", "Echo"))


def slow(*numbers: int, seconds: float = 3600.0) -> SlowPlanner:
    return SlowPlanner(slow=tuple(f"task-{number}" for number in numbers), seconds=seconds)


def test_stragglers_answer_from_finished_turns() -> None:
    with virtual_time.clock() as clock:
        started = clock.now
        groups = rolled(slow(2, 5), size=2, straggler_share=0.7, straggler_s=20.0)
    assert clock.now - started == 20.0
    for group in groups:
        is_slow = group.index in (2, 5)
        for each in group.trajectories:
            expected = ("straggler", 1) if is_slow else ("turns", 3)
            assert (each.truncated, len(each.turns)) == expected
            assert each.answer == f"task-{group.index} turn {0 if is_slow else 2}"
            assert each.error == "", "as if out of time: trained, and scored by its answer"


def test_a_straggler_that_makes_it_in_time_is_none() -> None:
    """All are done within the grace: nothing is cut."""
    groups = rolled(slow(), size=2, straggler_share=0.1, straggler_s=30.0)
    assert {each.truncated for each in rollouts(groups)} == {"turns"}


@pytest.mark.parametrize(("share", "num_slow"), [(0.5, 4), (0.7, 3)])
def test_no_stragglers_while_share_is_not_done(share: float, num_slow: int) -> None:
    """Fewer than the share get done, so all are waited for until their time is up."""

    async def impatient() -> None:
        requests = [RolloutRequest(i, task, 0) for i, task in enumerate(TASKS)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(59.0):
                loop = flow(slow(*range(num_slow)))
                await _collect(loop, requests, 1, 512, share, 0.0, lambda: None)

    virtual_time.run(impatient())


def test_the_share_is_of_all_rollouts_of_a_rank() -> None:
    """8 of 14 are one too few for 60 %: the next one takes half a second."""
    with virtual_time.clock():
        planner = slow(0, 1, 2, seconds=0.5)
        groups = rolled(planner, size=2, straggler_share=0.6, straggler_s=0.0)
    assert [each.truncated for each in rollouts(groups[3:])] == ["turns"] * 8
    assert "turns" in [each.truncated for each in rollouts(groups[:3])]


def test_rollouts_not_started_at_cutoff_take_no_turn() -> None:
    """Those that hang hold two places, the third serves the rest."""
    cut = {"straggler_share": 3 / 7, "straggler_s": 0.0}
    found = rollouts(rolled(slow(0, 1), size=1, max_in_flight=3, **cut))
    expected = ["straggler", "straggler", "turns", "turns", "turns"]
    assert [each.truncated for each in found[:5]] == expected
    rest = [(each.truncated, each.turns, each.answer) for each in found[5:]]
    assert rest == [("straggler", (), "")] * 2


def test_a_timeout_of_somebody_else_is_no_cut() -> None:
    planner = FakePlanner(error=TimeoutError("a bug of ours"))
    with pytest.raises(ExceptionGroup) as caught:
        rolled(planner, 1, TASKS[:1], straggler_share=0.5, straggler_s=30.0)
    assert caught.group_contains(TimeoutError, match="a bug of ours")


def test_a_mistake_of_the_user_comes_out_as_such() -> None:
    with pytest.raises(UserError, match="no such model"):
        rolled(FakePlanner(error=UserError("engines.x: no such model")))


def test_an_interrupt_amid_a_rollouts_step_is_all_that_is_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """asyncio would log it once more, with its traceback, for a task that nobody asked."""
    with pytest.raises(KeyboardInterrupt):  # as the handler of a signal raises
        rolled(FakePlanner(error=KeyboardInterrupt()), 1, TASKS[:1])
    gc.collect()
    assert caplog.records == []


# ---- branches


def test_groups_are_filled_with_branches_then_rollouts() -> None:
    groups = rolled(tasks=TASKS[:2])
    points = [[BranchPoint(2, 0, 0, 1.0), BranchPoint(0, 0, 1, 0.5), BranchPoint(0, 0, 1, 0.5)], []]
    grown = collect_branches(flow(), groups, points, group_size=6, seed=2)
    seen = [group.trajectories[:3] for group in grown]
    assert seen == [group.trajectories for group in groups], "the roots stay as they are"
    found = [[t.branch for t in group.trajectories[3:]] for group in grown]
    assert found == [points[0], [None] * 3]
    responses = [t.turns[0].calls["planner"].response_ids for t in grown[0].trajectories]
    assert responses[4][0] == responses[0][0], "the prefix of its root"
    assert len(set(responses[4:])) == 2, "two branches of one place differ"
    assert len({each.seed for each in rollouts(grown)}) == 12
    again = collect_branches(flow(), groups, points, group_size=6, seed=2, max_in_flight=1)
    assert content(again) == content(grown)
