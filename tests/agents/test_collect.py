"""Many rollouts over one event loop: the same ones on any number of ranks, never more at once than
allowed, no failure hidden.
"""

from __future__ import annotations

import asyncio
import gc
import random
from dataclasses import dataclass, field, replace

import pytest
from make import Tool

from flowtrain.agents.agentflow.executor import Executor
from flowtrain.agents.agentflow.flow import Flow, FlowLimits
from flowtrain.agents.agentflow.generator import Generator
from flowtrain.agents.agentflow.memory import Memory
from flowtrain.agents.agentflow.planner import Plan
from flowtrain.agents.agentflow.verifier import RuleVerifier
from flowtrain.agents.collect import RolloutRequest, _collect, collect, collect_branches
from flowtrain.agents.policy import ResponsePrefix
from flowtrain.tools import ToolCard
from flowtrain.types import (
    Action,
    BranchPoint,
    Call,
    Completion,
    FinishReason,
    Group,
    Task,
    Trajectory,
    UserError,
)
from tests import virtual_time


@dataclass
class FakePlanner:
    """Says a number drawn from its seed, after a wait of its own; counts who is at work."""

    now: int = 0
    most: int = 0
    seeds: list[int] = field(default_factory=list)
    broken_task: str = ""
    cancelled: int = 0

    async def plan(
        self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
    ) -> Plan:
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
        call = Call((turn,), (said,), (-1.0,), (), FinishReason.STOP, str(said))
        return Plan(call, Action("", "", str(said), "Echo" if rng.random() < 0.5 else "None"))


TASKS = [Task(f"task-{i}", f"question {i}", ("x",)) for i in range(7)]


def flow(planner: FakePlanner) -> Flow:
    executor = Executor({"Echo": Tool(ToolCard("Echo", ""), lambda query: query)}, 30.0, 100)
    return Flow(planner, executor, RuleVerifier(), Generator(), FlowLimits(3, 60.0))


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
    return {
        group.index: [said(trajectory) for trajectory in group.trajectories] for group in groups
    }


def test_groups_are_in_task_order() -> None:
    groups = collect(flow(FakePlanner()), TASKS, group_size=4, seed=1)
    assert [group.index for group in groups] == list(range(7))
    for group in groups:
        assert len(group.trajectories) == 4
        assert {trajectory.task for trajectory in group.trajectories} == {TASKS[group.index]}
    answers = [trajectory.answer for group in groups for trajectory in group.trajectories]
    assert len(set(answers)) > 14, "rollouts of a group differ"


def test_same_seed_gives_same_rollouts_under_concurrency() -> None:
    first = content(collect(flow(FakePlanner()), TASKS, group_size=3, seed=1))
    assert (
        content(collect(flow(FakePlanner()), TASKS, group_size=3, seed=1, max_in_flight=2)) == first
    )
    assert content(collect(flow(FakePlanner()), TASKS, group_size=3, seed=2)) != first


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_share_the_same_groups_out(num_ranks: int) -> None:
    alone = content(collect(flow(FakePlanner()), TASKS, group_size=3, seed=1))
    shares = [
        content(
            collect(
                flow(FakePlanner()), TASKS, group_size=3, seed=1, rank=rank, num_ranks=num_ranks
            )
        )
        for rank in range(num_ranks)
    ]
    for rank, share in enumerate(shares):
        assert list(share) == list(range(rank, 7, num_ranks))
    assert {index: group for share in shares for index, group in share.items()} == alone


def test_every_rollout_has_a_seed_of_its_own() -> None:
    planner = FakePlanner()
    collect(flow(planner), TASKS, group_size=5, seed=1)
    assert len(set(planner.seeds)) == 35


def test_repeated_task_gets_other_samples() -> None:
    """As in a batch that is larger than the task file, and in demonstrations drawn with
    replacement.
    """
    first, second = collect(flow(FakePlanner()), [TASKS[0], TASKS[0]], group_size=3, seed=1)
    assert {t.seed for t in first.trajectories}.isdisjoint(t.seed for t in second.trajectories)


