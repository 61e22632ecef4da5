"""Branches begin with the states that their parents' tools had, and nothing of those is left."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import make
import pytest
from batches import batch
from char_tokenizer import CharTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from make import rollout
from test_session import letters
from toy_options import toy

from flowtrain.agents.agentflow.build import make_policy
from flowtrain.agents.agentflow.commands import write_command
from flowtrain.agents.agentflow.executor import Executor
from flowtrain.agents.agentflow.flow import Flow, FlowLimits
from flowtrain.agents.agentflow.generator import Generator
from flowtrain.agents.agentflow.memory import Memory
from flowtrain.agents.agentflow.planner import Plan
from flowtrain.agents.agentflow.verifier import RuleVerifier
from flowtrain.agents.base import AgentContext
from flowtrain.agents.collect import collect, collect_branches
from flowtrain.agents.policy import ResponsePrefix
from flowtrain.agents.session import Session, SessionAgent
from flowtrain.agents.tool_states import tool_sessions
from flowtrain.algorithms.registry import load_algorithm
from flowtrain.rewards import score
from flowtrain.tools import StatefulTool, Tool, ToolCard, ToolContext, python_coder
from flowtrain.types import (
    Action,
    BranchPoint,
    BranchStart,
    Call,
    Completion,
    FinishReason,
    Task,
    ToolCall,
    ToolResult,
    Turn,
    UserError,
    VersionSpan,
)
from tests.attacks.sandboxes import needs_bubblewrap

pytestmark = pytest.mark.filterwarnings("ignore:sandbox 'limits'")
TASK = Task("t-1", "What is it?", ("5",))


class Notebook:
    """A session that keeps lines; `open` counts those that are not closed."""

    def __init__(self, tool: Notes, lines: Sequence[str]) -> None:
        self.tool, self.lines = tool, list(lines)
        tool.open.append(self)

    async def execute(self, query: str) -> str:
        before = list(self.lines)
        await asyncio.sleep(0)
        self.lines = [*before, query]
        return " ".join(self.lines)

    def close(self) -> None:
        if self in self.tool.open:
            self.tool.open.remove(self)


class Notes:
    card = ToolCard("Notes", "keeps notes", is_stateful=True)

    def __init__(self) -> None:
        self.open: list[Notebook] = []

    async def execute(self, query: str) -> str:
        return query

    async def open_session(self, history: Sequence[ToolCall]) -> Notebook:
        return Notebook(self, [json.loads(call.arguments)["query"] for call in history])

    def close(self) -> None: ...


@pytest.fixture(params=["seccomp", pytest.param("bubblewrap", marks=needs_bubblewrap), "limits"])
def python(request: pytest.FixtureRequest) -> Iterator[python_coder.SessionCoder]:
    made = coder(sandbox=request.param)
    yield made
    made.close()


def coder(**options: object) -> python_coder.SessionCoder:
    if sys.platform != "linux":
        pytest.skip("seccomp is Linux's")
    agent = {"python_session": True, "tool_timeout_s": 5.0, "max_result_chars": 400, **options}
    tool = python_coder.make(ToolContext(toy({"agent": agent})))
    assert isinstance(tool, python_coder.SessionCoder)
    return tool


# ---- agents that are programs


Program = Callable[[Session], Awaitable[str]]


def agent(program: Program, tools: Mapping[str, Any]) -> SessionAgent:
    class Agent(SessionAgent):
        can_branch = True

        async def answer(self, session: Session) -> str:
            return await program(session)

    config = toy({"agent": {"name": "tools", "tools": tuple(tools)}})
    policy = make_policy(config, "planner", letters(), CharTokenizer())  # type: ignore[arg-type]
    return Agent(AgentContext(config, {"planner": policy}, tools, {}, 4))


async def takes_notes(session: Session) -> str:
    """Note what was sampled, thrice; the last result tells all that the tool knows."""
    text = ""
    for turn in range(3):
        call = await session.sample((turn, 50))
        text = (await session.use_tool(call, "Notes", {"query": call.text})).text
    return text


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_branch_begins_with_the_state_at_the_end_of_the_turn_before(turn: int) -> None:
    tool = Notes()
    made = agent(takes_notes, {"Notes": tool})
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
    assert not tool.open


def test_calls_of_one_response_take_their_turns() -> None:
    async def at_once(session: Session) -> str:
        call = await session.sample((1,))
        wanted = [("Notes", {"query": f"{n}"}, f"{n}") for n in range(5)]
        return (await session.use_tools(call, wanted))[-1].text

    assert asyncio.run(agent(at_once, {"Notes": Notes()}).run(TASK, 1)).answer == "0 1 2 3 4"


def test_an_environment_repeats_its_own_tools_alone() -> None:
    """The session of the other has begun with what the parent did."""

    async def repeats(session: Session) -> str:
        session.repeats_tools = True
        return await takes_notes(session)

    made = agent(repeats, {"Notes": Notes()})
    root = asyncio.run(made.run(TASK, 1))
    branch = asyncio.run(made.run(TASK, 2, start=BranchStart(root, BranchPoint(0, 2, 1, 1.0))))
    assert not branch.error and len(branch.answer.split()) == 3


@pytest.mark.parametrize("ending", ["error", "cancelled"])
def test_nothing_is_left_of_rollouts_that_do_not_end(ending: str) -> None:
    async def program(session: Session) -> str:
        call = await session.sample((0, 50))
        await session.use_tool(call, "Notes", {"query": "x"})
        if ending == "error":
            raise RuntimeError("the program has a bug")
        reached.set()
        await asyncio.Event().wait()
        return ""

    tool, reached = Notes(), asyncio.Event()
    made = agent(program, {"Notes": tool})

    async def main() -> None:
        rollout = asyncio.create_task(made.run(TASK, 1))
        if ending == "error":
            assert "RuntimeError" in (await rollout).error
            return
        await reached.wait()
        assert len(tool.open) == 1
        rollout.cancel()
        await asyncio.wait({rollout})

    asyncio.run(main())
    assert not tool.open


def turn(*calls: ToolCall, action: Action | None = None, command: str = "") -> Turn:
    found = ToolResult("done")
    return make.turn((), action, calls={}, command=command, result=found, tool_calls=calls)


def test_the_history_is_what_the_parent_asked_of_that_tool_and_its_card_took() -> None:
    given = [ToolCall("Notes", json.dumps(each)) for each in ({"query": "a"}, {"other": 1})]
    action = Action("", "", "b", "Notes")
    command = "; ".join(write_command({"query": text}) for text in ("b; #", "c")) + "  # the first"
    turns = (
        turn(*given, ToolCall("Search", '{"query": "x"}')),
        turn(action=action, command=command),
        turn(action=action, command="No command was run."),
        turn(action=replace(action, tool_name="Search"), command=command),
        turn(ToolCall("Notes", '{"query": "after the branch"}')),
    )
    start = BranchStart(rollout(*turns, task=TASK), BranchPoint(0, 4, 0, 1.0))

    async def lines() -> list[str]:
        tool = Notes()
        async with tool_sessions([tool], start):
            return tool.open[0].lines

    assert asyncio.run(lines()) == ["a", "b; #", "c"]


# ---- which tools


def test_appo_refuses_a_state_that_cannot_be_rewound_and_says_what_it_needs() -> None:
    class Plain:
        card = Notes.card
        execute = Notes.execute
        close = Notes.close

    values = {"algorithm": {"name": "appo"}, "rollout": {"group_size": 8}}
    algorithm = load_algorithm(toy(values))
    algorithm.check_inputs(SimpleNamespace(), {"Notes": Notes()})  # type: ignore[arg-type]
    words = "'Notes' of agent.tools has a state and cannot be rewound: it would need open_session"
    with pytest.raises(UserError, match=words):
        algorithm.check_inputs(SimpleNamespace(), {"Notes": Plain()})  # type: ignore[arg-type]


def test_a_tool_that_cannot_open_costs_one_rollout() -> None:
    class Broken(Notes):
        async def open_session(self, history: Sequence[ToolCall]) -> Notebook:
            raise RuntimeError("no port is free")

    rollout = asyncio.run(agent(takes_notes, {"Notes": Broken()}).run(TASK, 1))
    assert rollout.error == "tool state: Notes has no session: RuntimeError: no port is free"


# ---- Python whose variables last


def told(tool: python_coder.SessionCoder, codes: Sequence[str]) -> list[str]:
    """What each of the programs of a session comes to."""

    async def main() -> list[str]:
        session = await tool.open_session(())
        return [(await session.execute(code)).text for code in codes]

    return asyncio.run(main())


def test_variables_last_and_each_result_is_that_of_its_own_program(
    python: python_coder.SessionCoder,
) -> None:
    begin = """
