"""Branches go on from the very states that their parents' tools had, within bounds, and nothing of
those is left.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from char_tokenizer import CharTokenizer
from test_session import Engine

from flowtrain.agents.base import AgentContext
from flowtrain.agents.build import make_policy
from flowtrain.agents.collect import collect, collect_branches
from flowtrain.agents.executor import RuleExecutor
from flowtrain.agents.flow import Flow, FlowLimits
from flowtrain.agents.generator import RuleGenerator, last_result
from flowtrain.agents.memory import Memory
from flowtrain.agents.planner import Plan
from flowtrain.agents.policy import ResponsePrefix
from flowtrain.agents.session import Session, SessionAgent
from flowtrain.agents.tool_states import Snapshots, rollout_tools
from flowtrain.agents.verifier import RuleVerifier
from flowtrain.algorithms.appo import appo
from flowtrain.algorithms.registry import load_algorithm
from flowtrain.config import Config
from flowtrain.rewards import score
from flowtrain.tools import StatefulTool, Tool, ToolCard, ToolContext, ToolError, python_coder
from flowtrain.types import (
    Action,
    BranchPoint,
    BranchStart,
    Call,
    Completion,
    FinishReason,
    Task,
    Trajectory,
    UserError,
    VersionSpan,
)

TASK = Task("t-1", "What is it?", ("5",))


class Notebook:
    """A session that keeps lines; `open` counts sessions and snapshots that are not closed."""

    def __init__(self, tool: Notes, lines: tuple[str, ...]) -> None:
        self.tool, self.lines, self.is_open, self.num_bytes = tool, lines, True, 1 << 20
        tool.open.append(self)

    async def execute(self, query: str) -> str:
        before = self.lines
        await asyncio.sleep(0)
        self.lines = (*before, query)
        return " ".join(self.lines)

    async def snapshot(self) -> Notebook:
        if "unkept" in self.lines:
            raise OSError("the disk is full")
        return Notebook(self.tool, self.lines)

    def close(self) -> None:
        if self.is_open:
            self.tool.open.remove(self)
        self.is_open = False


class Notes:
    card = ToolCard("Notes", "keeps notes", is_stateful=True)

    def __init__(self) -> None:
        self.open: list[Notebook] = []

    async def execute(self, query: str) -> str:
        return query

    def open_session(self) -> Notebook:
        return Notebook(self, ())

    async def restore(self, snapshot: Notebook) -> Notebook:
        if not snapshot.is_open:
            raise ToolError("the snapshot is closed")
        return Notebook(self, snapshot.lines)

    def close(self) -> None: ...


class Counter(Notes):
    """It has sessions, and cannot be rewound."""

    restore = None  # type: ignore[assignment]


def snapshots(number: int = 100, mb: int = 100, lifetime_s: float = 600.0) -> Snapshots:
    return Snapshots(number, mb, lifetime_s)


@pytest.fixture
def python() -> Iterator[python_coder.SessionCoder]:
    if sys.platform != "linux":
        pytest.skip("seccomp is Linux's")
    tool = python_coder.make(
        ToolContext(Config.model_validate({"agent": {"python_session": True}}))
    )
    assert isinstance(tool, python_coder.SessionCoder)
    yield tool
    tool.close()


# ---- agents that are programs


Program = Callable[[Session], Awaitable[str]]


def agent(program: Program, tools: Mapping[str, Any], kept: Snapshots | None) -> SessionAgent:
    class Agent(SessionAgent):
        can_branch = True

        async def answer(self, session: Session) -> str:
            return await program(session)

    config = Config.model_validate({"agent": {"name": "tools", "tools": tuple(tools)}})
    policy = make_policy(config, "planner", Engine(), CharTokenizer())  # type: ignore[arg-type]
    return Agent(AgentContext(config, {"planner": policy}, tools, {}, 4, kept))


async def takes_notes(session: Session) -> str:
    """Note what was sampled, thrice; the last result tells all that the tool knows."""
    text = ""
    for turn in range(3):
        call = await session.sample((turn, 50))
        text = (await session.use_tool(call, "Notes", {"query": call.text})).text
    return text


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_branch_begins_with_the_state_at_the_end_of_the_turn_before(turn: int) -> None:
    tool, kept = Notes(), snapshots()
    made = agent(takes_notes, {"Notes": tool}, kept)
    with kept.held():
        (group,) = collect(made, [TASK], group_size=2, seed=0)
        roots = group.trajectories
        points = [BranchPoint(parent, turn, 1, 1.0) for parent in (0, 1, 0)]
        (full,) = collect_branches(made, [group], [points], group_size=5, seed=1)
        assert full.trajectories[:2] == roots
        for each in full.trajectories[2:]:
            assert each.branch is not None and not each.error
            said = [turn.calls["planner"].text for turn in each.turns]
            parent = roots[each.branch.parent]
            assert said[:turn] == [t.calls["planner"].text for t in parent.turns[:turn]]
            assert each.answer == " ".join(said), "what the parent and siblings noted is not there"
        assert len(kept) == len(tool.open) == 4, "two per root: nothing leaves after the last turn"
    assert not tool.open


def test_calls_of_one_response_take_their_turns() -> None:
    async def at_once(session: Session) -> str:
        call = await session.sample((1,))
        wanted = [("Notes", {"query": f"{n}"}, f"{n}") for n in range(5)]
        return (await session.use_tools(call, wanted))[-1].text

    assert asyncio.run(agent(at_once, {"Notes": Notes()}, None).run(TASK, 1)).answer == "0 1 2 3 4"


def test_an_environment_repeats_its_own_tools_alone() -> None:
    """The restored state already has what the parent did."""

    async def repeats(session: Session) -> str:
        session.repeats_tools = True
        return await takes_notes(session)

    kept = snapshots()
    made = agent(repeats, {"Notes": Notes()}, kept)
    root = asyncio.run(made.run(TASK, 1))
    branch = asyncio.run(made.run(TASK, 2, start=BranchStart(root, BranchPoint(0, 2, 1, 1.0))))
    assert not branch.error and len(branch.answer.split()) == 3


def test_turns_that_leave_a_state_alone_share_its_snapshot() -> None:
    async def once(session: Session) -> str:
        call = await session.sample((0, 50))
        text = (await session.use_tool(call, "Notes", {"query": "x"})).text
        for turn in (1, 2, 3):
            await session.sample((turn, 50))
        return text

    tool, kept = Notes(), snapshots()
    made = agent(once, {"Notes": tool}, kept)
    with kept.held():
        root = asyncio.run(made.run(TASK, 1))
        assert len(kept) == len(tool.open) == 1
        start = BranchStart(root, BranchPoint(0, 3, 0, 1.0))
        assert not asyncio.run(made.run(TASK, 2, start=start)).error
    assert not tool.open


# ---- bounds


@pytest.mark.parametrize(("kept", "is_there"), [((1, 9), False), ((9, 1), False), ((2, 2), True)])
def test_what_does_not_fit_is_not_kept_and_its_branches_fail(
    kept: tuple[int, int], is_there: bool
) -> None:
    tool, room = Notes(), snapshots(*kept)
    made = agent(takes_notes, {"Notes": tool}, room)
    with room.held():
        root = asyncio.run(made.run(TASK, 1))
        early, late = (
            asyncio.run(made.run(TASK, 2, start=BranchStart(root, BranchPoint(0, turn, 1, 1.0))))
            for turn in (1, 2)
        )
        assert not early.error and bool(late.error) is not is_there
        if late.error:
            text = f"agent.max_snapshots={kept[0]} in agent.snapshot_memory_mb={kept[1]}"
            assert late.error.startswith("tool state: the state") and text in late.error
            assert not late.turns and late.num_sampled_tokens == 0
    assert not tool.open


def test_a_state_that_cannot_be_kept_costs_only_the_branches_from_there() -> None:
    async def program(session: Session) -> str:
        for turn, note in enumerate(("a", "unkept", "b")):
            call = await session.sample((turn, 50))
            text = (await session.use_tool(call, "Notes", {"query": note})).text
        return text

    tool, kept = Notes(), snapshots()
    made = agent(program, {"Notes": tool}, kept)
    with kept.held():
        root = asyncio.run(made.run(TASK, 1))
        assert root.answer == "a unkept b"
        starts = [BranchStart(root, BranchPoint(0, turn, 1, 1.0)) for turn in (1, 2)]
        first, second = (asyncio.run(made.run(TASK, 2, start=start)) for start in starts)
    assert first.answer == "a unkept b" and "was not kept" in second.error
    assert not tool.open


def test_a_state_is_dropped_when_its_time_is_over() -> None:
    tool, kept = Notes(), snapshots(lifetime_s=0.01)
    made = agent(takes_notes, {"Notes": tool}, kept)

    async def main() -> Trajectory:
        root = await made.run(TASK, 1)
        while len(kept):
            await asyncio.sleep(0.005)  # a timer's thread sends us no event
        return await made.run(TASK, 2, start=BranchStart(root, BranchPoint(0, 1, 1, 1.0)))

    assert "agent.snapshot_lifetime_s=0.01" in asyncio.run(main()).error
    assert not tool.open


@pytest.mark.parametrize("ending", ["error", "cancelled"])
def test_nothing_is_left_of_rollouts_that_do_not_end(ending: str) -> None:
    async def program(session: Session) -> str:
        for turn in range(2):
            call = await session.sample((turn, 50))
            await session.use_tool(call, "Notes", {"query": "x"})
        if ending == "error":
            raise RuntimeError("the program has a bug")
        reached.set()
        await asyncio.Event().wait()
        return ""

    tool, kept, reached = Notes(), snapshots(), asyncio.Event()
    made = agent(program, {"Notes": tool}, kept)

    async def main() -> None:
        with kept.held():
            rollout = asyncio.create_task(made.run(TASK, 1))
            if ending == "error":
                assert "RuntimeError" in (await rollout).error
                return
            await reached.wait()
            assert len(tool.open) == 2, "a session and a snapshot"
            rollout.cancel()
            await asyncio.wait({rollout})

    asyncio.run(main())
    assert not tool.open and not len(kept)


def test_only_the_states_of_these_rollouts_are_freed() -> None:
    """As on a node, where work items end one by one."""
    tool, kept = Notes(), snapshots()
    made = agent(takes_notes, {"Notes": tool}, kept)
    with kept.held([1]):
        with kept.held([2]):
            for seed in (1, 2):
                asyncio.run(made.run(TASK, seed))
            assert len(kept) == 4
        assert len(kept) == 2 and set(kept._kept) == {1}
    assert not tool.open


def test_without_branches_nothing_is_kept() -> None:
    tool = Notes()
    assert asyncio.run(agent(takes_notes, {"Notes": tool}, None).run(TASK, 1)).answer
    assert not tool.open


# ---- which tools


def check(tool: Tool) -> None:
    values = {"algorithm": {"name": "appo"}, "rollout": {"group_size": 8}}
    algorithm = load_algorithm(Config.model_validate(values))
    algorithm.check_inputs(SimpleNamespace(), {"Notes": tool})  # type: ignore[arg-type]


def test_appo_refuses_a_state_that_cannot_be_rewound_and_says_what_it_needs() -> None:
    class Plain:
        card = Notes.card
        execute = Notes.execute
        close = Notes.close

    check(Notes())
    words = "'Notes' of agent.tools has a state and cannot be rewound: it would need open_session"
    for tool in (Plain(), Counter()):
        with pytest.raises(UserError, match=words):
            check(tool)  # type: ignore[arg-type]


# ---- AgentFlow's flow, and a step of APPO


class Planner:
    """Writes Python: sets x in the first turn, changes it in the second, tells it in the third."""

    def measure(self, text: str) -> int:
        return len(text)

    async def plan(
        self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
    ) -> Plan:
        code = (
            f"import random\nx = [{seed % 1000}]\nrows = iter(range(9))\nrandom.seed()",
            f"x.append({turn + seed % 1000})\nnext(rows)",
            "print(x, next(rows), random.random())",
        )[turn]
        completion = Completion(
            (turn, 8, 9), (-0.1,) * 3, (VersionSpan(0, 3, 1),), FinishReason.STOP
        )
        action = Action("", "", code, "Python_Coder")
        return Plan(Call.of((turn,), completion, code), action)

    async def resume(self, prefix: ResponsePrefix, turn: int, seed: int, deadline_s: float) -> Plan:
        return await self.plan(TASK, Memory(), turn, seed, deadline_s)


def python_flow(tool: StatefulTool, kept: Snapshots) -> Flow:
    tools: dict[str, Tool] = {"Python_Coder": tool}
    return Flow(
        Planner(),  # type: ignore[arg-type]
        RuleExecutor(tools, 5.0, 400),
        RuleVerifier(lambda question, memory: False),
        RuleGenerator(last_result),
        FlowLimits(3, 60.0),
        stateful_tools=tools,
        snapshots=kept,
    )


def test_a_step_of_appo_with_sessions_of_python(python: python_coder.SessionCoder) -> None:
    """Roots, branches in each turn, rewards and advantages; all states are freed in the end."""
    kept = snapshots()
    made = python_flow(python, kept)
    tasks = [replace(TASK, id=f"t-{n}") for n in range(2)]
    points = [[BranchPoint(n, turn, 1, 1.0) for n in (0, 1) for turn in (1, 2, 2)]] * 2
    with kept.held():
        groups = collect(made, tasks, group_size=2, seed=0)
        full = collect_branches(made, groups, points, group_size=8, seed=1)
        assert len(kept) == 2 * 2 * 3
    for group in full:
        roots = group.trajectories[:2]
        for each in group.trajectories[2:]:
            assert each.branch is not None and not each.error
            parent, at = roots[each.branch.parent], each.branch.turn
            numbers = [t.seed % 1000 for t in (parent, parent if at == 2 else each)]
            told, root_told = each.turns[-1].result.text, parent.turns[-1].result.text
            assert told.startswith(f"[{numbers[0]}, {numbers[1] + 1}] 1 ")
            assert told.split()[-1] == root_told.split()[-1], "unseeded, and yet the same"
            assert (told == root_told) == (at == 2)
    batch = appo(score(full), keeps_equals=True)
    assert len(batch.samples) == 2 * 2 * 3
    assert not len(kept)


def test_a_branch_whose_state_is_gone_fails_and_is_not_trained(
    python: python_coder.SessionCoder,
) -> None:
    kept = snapshots()
    made = python_flow(python, kept)
    with kept.held():
        groups = collect(made, [TASK], group_size=2, seed=0)
    (full,) = collect_branches(made, groups, [[BranchPoint(0, 2, 1, 1.0)]], group_size=3, seed=1)
    assert full.trajectories[2].error.startswith("tool state: the state of its tools after turn 1")
    assert len(full.finished) == 2
    assert len(appo(score([full]), keeps_equals=True).samples) == 2 * 3


def test_a_tool_that_cannot_open_or_restore_costs_one_rollout() -> None:
    class Broken(Notes):
        def open_session(self) -> Notebook:
            raise RuntimeError("no port is free")

    async def main() -> str:
        try:
            async with rollout_tools({"Notes": Broken()}, None, 1, None):
                return ""
        except Exception as error:  # noqa: BLE001
            return str(error)

    assert asyncio.run(main()) == "Notes has no session: RuntimeError: no port is free"
    rollout = asyncio.run(agent(takes_notes, {"Notes": Broken()}, None).run(TASK, 1))
    assert rollout.error.startswith("tool state: Notes has no session")