@pytest.mark.parametrize(("max_in_flight", "most"), [(1, 1), (5, 5), (512, 28)])
def test_so_many_rollouts_are_under_way_and_no_more(max_in_flight: int, most: int) -> None:
    planner = FakePlanner()
    collect(flow(planner), TASKS, group_size=4, seed=1, max_in_flight=max_in_flight)
    assert planner.most == most


def test_no_task_gives_no_group() -> None:
    assert collect(flow(FakePlanner()), TASKS[:1], group_size=4, seed=1, rank=1, num_ranks=2) == []


def test_an_unforeseen_failure_comes_out_and_stops_the_rest() -> None:
    planner = FakePlanner(broken_task="task-3")
    with pytest.raises(ExceptionGroup) as caught:
        collect(flow(planner), TASKS, group_size=2, seed=1)
    assert caught.group_contains(KeyError, match="a bug of ours")
    assert planner.cancelled > 0, "the others were told, so this did not wait a minute for them"


# ---- stragglers


@dataclass
class SlowPlanner(FakePlanner):
    """Hangs at the second turn of some tasks."""

    slow: tuple[str, ...] = ()
    seconds: float = 3600.0

    async def plan(
        self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
    ) -> Plan:
        if task.id in self.slow and turn == 1:
            await asyncio.sleep(self.seconds)
        plan = await super().plan(task, memory, turn, seed, deadline_s)
        return replace(plan, action=Action("", "", f"{task.id} turn {turn}", "Echo"))


def never(task: Task, memory: Memory) -> bool:
    return False


def slow_flow(slow: tuple[str, ...], seconds: float = 3600.0) -> Flow:
    executor = Executor({"Echo": Tool(ToolCard("Echo", ""), lambda query: query)}, 30.0, 100)
    return Flow(
        SlowPlanner(slow=slow, seconds=seconds),
        executor,
        RuleVerifier(never),
        Generator(),
        FlowLimits(3, 60.0),
    )


def test_stragglers_answer_from_finished_turns() -> None:
    with virtual_time.clock() as clock:
        started = clock.now
        groups = collect(
            slow_flow(("task-2", "task-5")),
            TASKS,
            group_size=2,
            seed=1,
            straggler_share=0.7,
            straggler_s=20.0,
        )
    assert clock.now - started == 20.0
    for group in groups:
        is_slow = group.index in (2, 5)
        for trajectory in group.trajectories:
            assert (trajectory.truncated, len(trajectory.turns)) == (
                ("straggler", 1) if is_slow else ("turns", 3)
            )
            assert trajectory.answer == f"task-{group.index} turn {0 if is_slow else 2}"
            assert trajectory.error == "", (
                "as if it were out of time: trained, and scored by its answer"
            )


def test_a_straggler_that_makes_it_in_time_is_none() -> None:
    """All are done within the grace: nothing is cut."""
    groups = collect(
        slow_flow(()), TASKS, group_size=2, seed=1, straggler_share=0.1, straggler_s=30.0
    )
    assert {t.truncated for group in groups for t in group.trajectories} == {"turns"}


@pytest.mark.parametrize(("share", "num_slow"), [(0.5, 4), (0.7, 3)])
def test_no_stragglers_while_share_is_not_done(share: float, num_slow: int) -> None:
    """7 rollouts: fewer than the share get done, so all are waited for until the time of the
    rollout is up.
    """
    flow = slow_flow(tuple(f"task-{i}" for i in range(num_slow)))

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(59.0):
                requests = [RolloutRequest(i, task, 0) for i, task in enumerate(TASKS)]
                await _collect(flow, requests, 1, 512, share, 0.0, lambda: None)

    virtual_time.run(impatient())