import os, random, sys
print("before", x := 1)
os.write(1, b"and past sys.stdout")
rows, out, first = iter(range(9)), sys.stdout, random.random()
def divide(n):
    return 1 / n
"""
    look = "out.write(f'{x} {next(rows)} {random.random() != first}\\n')\nx += 1"
    found = told(python, [begin, look, look, "x", "x = 0", "x", "divide(x)"])
    assert found[1:4] == ["1 0 True", "2 1 True", "3"], "random goes on"
    assert found[4:] == [
        "the code ran and printed nothing",
        "0",
        "Error: ZeroDivisionError: division by zero",
    ]


@pytest.mark.clock
def test_an_exception_keeps_what_was_set_and_a_limit_leaves_nothing() -> None:
    tool = coder(code_timeout_s=0.8)
    ended = {
        "x = 2\nwhile True: pass": "CPU time limit of 0.8 s exceeded",
        "x = 4; import os; os._exit(3)": "exited with status 3",
        "x = 5; import os; os.abort()": "killed by SIGSEGV",  # it cannot send what it means
        "x = 6; [0] * 10**9": "memory limit of 128 MiB exceeded",
        "import os\nwhile True: os.write(1, bytes(1 << 16))": "output limit of 16 MiB exceeded",
    }
    raised = {
        "x = 1\n1 / 0": "ZeroDivisionError: division by zero (line 2: 1 / 0)",
        "raise SystemExit(3)": "SystemExit: 3",
        "class odd(Exception): pass\nraise odd": "odd (line 2: raise odd)",
        "x = (": "SyntaxError: '(' was never closed (<code>, line 1)",
    }
    codes = [code for each in [*raised, *ended] for code in (each, "x")]
    found = told(tool, codes)
    tool.close()
    assert found[::2] == [f"Error: {error}" for error in (raised | ended).values()]
    assert found[1::2] == ["1"] * len(raised | ended)


def test_a_session_that_is_opened_again_skips_what_left_nothing() -> None:
    """What ended the process would end it once more."""
    history = [
        ToolCall("Python_Coder", json.dumps({"query": query}), ToolResult(error=error))
        for query, error in (
            ("x = 1", None),
            ("x = 2; 1 / 0", "ZeroDivisionError: division by zero (line 1: x = 2; 1 / 0)"),
            ("x = 3; import os; os._exit(3)", "exited with status 3"),
        )
    ]
    tool = coder()

    async def main() -> str:
        session = await tool.open_session(history)
        return (await session.execute("x")).text

    assert asyncio.run(main()) == "2"
    tool.close()


@pytest.mark.clock
def test_all_calls_of_a_session_together_have_the_time_limit() -> None:
    tool = coder(code_timeout_s=0.6)
    work = (
        "import time\nuntil = time.process_time() + 0.35\nwhile time.process_time() < until: pass"
    )
    found = told(tool, [f"{work}\nx = 1", f"{work}\nx = 2", "x"])
    tool.close()
    assert found[1:] == ["Error: CPU time limit of 0.6 s exceeded", "1"]


def test_a_call_that_ends_the_process_in_order_is_told_of() -> None:
    tool = coder()
    found = told(tool, ["import os; os._exit(0)", "print(1)"])
    tool.close()
    assert found[1] == "Error: an earlier call has ended the process"


STATEMENTS = st.sampled_from(
    (
        *("x += 1", "items.append(x)", "print(x, items)", "def f(n, x=x): return n + x"),
        *("x = f(x)", "print(next(rows))", "print(random.random())"),
        *("import math as m; x = m.floor(x / 2)", "print('no end of line', end='')"),
        *("{*items, 'a', 'b', 'c'} and print({*items, 'a', 'b', 'c'})", "del items[:1]"),
    )
)
BEGIN = "import random\nx, items, rows = 0, [], (n * n for n in range(1000))\nf = abs\n"


@settings(max_examples=40)
@given(parts=st.lists(st.lists(STATEMENTS, max_size=4), min_size=1, max_size=5))
def test_parts_of_a_program_print_what_it_prints_as_a_whole(parts: list[list[str]]) -> None:
    tool = SHARED.setdefault("tool", coder(max_result_chars=100_000))
    codes = [BEGIN, *("pass\n" + "\n".join(part) for part in parts)]
    whole = asyncio.run(tool.sandbox.run("\n".join(codes)))
    assert whole.error is None
    done: list[str] = []
    printed = ""
    for code in codes:
        ran = asyncio.run(tool.sandbox.run(code, done))
        assert ran.error is None
        printed += ran.output
        done.append(code)
    assert printed == whole.output


SHARED: dict[str, python_coder.SessionCoder] = {}
"""For hypothesis, which refuses fixtures of a test; it ends with the process."""


# ---- AgentFlow's flow, and a step of APPO


class Planner:
    """Writes Python: sets x in the first turn, changes it in the second, tells it in the third."""

    def measure(self, text: str) -> int:
        return len(text)

    async def plan(
        self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
    ) -> Plan:
        code = (
            f"import random\nx = [{seed % 1000}]\nrows = iter(range(9))",
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


def python_flow(tool: StatefulTool) -> Flow:
    tools: dict[str, Tool] = {"Python_Coder": tool}
    return Flow(
        Planner(),  # type: ignore[arg-type]
        Executor(tools, 5.0, 400),
        RuleVerifier(lambda task, memory: False),
        Generator(),
        FlowLimits(3, 60.0),
        stateful_tools=tools,
    )


def test_a_step_of_appo_with_sessions_of_python(python: python_coder.SessionCoder) -> None:
    """Roots, branches in each turn, rewards and advantages."""
    made = python_flow(python)
    tasks = [replace(TASK, id=f"t-{n}") for n in range(2)]
    points = [[BranchPoint(n, turn, 1, 1.0) for n in (0, 1) for turn in (1, 2, 2)]] * 2
    groups = collect(made, tasks, group_size=2, seed=0)
    full = collect_branches(made, groups, points, group_size=8, seed=1)
    for group in full:
        roots = group.trajectories[:2]
        for each in group.trajectories[2:]:
            assert each.branch is not None and not each.error
            parent, at = roots[each.branch.parent], each.branch.turn
            numbers = [t.seed % 1000 for t in (parent, parent if at == 2 else each)]
            found, root_found = each.turns[-1].result.text, parent.turns[-1].result.text
            assert found.startswith(f"[{numbers[0]}, {numbers[1] + 1}] 1 ")
            assert (found == root_found) == (at == 2)
    found = batch("appo", score(full), algorithm={"equal_groups": "keep"})
    assert len(found.samples) == 2 * 2 * 3
