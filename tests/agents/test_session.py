"""Agents that are written as programs: what a session records, how it ends, and how it branches."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from char_tokenizer import CharTokenizer
from make import Engine, Tool
from toy_options import toy

from flowtrain.agents.agentflow.build import make_policy
from flowtrain.agents.base import AgentContext
from flowtrain.agents.chat import Chat
from flowtrain.agents.collect import collect
from flowtrain.agents.deadlines import Cutoff
from flowtrain.agents.registry import load_kind
from flowtrain.agents.session import RolloutEnded, Session, SessionAgent
from flowtrain.algorithms.registry import load_algorithm
from flowtrain.config import Config, Reward
from flowtrain.inference.protocol import EngineError
from flowtrain.records import (
    BranchPoint,
    BranchStart,
    Call,
    Group,
    Sampling,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    UserError,
    Verdict,
    VersionSpan,
)
from flowtrain.rewards import score
from flowtrain.tools import ToolCard
from flowtrain.tools.base import Parameter, schema_of
from tests.packages import lay_out

TASK = Task("t-1", "What is 2 + 3?", ("5",))
Program = Callable[[Session], Awaitable[Any]]


def two_letters(prompt: Any, sampling: Sampling) -> list[int]:
    """The seed of the request."""
    return [ord("a") + sampling.seed // 26**n % 26 for n in range(2)]


def letters(max_tokens: int = 500, **options: Any) -> Engine:
    return Engine(two_letters, 2, max_tokens, **options)


def shout(heard: list[str]) -> Tool:
    """A tool that shouts, later for a shorter text."""

    async def act(text: str) -> str:
        for _ in range(10 - len(text)):
            await asyncio.sleep(0)
        heard.append(text)
        return text.upper()

    card = ToolCard("Shout", "shouts", schema_of(Parameter("text", "what to shout")))
    return Tool(card, act)


class Agent(SessionAgent):
    """Runs the program that a test gives it."""

    program: Program

    async def answer(self, session: Session) -> str:
        return await self.program(session)


def make(
    program: Program, engine: Engine, tool: Tool | None = None, **agent: object
) -> SessionAgent:
    config = toy({"agent": {"name": "x.py:X", **agent}})
    policy = make_policy(config, "planner", engine, CharTokenizer())
    tools = {} if tool is None else {"Shout": tool}
    made = Agent(AgentContext(config, {"planner": policy}, tools, {}, config.agent.max_turns))
    made.program = program
    return made


def run(program: Program, engine: Engine | None = None, **options: Any) -> Trajectory:
    return asyncio.run(make(program, engine or letters(), **options).run(TASK, 11))


async def two_turns(session: Session) -> str:
    prompt = session.policy.encode(session.task.question)
    first = await session.sample(prompt)
    result = await session.use_tool(first, "Shout", {"text": first.text})
    prompt += first.response_ids + session.policy.encode(result.text)
    return (await session.sample(prompt)).text


# ---- what is recorded


def test_a_turn_holds_the_very_ids_and_the_tools_that_it_asked_for() -> None:
    heard: list[str] = []
    engine = letters()
    trajectory = run(two_turns, engine, tool=shout(heard))
    first, second = (turn.calls["planner"] for turn in trajectory.turns)
    assert [call.prompt_ids for call in (first, second)] == [asked for asked, _ in engine.asked]
    assert second.prompt_ids[: len(first.prompt_ids) + 2] == first.prompt_ids + first.response_ids
    assert first.logprobs == (-0.5, -0.5) and first.spans == (VersionSpan(0, 2, 2),)
    assert trajectory.answer == second.text and not trajectory.truncated and not trajectory.error
    (used,) = trajectory.turns[0].tool_calls
    assert (used.name, json.loads(used.arguments)) == ("Shout", {"text": first.text})
    assert used.result.output == first.text.upper() and heard == [first.text]
    assert [turn.verdict for turn in trajectory.turns] == [Verdict.CONTINUE, Verdict.STOP]


def test_seeds_differ_by_call_and_by_rollout() -> None:
    engine = letters()
    agent = make(two_turns, engine, shout([]))
    for seed in (11, 11, 12):
        asyncio.run(agent.run(TASK, seed))
    seeds = [sampling.seed for _, sampling in engine.asked]
    assert seeds[:2] == seeds[2:4] and len(set(seeds)) == 4


def test_a_call_that_fails_or_is_cancelled_is_no_turn() -> None:
    engine = letters()

    async def program(session: Session) -> str:
        engine.hangs = True
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.sample((1,)), 0)
        engine.hangs, engine.error = False, ValueError("once")
        with pytest.raises(ValueError, match="once"):
            await session.sample((1,))
        engine.error = None
        first, second = await asyncio.gather(session.sample((1,)), session.sample((1,)))
        with pytest.raises(RolloutEnded):
            await session.sample((1,))
        return first.text + second.text

    trajectory = run(program, engine, max_turns=2)
    assert [turn.calls["planner"].text for turn in trajectory.turns] == [
        trajectory.answer[:2],
        trajectory.answer[2:],
    ]
    assert len({sampling.seed for _, sampling in engine.asked}) == len(engine.asked)


def test_only_so_many_calls_are_under_way_as_turns_are_left() -> None:
    async def program(session: Session) -> str:
        calls = [session.sample((1,)) for _ in range(3)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        return " ".join(type(each).__name__ for each in found)

    trajectory = run(program, letters(), max_turns=2)
    assert trajectory.answer == "Call Call RolloutEnded" and len(trajectory.turns) == 2


def test_tools_of_one_response_run_at_once_and_are_recorded_in_its_order() -> None:
    heard: list[str] = []

    async def program(session: Session) -> str:
        calls = [("Shout", {"text": text}, text) for text in ("a", "bbbb", "cccccc")]
        results = await session.use_tools(await session.sample((1, 2)), calls)
        return " ".join(result.output for result in results)

    trajectory = run(program, tool=shout(heard))
    assert heard == ["cccccc", "bbbb", "a"] and trajectory.answer == "A BBBB CCCCCC"
    assert [used.id for used in trajectory.turns[0].tool_calls] == ["a", "bbbb", "cccccc"]


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("Whisper", {"text": "a"}, "there is no tool 'Whisper'; there are: Shout"),
        ("Shout", {"words": "a"}, "Shout takes (text: str); got (words: str)"),
    ],
)
def test_a_wrong_tool_is_a_result(name: str, arguments: dict[str, object], error: str) -> None:
    async def program(session: Session) -> str:
        return (await session.use_tool(await session.sample((1,)), name, arguments)).text

    trajectory = run(program, tool=shout([]))
    assert trajectory.answer == f"Error: {error}" and not trajectory.error
    (turn,) = trajectory.turns
    assert turn.tool_calls[0].result.error == error
    assert turn.problem == ("there is no tool 'Whisper'" if name == "Whisper" else "")


def test_tools_that_ran_elsewhere_and_malformed_responses_are_recorded() -> None:
    async def program(session: Session) -> str:
        call = await session.sample((1,))
        session.record_tool(call, ToolCall("their", "{}", ToolResult("so"), "c1"))
        session.record_malformed(call, "no JSON")
        return ""

    (turn,) = run(program).turns
    assert turn.tool_calls == (ToolCall("their", "{}", ToolResult("so"), "c1"),)
    assert turn.problem == "no JSON" and turn.action is None


def test_an_environment_reports_the_reward() -> None:
    async def program(session: Session) -> str:
        await session.sample((1,))
        session.report(solved=0.5, polite=0.25)
        return "wrong"

    trajectory = run(program)
    assert trajectory.reported == {"solved": 0.5, "polite": 0.25}
    (group,) = score([Group(0, (trajectory,))])
    assert [(t.reward, t.scored_by) for t in group.trajectories] == [(0.75, "reported")]


@pytest.mark.parametrize("part", [2.0, float("nan"), -0.1])
def test_a_reported_reward_out_of_bounds_fails_the_rollout(part: float) -> None:
    async def program(session: Session) -> str:
        session.report(solved=part)
        return "5"

    rollouts = [Group(0, (run(program),))]
    (group,) = score(rollouts)
    assert group.trajectories[0].reward is None
    assert "scorer reported: its reward is" in group.trajectories[0].error
    (group,) = score(rollouts, bounds=Reward(low=-1, high=2))
    within = None if math.isnan(part) else part
    assert group.trajectories[0].reward == within


def test_the_sum_of_what_is_reported_may_round() -> None:
    async def program(session: Session) -> str:
        session.report(a=0.7, b=0.2, c=0.1 + 1e-12)
        return "5"

    (group,) = score([Group(0, (run(program),))])
    assert group.trajectories[0].reward == 1.0


# ---- how it ends


def test_a_program_that_crashes_costs_its_rollout_alone() -> None:
    async def program(session: Session) -> str:
        await session.sample((1,))
        raise KeyError("no\nsuch key")

    trajectory = run(program)
    assert trajectory.error == "agent: KeyError: 'no\\nsuch key'"
    assert len(trajectory.turns) == 1 and trajectory.answer == ""


@pytest.mark.parametrize("answer", [None, 5])
def test_an_answer_is_a_string(answer: object) -> None:
    async def program(session: Session) -> Any:
        return answer

    assert "agent: TypeError: the answer is a " in run(program).error


def test_an_engine_that_failed_for_good_ends_the_run() -> None:
    with pytest.raises(EngineError, match="it is gone"):
        run(two_turns, letters(error=EngineError("it is gone")))


def test_a_mistake_of_the_user_ends_the_run() -> None:
    async def program(session: Session) -> str:
        raise UserError("agent.name='x': wrong")

    with pytest.raises(UserError, match="wrong"):
        run(program)


async def for_ever(session: Session) -> str:
    session.answer_so_far = "so far"
    while True:
        await session.sample((1,))


def test_turns_and_positions_are_limits() -> None:
    by_turns = run(for_ever, max_turns=3)
    assert (by_turns.truncated, by_turns.answer, len(by_turns.turns)) == ("turns", "so far", 3)
    assert all(turn.verdict is Verdict.CONTINUE for turn in by_turns.turns)
    by_prompt = run(two_turns, letters(max_tokens=48 + len(TASK.question)), tool=shout([]))
    assert (by_prompt.truncated, len(by_prompt.turns)) == ("prompt", 1)


def test_a_program_may_answer_when_a_limit_strikes() -> None:
    async def program(session: Session) -> str:
        try:
            return await for_ever(session)
        except RolloutEnded as ended:
            return ended.reason

    assert run(program).answer == "turns"


def test_time_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowtrain.agents.session._GRACE_S", 0.0)
    trajectory = run(two_turns, letters(hangs=True), rollout_timeout_s=0.01)
    assert (trajectory.truncated, trajectory.turns) == ("time", ())

    async def stuck(session: Session) -> str:
        await asyncio.Event().wait()
        return ""

    assert run(stuck, rollout_timeout_s=0.01).truncated == "time"


def test_a_timeout_of_the_programs_own_is_a_crash() -> None:
    async def program(session: Session) -> str:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()
        return ""

    assert run(program).error.startswith("agent: TimeoutError")


def test_a_cutoff_ends_it() -> None:
    async def cut() -> Trajectory:
        cutoff = Cutoff()
        cutoff.set(asyncio.get_running_loop().time())
        return await make(two_turns, letters(hangs=True)).run(TASK, 1, cutoff)

    assert asyncio.run(cut()).truncated == "straggler"


# ---- branches


@pytest.mark.parametrize(("turn", "token"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_branch_runs_the_program_again_up_to_its_point(turn: int, token: int) -> None:
    heard: list[str] = []
    engine, tool = letters(), shout(heard)
    parent = run(two_turns, tool=tool)
    start = BranchStart(parent, BranchPoint(0, turn, token, 1.0))
    branch = asyncio.run(make(two_turns, engine, tool).run(TASK, 12, start=start))
    assert branch.branch == start.point and not branch.error
    assert branch.turns[:turn] == parent.turns[:turn]
    before, after = parent.turns[turn].calls["planner"], branch.turns[turn].calls["planner"]
    assert after.prompt_ids == before.prompt_ids
    assert after.response_ids[:token] == before.response_ids[:token]
    (asked, _), *_ = engine.asked
    assert asked == before.prompt_ids + before.response_ids[:token]
    assert len(engine.asked) == 2 - turn
    assert len(heard) == (1 if turn == 1 else 2), "a tool before the point runs once"


def test_calls_side_by_side_are_turns_in_the_order_in_which_they_were_asked() -> None:
    """The first is answered last, and a branch from the third finds both again."""

    class Late(Engine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Call:
            for _ in range(20 if tuple(prompt_ids) == (1,) else 0):
                await asyncio.sleep(0)
            return await super().generate(prompt_ids, sampling)

    async def program(session: Session) -> str:
        drafts = await asyncio.gather(session.sample((1,)), session.sample((2,)))
        return (await session.sample(drafts[0].response_ids + drafts[1].response_ids)).text

    agent = make(program, Late(two_letters))
    parent = asyncio.run(agent.run(TASK, 1))
    assert [turn.calls["planner"].prompt_ids for turn in parent.turns[:2]] == [(1,), (2,)]
    start = BranchStart(parent, BranchPoint(0, 2, 1, 1.0))
    branch = asyncio.run(agent.run(TASK, 2, start=start))
    assert branch.error == "" and branch.turns[:2] == parent.turns[:2]


def test_a_program_that_asks_something_else_cannot_branch() -> None:
    async def counting(session: Session) -> str:
        tries.append(0)
        return (await session.sample((len(tries),))).text

    tries: list[int] = []
    agent = make(counting, letters())
    parent = asyncio.run(agent.run(TASK, 1))
    start = BranchStart(parent, BranchPoint(0, 0, 1, 1.0))
    branch = asyncio.run(agent.run(TASK, 2, start=start))
    assert "it cannot branch: the same task and seed led to a different prompt" in branch.error


# ---- by name


MINE = """
from flowtrain.agents.session import Session, SessionAgent