def test_the_share_is_of_all_rollouts_of_a_rank() -> None:
    """8 of 14 get done soon, one too few for 60 %: the next one takes half a second and is waited
    for.
    """
    with virtual_time.clock():
        groups = collect(
            slow_flow(("task-0", "task-1", "task-2"), 0.5),
            TASKS,
            group_size=2,
            seed=1,
            straggler_share=0.6,
            straggler_s=0.0,
        )
    assert [t.truncated for group in groups[3:] for t in group.trajectories] == ["turns"] * 8
    assert "turns" in [t.truncated for group in groups[:3] for t in group.trajectories]


def test_rollouts_not_started_at_cutoff_take_no_turn() -> None:
    """Those that hang hold both places; the one place that is free serves the rest, and when three
    are done it is over.
    """
    flow = slow_flow(("task-0", "task-1"))
    groups = collect(
        flow, TASKS, group_size=1, seed=1, max_in_flight=3, straggler_share=3 / 7, straggler_s=0.0
    )
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    expected = ["straggler", "straggler", "turns", "turns", "turns"]
    assert [t.truncated for t in trajectories[:5]] == expected
    assert [(t.truncated, t.turns, t.answer) for t in trajectories[5:]] == [
        ("straggler", (), "")
    ] * 2


def test_a_timeout_of_somebody_else_is_no_cut() -> None:
    class Broken(FakePlanner):
        async def plan(
            self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
        ) -> Plan:
            raise TimeoutError("a bug of ours")

    with pytest.raises(ExceptionGroup) as caught:
        collect(
            flow(Broken()), TASKS[:1], group_size=1, seed=1, straggler_share=0.5, straggler_s=30.0
        )
    assert caught.group_contains(TimeoutError, match="a bug of ours")


def test_a_mistake_of_the_user_comes_out_as_such() -> None:
    class Mistaken(FakePlanner):
        async def plan(
            self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
        ) -> Plan:
            raise UserError("engines.x: no such model")

    with pytest.raises(UserError, match="no such model"):
        collect(flow(Mistaken()), TASKS, group_size=2, seed=1)


def test_an_interrupt_amid_a_rollouts_step_is_all_that_is_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """asyncio would log it once more, with its traceback, for a task that nobody asked."""

    class Interrupted(FakePlanner):
        async def plan(
            self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
        ) -> Plan:
            raise KeyboardInterrupt  # as the handler of a signal does

    with pytest.raises(KeyboardInterrupt):
        collect(flow(Interrupted()), TASKS[:1], group_size=1, seed=1)
    gc.collect()
    assert caplog.records == []


# ---- branches


@dataclass
class BranchingPlanner(FakePlanner):
    async def resume(self, prefix: ResponsePrefix, turn: int, seed: int, deadline_s: float) -> Plan:
        rest = Completion((1000 + seed % 1000,), (-2.0,), (), FinishReason.STOP)
        call = Call.of(prefix.prompt_ids, prefix.joined(rest), "")
        return Plan(call, Action("", "", "resumed", "Echo"))


def test_groups_are_filled_with_branches_then_rollouts() -> None:
    planner = BranchingPlanner()
    groups = collect(flow(planner), TASKS[:2], group_size=3, seed=1)
    points = [[BranchPoint(2, 0, 0, 1.0), BranchPoint(0, 0, 1, 0.5), BranchPoint(0, 0, 1, 0.5)], []]
    grown = collect_branches(flow(planner), groups, points, group_size=6, seed=2)
    assert [group.trajectories[:3] for group in grown] == [
        group.trajectories for group in groups
    ], "the roots stay as they are"
    found = [[t.branch for t in group.trajectories[3:]] for group in grown]
    assert found == [points[0], [None] * 3]
    first = grown[0].trajectories
    responses = [t.turns[0].calls["planner"].response_ids for t in first]
    assert responses[4][0] == responses[0][0], "the prefix of its root"
    assert len(set(responses[4:])) == 2, "two branches of one place differ"
    assert len({t.seed for group in grown for t in group.trajectories}) == 12
    again = collect_branches(
        flow(BranchingPlanner()), groups, points, group_size=6, seed=2, max_in_flight=1
    )
    assert content(again) == content(grown)
