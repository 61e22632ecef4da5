"""The flow with every frozen role on one real server that answers as a script says."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from batches import flow_grpo
from char_tokenizer import CharTokenizer
from chat_servers import ChatServer, chat_server
from make import Engine, Tool
from starlette.responses import JSONResponse, Response
from toy_options import toy

from flowtrain.agents.agentflow import build
from flowtrain.agents.agentflow.build import MODULES, make_flow
from flowtrain.agents.agentflow.commands import NO_COMMAND
from flowtrain.agents.agentflow.flow import Flow
from flowtrain.agents.agentflow.memory import Memory, MemoryEntry
from flowtrain.agents.agentflow.prompts import FullPrompt
from flowtrain.agents.collect import collect
from flowtrain.agents.policy import Moment, Policy
from flowtrain.inference import endpoint
from flowtrain.inference.endpoint import Endpoint
from flowtrain.records import Action, Group, Sample, Task, Trajectory, Turn, UserError, Verdict
from flowtrain.rewards import score
from flowtrain.tools import Parameter, ToolCard, schema_of
from flowtrain.utils.event_loop import run_to_end

SECRET = re.compile(r"SECRET-\d+-END")
ROLES = {
    "analyst": "You prepare the work",
    "planner": "You are the planner",
    "executor": "You write the command",
    "verifier": "You check whether",
    "generator": "You write the final answer",
}


CARD = ToolCard(
    "Wiki",
    "Finds facts about countries.",
    schema_of(
        Parameter("query", "what to find"), Parameter("limit", "how many passages", int, False)
    ),
    limits="knows no people",
    advice="name the country",
    examples=({"query": "capital of Peru", "limit": 2},),
)


async def find(query: str, limit: int = 1) -> str:
    await asyncio.sleep(0)
    return f"found {query} ({limit})"


Script = dict[str, Callable[[str], Response | str]]
TASK = Task("t", "What is the area of Chad?", ("1284",))


def role_of(prompt: str) -> str:
    return next(role for role, beginning in ROLES.items() if prompt.startswith(beginning))


def steps(prompt: str) -> int:
    return prompt.count('"Action Step')


def by(reply: Response | str) -> Callable[[str], Response | str]:
    return lambda prompt: reply


def command_in(turn: Turn) -> str:
    return MemoryEntry.of(turn).command


def output(turn: Turn) -> str:
    return turn.tool_calls[0].result.output


def command(*calls: str) -> str:
    lines = "".join(f"execution = tool.execute({call})\n" for call in calls)
    return f"```python\n{lines}```"


SCRIPT: Script = {
    "analyst": by("1. Summary: an area.\n"),
    "planner": lambda prompt: (
        f"Justification: j\nContext: c{steps(prompt)}\nSub-Goal: goal {steps(prompt)}\n"
        "Tool Name: wiki"
    ),
    "executor": by(command('query="area of Chad", limit=3')),
    "verifier": lambda prompt: (
        f"Do not stop too early.\nConclusion: {'STOP' if steps(prompt) == 2 else 'CONTINUE'}"
    ),
    "generator": by("Process summary: two look-ups.\nAnswer: <answer>1284</answer>"),
}


@contextmanager
def llm_flow(
    script: Script,
    wait: Callable[[], Any] | None = None,
    agent: dict[str, Any] | None = None,
    **chat: Any,
) -> Iterator[tuple[Flow, ChatServer, Engine]]:
    """All roles by language models."""
    said = {**SCRIPT, **script}

    def reply(body: Any) -> Response | str:
        prompt = body["messages"][0]["content"]
        return said[role_of(prompt)](prompt)

    with chat_server(reply, wait) as server:
        options = {"model": "m", "base_url": server.base_url, "api_key_env": "", "max_retries": 1}
        config = toy(
            {
                "engines": {"local": {**options, **chat}},
                "roles": dict.fromkeys(MODULES, "local"),
                "agent": {"prompt": "full", "max_result_chars": 300, **(agent or {})},
            }
        )
        engine = Engine(
            lambda prompt, _: map(ord, said["planner"](prompt)),
            max_tokens=1_000_000,
            decode=CharTokenizer().decode,
        )
        planner = Policy(engine, CharTokenizer(), 100, 1.0, 30.0)
        with closing(Endpoint("local", config.engines["local"])) as chats:
            modules = dict.fromkeys(MODULES, chats)
            yield make_flow(config, planner, {"Wiki": Tool(CARD, find)}, 3, modules), server, engine


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_FIRST_PAUSE_S", 0.01)


def run(flow: Flow, task: Task = TASK, seed: int = 5) -> Trajectory:
    return run_to_end(flow.run(task, seed))


def run_with(**script: Callable[[str], Response | str]) -> tuple[Trajectory, ChatServer]:
    with llm_flow(script) as (flow, server, _):
        return run(flow), server


# ---- the whole flow


def test_all_roles_on_one_server_give_the_expected_trajectory() -> None:
    with llm_flow({}) as (flow, server, engine):
        trajectory = run(flow)
    expected = ["analyst", "executor", "verifier", "executor", "verifier", "generator"]
    assert [role_of(prompt) for prompt in server.prompts] == expected
    found = (trajectory.analysis, trajectory.answer, trajectory.truncated, trajectory.error)
    assert found == ("1. Summary: an area.", "1284", "", "")
    assert trajectory.output.startswith("Process summary:") and trajectory.reward is None
    first, second = trajectory.turns
    seen = [turn.action for turn in trajectory.turns]
    assert seen == [Action("j", f"c{n}", f"goal {n}", "Wiki") for n in range(2)]
    assert command_in(first) == 'execution = tool.execute(query="area of Chad", limit=3)'
    assert output(first) == "found area of Chad (3)"
    assert (first.verdict, second.verdict) == (Verdict.CONTINUE, Verdict.STOP)
    assert first.verdict_text == "Do not stop too early.\nConclusion: CONTINUE"
    assert len(engine.prompts) == 2
    assert tuple(map(ord, engine.prompts[1])) == second.calls["planner"].prompt_ids


def test_every_prompt_holds_what_its_module_must_know() -> None:
    with llm_flow({}) as (flow, server, engine):
        run(flow)
    prompts = {role_of(prompt): prompt for prompt in [*server.prompts, *engine.prompts]}
    of_card = ("Finds facts about countries.", "how many passages", "knows no people")
    for role in ("analyst", "planner", "verifier", "executor"):
        for text in (*of_card, "name the country", 'query="capital of Peru", limit=2'):
            assert text in prompts[role], role
    for role, prompt in prompts.items():
        assert TASK.question in prompt
        knows_more = role in ("planner", "verifier", "generator")
        assert ("1. Summary: an area." in prompt) == knows_more, role
        assert ("found area of Chad (3)" in prompt) == knows_more, role
        left = re.sub(r"\{[^{}]*\}|\{\s*\"Action[\s\S]*\}", "", prompt)
        assert "{" not in left, "no place of a template is left open"
    assert "goal 1" in prompts["executor"] and "c1" in prompts["executor"]
    assert '"goal 1"' in prompts["verifier"] and '"goal 1"' not in prompts["planner"]


def test_analysis_is_in_shared_prefix() -> None:
    with llm_flow({}) as (flow, _, engine):
        run(flow)
    first, second = engine.prompts
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    shared = "".join(letter for letter, _ in alike)
    assert "1. Summary: an area." in shared and "name the country" in shared
    assert len(shared) > len(first) - 10, "the first prompt, but for the end of its empty memory"


def test_a_group_shares_one_analysis_and_questions_do_not() -> None:
    about: Script = {"analyst": lambda prompt: "about " + ("Mali" if "Mali" in prompt else "Chad")}
    with llm_flow(about) as (flow, server, _):
        tasks = [TASK, Task("m", "What is the area of Mali?", ("1",))]
        groups = collect(flow, tasks, group_size=8, seed=1)
        asked = [role_of(prompt) for prompt in server.prompts].count("analyst")
        collect(flow, tasks[:1], group_size=4, seed=2, max_in_flight=1)
        again = [role_of(prompt) for prompt in server.prompts].count("analyst")
    expected = [{"about Chad"}, {"about Mali"}]
    assert [{t.analysis for t in group.trajectories} for group in groups] == expected
    assert (asked, again) == (2, 3), "once per question and batch, overlapping or not"


def test_an_endless_analysis_is_shortened() -> None:
    assert 8_000 < len(run_with(analyst=by("x" * 100_000))[0].analysis) < 8_100


def test_no_task_sees_the_memory_of_another() -> None:
    """Forty rollouts at once, each told a secret that it repeats wherever it can."""
    order = random.Random(0)

    def telling(form: str) -> Callable[[str], str]:
        return lambda prompt: form.replace("$", SECRET.findall(prompt)[0])

    script = {
        "analyst": telling("about $"),
        "planner": telling("Context: $\nSub-Goal: ask $\nTool Name: Wiki"),
        "executor": telling(command('query="$"')),
        "verifier": telling("seen $\nConclusion: CONTINUE"),
        "generator": telling("<answer>$</answer>"),
    }
    late = lambda: asyncio.sleep(order.random() / 50)  # noqa: E731
    with llm_flow(script, wait=late) as (flow, server, engine):
        tasks = [Task(f"t{i}", f"What is behind SECRET-{i}-END?", ("x",)) for i in range(20)]
        groups = collect(flow, tasks, group_size=2, seed=1)
    assert server.most > 10, "they overlapped"
    assert len(server.prompts) == 20 + 2 * 20 * (3 * 2 + 1) and len(engine.prompts) == 2 * 20 * 3
    for prompt in (*server.prompts, *engine.prompts):
        assert len(set(SECRET.findall(prompt))) == 1, prompt
    for index, group in enumerate(groups):
        for each in group.trajectories:
            turns = [command_in(turn) + output(turn) + turn.verdict_text for turn in each.turns]
            for text in (each.analysis, each.answer, *turns):
                assert set(SECRET.findall(text)) == {f"SECRET-{index}-END"}
            assert len(turns) == 3


def test_over_a_hundred_rollouts_are_under_way_at_once() -> None:
    """Nobody is answered before 128 requests have come, each of another rollout."""
    all_here, count = asyncio.Event(), itertools.count(1)

    async def wait() -> None:
        if next(count) == 128:
            all_here.set()
        await asyncio.wait_for(all_here.wait(), 60)

    tasks = [Task(f"t{i}", f"Question {i}?", ("1284",)) for i in range(128)]
    with llm_flow({}, wait=wait, max_concurrency=128) as (flow, server, _):
        groups = collect(flow, tasks, group_size=1, seed=1)
    assert server.most == 128
    found = {(t.answer, t.error, len(t.turns)) for group in groups for t in group.trajectories}
    assert found == {("1284", "", 2)}


def test_rollouts_ask_with_seeds_of_their_own() -> None:
    with llm_flow({}, temperature=1.0) as (flow, server, _):
        collect(flow, [TASK], group_size=3, seed=1)
        first = sorted(body["seed"] for body in server.asked)
        server.asked.clear()
        collect(flow, [TASK], group_size=3, seed=1)
        second = sorted(body["seed"] for body in server.asked)
    assert first == second and len(set(first)) == len(first) == 3 * 5 + 1


# ---- bad tools and bad replies


def test_bad_tool_spends_turn_and_verifier_runs() -> None:
    trajectory, server = run_with(planner=by("Sub-Goal: x\nTool Name: Calculator"))
    expected = ["analyst", "verifier", "verifier", "generator"]
    assert [role_of(prompt) for prompt in server.prompts] == expected
    turn = trajectory.turns[0]
    assert (turn.tool_calls, turn.problem) == ((), "tool 'Calculator' was not found")
    assert "was not found" in server.prompts[1]


@pytest.mark.parametrize(
    ("reply", "shown", "error"),
    [
        ("I refuse.", NO_COMMAND, "the executor wrote no command: I refuse."),
        (command("limit=2"), "(limit=2)", "takes (query: str, limit: int (optional)); got"),
        (command("query=7"), "(query=7)", "got (query: int)"),
        (command("query={1}"), NO_COMMAND, "its arguments are not valid JSON"),
        (command("query='a', x='b'"), "x=", "got (query: str, x: str)"),
    ],
)
def test_a_bad_command_is_an_error_of_its_turn(reply: str, shown: str, error: str) -> None:
    turn = run_with(executor=by(reply))[0].turns[0]
    assert shown in command_in(turn) and error in turn.tool_calls[0].result.error
    assert turn.verdict is Verdict.CONTINUE


def test_reply_without_command_is_kept_shortened() -> None:
    turn = run_with(executor=by("no " * 100_000))[0].turns[0]
    error = turn.tool_calls[0].result.error
    assert 300 < len(error) < 400 and "characters left out" in error


def test_first_of_several_commands_is_run_with_a_note() -> None:
    trajectory, server = run_with(executor=by(command("query='a'", "query='b'")))
    turn, note = trajectory.turns[0], "the first of 2 commands"
    assert command_in(turn) == f'execution = tool.execute(query="a")  # {note}'
    assert output(turn) == "found a (1)" and note in server.prompts[2]


def test_a_generator_without_tags_answers_with_all_it_says() -> None:
    trajectory, _ = run_with(generator=by(" It is 1284.\n"))
    assert (trajectory.answer, trajectory.output) == ("It is 1284.", " It is 1284.\n")


# ---- roles that fail


def broken(prompt: str) -> Response:
    return JSONResponse({"error": "out of order"}, 500)


def test_an_executor_that_fails_is_an_error_of_its_turn() -> None:
    trajectory, _ = run_with(executor=broken)
    told = r"the executor failed: engines\.local: HTTP 500.*out of order"
    for turn in trajectory.turns:
        (used,) = turn.tool_calls
        assert command_in(turn) == NO_COMMAND and re.match(told, used.result.error)
    assert (trajectory.error, trajectory.answer) == ("", "1284")


def test_a_verifier_that_fails_continues_and_says_why() -> None:
    trajectory, _ = run_with(verifier=broken)
    assert [turn.verdict for turn in trajectory.turns] == [Verdict.CONTINUE] * 3
    assert "the verifier failed: engines.local: HTTP 500" in trajectory.turns[0].verdict_text
    assert (trajectory.truncated, trajectory.error, trajectory.answer) == ("turns", "", "1284")


def test_a_generator_that_fails_for_good_fails_the_rollout() -> None:
    trajectory, _ = run_with(generator=broken)
    assert trajectory.error.startswith("generator: engines.local: HTTP 500")
    assert (trajectory.answer, trajectory.output, len(trajectory.turns)) == ("", "", 2)


def test_analyst_failure_fails_group_without_turns() -> None:
    with llm_flow({"analyst": broken}) as (flow, server, _):
        (group,) = collect(flow, [TASK], group_size=3, seed=1)
    asked = [role_of(prompt) for prompt in server.prompts]
    assert asked == ["analyst"] * 2, "asked by one, tried twice"
    for each in group.trajectories:
        assert each.error.startswith("analyst: engines.local: HTTP 500") and not each.turns


def test_a_module_that_hangs_costs_its_deadline_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "MODULE_TIMEOUT_S", 0.3)
    agent = {"rollout_timeout_s": 60.0}
    with llm_flow({}, wait=lambda: asyncio.sleep(60), agent=agent) as (flow, *_):
        assert run(flow).error.startswith("analyst: engines.local: no answer within")


@pytest.mark.clock
def test_time_that_is_up_still_gets_an_answer() -> None:
    slow = {"rollout_timeout_s": 0.25}
    with llm_flow({}, wait=lambda: asyncio.sleep(0.1), agent=slow) as (flow, *_):
        trajectory = run(flow)
    assert trajectory.truncated == "time" and trajectory.answer == "1284"


def test_a_wrong_key_stops_the_run_with_one_line() -> None:
    told = r"engines\.local: .* HTTP 401 .*no such key"
    refused = llm_flow({"analyst": by(JSONResponse({"error": "no such key"}, 401))})
    with refused as (flow, *_), pytest.raises(UserError, match=told):
        collect(flow, [TASK, TASK], group_size=2, seed=1)


@pytest.mark.parametrize("mode", ["paper", "released"])
def test_rollouts_that_failed_change_nothing_for_the_others(mode: Any) -> None:
    """Samples, advantages and weights are those of the group without them."""
    answers = iter(["1284", broken, "1", broken, "1284", "2"])

    def generator(prompt: str) -> Response | str:
        said = next(answers)
        return said(prompt) if callable(said) else f"<answer>{said}</answer>"

    with llm_flow({"generator": generator}, max_retries=0) as (flow, *_):
        groups = score(collect(flow, [TASK], group_size=6, seed=1, max_in_flight=1))
    (group,) = groups
    assert [t.reward for t in group.trajectories] == [1.0, None, 0.0, None, 1.0, 0.0]
    alone = Group(0, group.finished)

    def samples(groups: list[Group]) -> list[Sample]:
        """Drop the position of each trajectory in its group."""
        found = flow_grpo(groups, mode, num_groups=2).samples
        return [replace(sample, sample_id=None) for sample in found]

    assert len(alone.trajectories) == 4 and len(samples(groups)) == 4 * 2
    assert samples(groups) == samples([alone])
    ids = [sample.sample_id for sample in flow_grpo(groups, mode).samples]
    assert {each.trajectory for each in ids if each} == {0, 2, 4, 5}, "the log finds its turns"
    lost = Group(1, tuple(t for t in group.trajectories if t.error))
    assert samples([alone, lost]) == samples([alone])
    assert flow_grpo([lost], mode).num_groups_dropped == 1


def test_a_role_whose_engine_nobody_started_is_our_mistake() -> None:
    config = toy({"roles": {"verifier": "local"}, "engines": {"local": {"model": "m"}}})
    with pytest.raises(AssertionError, match="verifier"):
        make_flow(config, None, {}, 1)


def test_results_are_data() -> None:
    """Braces and tags in what a tool found go through templates unharmed."""
    odd, part = '{question} {0} {{x}} %s <answer>no</answer> """', "{0} {{x}}"
    task, memory = Task("t", odd, ("a",)), Memory((MemoryEntry("Wiki", odd, odd, odd),), odd)
    assert FullPrompt([Tool(CARD, find)]).render(Moment(task, memory)).count(part) == 5
    with llm_flow({}) as (flow, server, _):
        run_to_end(flow.generator.answer(task, memory, 0, 5.0))
        run_to_end(flow.verifier.verify(task, memory, 0, 5.0))
    assert [prompt.count(part) for prompt in server.prompts] == [5, 5]
