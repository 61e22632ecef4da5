"""The example that plays in environments behind servers of the real package `openenv`, which no
other test needs: it holds back packages that others want newer (`make test-environments`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowtrain.agents.agentflow.build import make_policy
from flowtrain.agents.base import AgentContext
from flowtrain.agents.chat.tool_calling import ToolCallingAgent
from flowtrain.agents.chat.tool_formats import FORMATS, WrittenCall
from flowtrain.config import Config
from flowtrain.records import (
    Call,
    FinishReason,
    Group,
    Sampling,
    Task,
    Trajectory,
    VersionSpan,
)
from flowtrain.rewards import score

pytest.importorskip("openenv.core")

from chat_templates import styled
from openenv_worlds import EVENTS, Bench, Served, serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "openenv" / "environment.py"
QWEN = styled("qwen2.5")
TASK = Task("t-1", "Guess.", ("-",), columns='{"seed": 41, "split": "train", "level": 3}')
"""Whose number is 42."""
TEXTS = {"action": "number", "observation": "hint"}


class Engine:
    """Says one prepared text after the other."""

    version = 1
    max_tokens = 4000

    def __init__(self, texts: Sequence[str | Callable[[], str]]) -> None:
        self.texts = list(texts)
        self.prompts: list[str] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Call:
        said = self.texts[len(self.prompts)]
        text = said if isinstance(said, str) else await asyncio.to_thread(said)
        ids = tuple(QWEN.encode(text + QWEN.eos_token, add_special_tokens=False))
        self.prompts.append(QWEN.decode(list(prompt_ids)))
        spans = (VersionSpan(0, len(ids), 1),)
        return Call(tuple(prompt_ids), ids, (-0.5,) * len(ids), spans, FinishReason.STOP)


def call(name: str, *arguments: dict[str, Any]) -> str:
    return FORMATS["hermes"].write([WrittenCall(name, json.dumps(each)) for each in arguments])


def guess(number: Any) -> str:
    return call("step", {"number": number})


def config_of(url: str, *, agent: dict[str, Any] | None = None, **options: Any) -> Config:
    name = f"{EXAMPLE}:OpenEnv"
    given = {"name": "tools", "environment": name, "max_turns": 9, **(agent or {})}
    return Config.model_validate({"agent": given, "plugins": {"OpenEnv": {"url": url, **options}}})


async def roll_out(config: Config, engine: Engine, task: Task = TASK) -> Trajectory:
    policy = make_policy(config, "planner", engine, QWEN)
    context = AgentContext(config, {"planner": policy}, {}, {}, config.agent.max_turns)
    return await ToolCallingAgent(context).run(task, 7)


def play(
    url: str, *texts: str | Callable[[], str], task: Task = TASK, **options: Any
) -> tuple[Trajectory, Engine]:
    engine = Engine(texts)
    return asyncio.run(roll_out(config_of(url, **options), engine, task)), engine


@pytest.fixture(autouse=True)
def nothing_yet() -> Iterator[None]:
    EVENTS.clear()
    yield
    assert not [each for each in EVENTS if "{'policy" in each]


@pytest.fixture(scope="module")
def numbers() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture(scope="module")
def bench() -> Iterator[Served]:
    with serving(Bench) as served:
        yield served


# ---- episodes


def test_texts_are_actions_and_the_reward_is_the_sum_of_the_steps(numbers: Served) -> None:
    done, engine = play(numbers.url, "3", "99", "<think>or 2</think> 42", **TEXTS)
    assert (done.error, done.truncated) == ("", "") and done.reported == {"reward": 1.0}
    first, second, third = engine.prompts
    assert "Guess.\n\nIt is even." in first
    assert "Too low." in second and "Too high." in third
    (scored,) = score([Group(0, (done,))])[0].trajectories
    assert (scored.reward, scored.scored_by) == (1.0, "reported")


def test_without_a_field_for_texts_an_action_is_a_tool(numbers: Served) -> None:
    both = {"number": 3, "metadata": {"policy": 1}}, {"number": 99}
    done, engine = play(numbers.url, call("step", *both), guess(42))
    assert done.error == "" and done.reported == {"reward": 1.0}
    assert len(engine.prompts) == 2, "the rollout ends with the episode"
    assert "Guesses the number." in engine.prompts[0] and "metadata" not in engine.prompts[0]
    assert engine.prompts[1].index("Too low.") < engine.prompts[1].index("Too high.")
    assert done.turns[1].tool_calls[0].result.output == "Yes."


def test_tools_of_mcp_are_its_tools(bench: Served) -> None:
    texts = (call("add", {"a": 2, "b": 40}), call("table", {"of": "Chad"}), "That is it.")
    done, engine = play(bench.url, *texts)
    assert (done.error, done.answer) == ("", "That is it.")
    assert done.reported == {"reward": 0.5}
    assert "Adds two numbers." in engine.prompts[0]
    outputs = [turn.tool_calls[0].result.output for turn in done.turns[:2]]
    assert outputs == ["42", '{"of": "Chad", "rank": 3}']


def test_what_was_earned_counts_where_a_limit_ends_the_rollout(numbers: Served) -> None:
    done, _ = play(numbers.url, "3", "5", agent={"max_turns": 2}, **TEXTS)
    assert (done.error, done.truncated) == ("", "turns") and done.reported == {"reward": 0.25}
    done, _ = play(numbers.url, "I do not know.")
    assert (done.error, done.reported) == ("", {"reward": 0.0}), "it asked nothing"


# ---- what goes wrong


def test_the_policy_reads_what_the_environment_refuses(numbers: Served, bench: Served) -> None:
    done, engine = play(numbers.url, "101", "many", "42", **TEXTS)
    assert done.error == "" and done.reported == {"reward": 0.75}
    assert "it is at most 100" in engine.prompts[1] and "VALIDATION_ERROR" in engine.prompts[2]
    done, engine = play(numbers.url, guess(101), guess("many"), guess(42))
    assert done.error == "" and done.reported == {"reward": 0.75}
    assert "it is at most 100" in engine.prompts[1] and "VALIDATION_ERROR" in engine.prompts[2]
    texts = (call("table", {"of": "nothing"}), call("add", {"a": "x"}), "Well.")
    done, engine = play(bench.url, *texts)
    assert "there is no such row" in engine.prompts[1] and done.error == ""
    assert all(turn.tool_calls[0].result.error for turn in done.turns[:2])


def test_a_server_that_dies_fails_its_rollout() -> None:
    with serving() as served:

        def die() -> str:
            served.die()
            return "42"

        done, _ = play(served.url, "3", die, **TEXTS)
    assert served.url in done.error and done.reported == {}
    assert EVENTS.count("closed") == 1
