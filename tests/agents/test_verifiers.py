"""Environments of the real package `verifiers`, which pins packages that others want newer."""

from __future__ import annotations

import asyncio
import json
import os
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowtrain.config import Config
from flowtrain.config.options import parse
from flowtrain.records import Group, Task, Trajectory, UserError
from flowtrain.rewards import score
from flowtrain.tasks.sets import MAIN_SPLIT, task_set

pytest.importorskip("verifiers.v1")

from gateway_runs import calls_of, logging_engine, make_agent, roll_out

ENVIRONMENT = {"taskset": {"id": "verifiers_sums"}, "agent": {"runtime": {"type": "subprocess"}}}
EXAMPLE = Path(__file__).parents[2] / "examples" / "verifiers" / "train.toml"
SOLVE = "flowtrain.agents.gateway.hub:solve"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def options(**environment: Any) -> dict[str, Any]:
    return {
        "agent": {"name": "gateway", "max_turns": 4},
        "gateway": {"function": SOLVE},
        "tasks": {
            "name": "verifiers",
            "verifiers": {k: v for k, v in {**ENVIRONMENT, **environment}.items() if v},
        },
    }


def first_task() -> Task:
    tasks = task_set(Config.model_validate(options()))
    return next(task for task in tasks.train if task.id.endswith("sum 3"))


def play(*replies: str, task: Task | None = None) -> tuple[Trajectory, list[Any]]:
    engine = logging_engine(*replies)
    with closing(make_agent(engine, function=SOLVE)) as agent:
        return roll_out(agent, task=task or first_task()), engine.log


def test_its_rows_are_tasks_which_say_how_to_play_them() -> None:
    tasks = task_set(Config.model_validate(options()))
    assert (len(tasks.train), len(tasks.held_out[MAIN_SPLIT])) == (18, 2)
    task = first_task()
    assert (task.id, task.question) == ("verifiers_sums-sum 3", "What is 3 plus 1?")
    assert task.extra["verifiers"]["env"] == ENVIRONMENT
    assert task.extra["verifiers"]["data"]["answer"] == "4"


def test_a_rollout_is_its_own_and_is_scored_by_its_rules() -> None:
    done, log = play("Let me see.", "4")
    assert (done.error, done.answer) == ("", "4")
    assert done.reported == {"right": 0.75, "brief": 0.25}
    assert calls_of(done) == log and len(log) == 2, "what was sampled is what is trained"
    first, second = log
    assert second[0][: len(first[0]) + len(first[1])] == first[0] + first[1]
    (scored,) = score([Group(0, (done,))])[0].trajectories
    assert (scored.reward, scored.scored_by) == (1.0, "reported")
    assert not [name for name in os.environ if name.startswith("FLOWTRAIN_API_KEY")]


def test_a_wrong_answer_gets_what_is_left() -> None:
    done, _ = play("Let me see.", "It may be 5.")
    assert done.reported == {"right": 0.0, "brief": 0.0}


def test_the_example_rewards_what_it_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    config = parse(["--config", str(EXAMPLE)])
    tasks = task_set(config)
    assert len(tasks.train) == 48
    assert {task.question for task in tasks.train} == {"digits", "letters"}
    task = next(task for task in tasks.train if task.question == "digits")
    assert play("12a4", task=task)[0].reported == {"obeyed": 0.75}


def test_many_episodes_at_a_time_have_their_own_keys() -> None:
    engine = logging_engine()
    engine.reply = lambda prompt: str(int(re.findall(r"What is (\d+) plus", prompt)[-1]) + 1)
    tasks = task_set(Config.model_validate(options())).train[:6]

    async def run() -> list[Trajectory]:
        return await asyncio.gather(*(agent.run(task, 0) for task in tasks))

    with closing(make_agent(engine, function=SOLVE)) as agent:
        every = asyncio.run(run())
    assert [done.error for done in every] == [""] * 6
    assert all(done.reported == {"right": 0.75, "brief": 0.25} for done in every)
    assert all(len(done.turns) == 2 for done in every)


def test_an_episode_that_fails_costs_its_rollout() -> None:
    task = first_task()
    extra = {"verifiers": {**task.extra["verifiers"], "data": {"prompt": 5}}}
    done, _ = play("4", "4", task=replace(task, columns=json.dumps(extra)))
    assert done.error.startswith("agent: ValidationError: ") and done.reported == {}
    engine = logging_engine("4", "4")
    with closing(make_agent(engine, function=SOLVE, agent={"max_turns": 1})) as agent:
        done = roll_out(agent, task=task)
    assert done.truncated == "turns" and done.reported == {}


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"taskset": {"id": "no-such-set"}}, "taskset 'no-such-set' not found"),
        ({"taskset": {}}, "needs a seed taskset"),
        ({"agent": {"runtime": {"type": "no such"}}}, "runtime"),
        ({"taskset": {"id": "verifiers_two"}, "agent": None}, "has the agents solver, critic; one"),
    ],
)
def test_what_is_no_environment_with_one_agent_is_refused(
    environment: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=f"^tasks.verifiers: .*{reason}"):
        task_set(Config.model_validate(options(**environment)))