class Echo(SessionAgent):
    async def answer(self, session: Session) -> str:
        return (await session.sample(session.policy.encode(session.task.question))).text

class Rewinds(Echo):
    can_branch = True

NOT_ONE = 5
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path}/mine.py"


def config(name: str, **sections: object) -> Config:
    return toy({"agent": {"name": name}, **sections})


def test_an_agent_of_ones_own_file_makes_rollouts(mine: str) -> None:
    chosen = config(f"{mine}:Echo")
    sampled = Counter(verifier=1)
    policy = make_policy(chosen, "planner", letters(), CharTokenizer(), sampled=sampled)
    agent = load_kind(chosen).make(AgentContext(chosen, {"planner": policy}, {}, {}, 3))
    (group,) = collect(agent, [TASK], group_size=4, seed=0)
    assert len({t.answer for t in group.trajectories}) == 4
    assert sampled == {"verifier": 1, "planner": 4 * 2}
    agent.close()


def test_an_agent_of_another_package_makes_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"echo": "their_agents:Echo", "broken": "their_agents:Gone"}
    lay_out(tmp_path, "their_agents", "flowtrain.agents", names, MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert not load_kind(config("echo")).can_branch
    told = r"package their_agents 1\.2 cannot be imported: AttributeError"
    with pytest.raises(UserError, match=told):
        load_kind(config("broken"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("agentflo", ("there is no such agent; there are agentflow, ", "FILE.py:NAME")),
        ("{mine}:Eco", ("has no 'Eco'",)),
        ("{mine}:NOT_ONE", ("is a int, not an agent class",)),
        ("gone/agent.py:A", ("there is no file",)),
        ("json:dumps.x", ("json has no 'dumps.x'",)),
    ],
)
def test_a_name_that_names_no_agent_is_refused(
    mine: str, name: str, words: tuple[str, ...]
) -> None:
    name = name.format(mine=mine)
    with pytest.raises(UserError) as refusal:
        load_kind(config(name))
    assert all(word in str(refusal.value) for word in (f"agent.name={name!r}", *words))


def test_algorithms_and_policies_ask_what_the_agent_can_do(mine: str) -> None:
    appo = {"algorithm": {"name": "appo"}, "appo": {"num_roots": 2}}
    plain = config(f"{mine}:Echo", **appo)
    told = r"'appo' rewinds rollouts and branches, which agent\.name="
    with pytest.raises(UserError, match=told):
        load_algorithm(plain).check_agent(load_kind(plain))
    rewinds = config(f"{mine}:Rewinds", **appo)
    load_algorithm(rewinds).check_agent(load_kind(rewinds))
    infoflow = config(f"{mine}:Echo", algorithm={"name": "infoflow"})
    with pytest.raises(UserError, match=r"agent\.name=.* does not support hints between turns"):
        load_algorithm(infoflow).check_agent(load_kind(infoflow))
    with pytest.raises(
        UserError, match=r"policies\.other cannot be combined with agent\.name='single'"
    ):
        load_kind(config("single", policies={"one": {}, "other": {}}))


def test_a_chat_without_a_template_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CharTokenizer, "chat_template", None)

    async def program(session: Session) -> str:
        return await Chat(session).ask("Hi")

    with pytest.raises(UserError, match=r"make smollm2.*session\.sample .docs/agents/custom\.md"):
        run(program)


def test_the_final_answer_is_read_once_at_the_end() -> None:
    async def program(session: Session) -> str:
        return "Norway's is <answer> Oslo </answer>, I think."

    trajectory = run(program)
    assert (trajectory.answer, trajectory.output[:8]) == ("Oslo", "Norway's")

    async def plain(session: Session) -> str:
        return "Oslo"

    assert (run(plain).answer, run(plain).output) == ("Oslo", "")
