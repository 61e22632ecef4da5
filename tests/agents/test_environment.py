"""The agent `tools` in environments with a state of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import shop
from chat_templates import TEMPLATES, styled
from make import Engine

from flowtrain.agents.agentflow.build import make_policy
from flowtrain.agents.base import AgentContext
from flowtrain.agents.chat.dialect import Dialect
from flowtrain.agents.chat.tool_calling import ToolCallingAgent, definition, with_instructions
from flowtrain.agents.chat.tool_formats import FORMATS, WrittenCall
from flowtrain.agents.deadlines import Cutoff
from flowtrain.agents.registry import load_kind
from flowtrain.algorithms import load_algorithm
from flowtrain.config import Config
from flowtrain.records import BranchPoint, BranchStart, Group, Task, Trajectory, UserError
from flowtrain.rewards import score
from flowtrain.tools import ToolCard
from flowtrain.utils.plugins import load_object

EVENTS: list[str] = load_object(f"{Path(shop.__file__)}:EVENTS", "")[1]
TASK = Task("t-1", "", ("2",))
QWEN = styled("qwen2.5")


def call(name: str, *orders: int) -> str:
    return FORMATS["hermes"].write([WrittenCall(name, json.dumps({"order": n})) for n in orders])


@pytest.fixture(autouse=True)
def no_events() -> Iterator[None]:
    EVENTS.clear()
    yield
    made = EVENTS.count("made")
    assert made == EVENTS.count("closed"), "each environment is closed"


def config_of(maker: str, options: dict[str, Any] | None = None, **agent: object) -> Config:
    path = Path(shop.__file__)
    agent = {"name": "tools", "environment": f"{path}:{maker}", "max_turns": 9, **agent}
    return Config.model_validate({"agent": agent, "plugins": {maker: options or {}}})


def play(
    *texts: str,
    maker: str = "Shop",
    start: BranchStart | None = None,
    cutoff: Cutoff | None = None,
    options: dict[str, Any] | None = None,
    tokenizer: Any = QWEN,
    **agent: object,
) -> tuple[Trajectory, Engine]:
    config = config_of(maker, options, **agent)
    ToolCallingAgent.check(config, tokenizer)
    engine = Engine.of(tokenizer, *texts)
    policy = make_policy(config, "planner", engine, tokenizer)
    context = AgentContext(config, {"planner": policy}, {}, {}, config.agent.max_turns)
    done = asyncio.run(ToolCallingAgent(context).run(TASK, 7, cutoff=cutoff, start=start))
    return done, engine


GOOD = ("Which order?", call("look_up", 2), call("cancel", 2), "Done, bye.")


def test_a_rollout_changes_its_own_shop_and_the_state_decides_the_reward() -> None:
    done, engine = play(*GOOD)
    assert done.error == "" and done.truncated == "" and done.answer == "Done, bye."
    assert done.reported == {"state": 0.9, "brevity": 0.1}
    (scored,) = score([Group(0, (done,))])[0].trajectories
    assert (scored.reward, scored.scored_by) == (1.0, "reported")
    expected = [[], ["look_up"], ["cancel"], []]
    assert [[used.name for used in turn.tool_calls] for turn in done.turns] == expected
    first, *_, last = engine.prompts
    assert "You work for a shop." in first and "I want to cancel an order." in first
    assert '"look_up"' in first and '"cancel"' in first
    assert "It is order 2." in last and "done" in last
    calls = [turn.calls["planner"] for turn in done.turns]
    for before, after in pairwise(calls):
        known = before.prompt_ids + before.response_ids
        assert after.prompt_ids[: len(known)] == known


@pytest.mark.parametrize(
    ("texts", "reported"),
    [
        ((call("cancel", 1), "bye"), {"state": 0.0, "brevity": 0.1}),
        ((call("cancel", 1, 2), "bye"), {"state": 0.0, "brevity": 0.1}),
        ((call("cancel", 3), call("cancel", 2), "bye"), {"state": 0.9, "brevity": 0.1}),
        (("hm", "hm", "bye"), {"state": 0.0, "brevity": 0.0}),
    ],
)
def test_other_rollouts_come_to_other_states(
    texts: tuple[str, ...], reported: dict[str, float]
) -> None:
    assert play(*texts)[0].reported == reported


def test_what_was_reached_counts_where_a_limit_ends_the_rollout() -> None:
    done, _ = play(*GOOD, max_turns=3)
    assert done.truncated == "turns" and done.reported == {"state": 0.9, "brevity": 0.1}


def test_options_of_the_maker_and_an_environment_that_is_over() -> None:
    options = {"wanted": 1}
    done, _ = play(call("cancel", 1), maker="Brief", options=options)
    assert (done.error, done.truncated) == ("", "") and done.reported["state"] == 0.9
    assert load_kind(config_of("Brief", options)).can_branch
    for wrong, reason in ((None, "wanted"), ({"wanted": 1, "colour": "red"}, "colour")):
        with pytest.raises(UserError, match=rf"^plugins\.Brief: .*{reason}"):
            load_kind(config_of("Brief", wrong))


def test_many_rollouts_do_not_see_each_other() -> None:
    config = config_of("Shop")
    policy = make_policy(config, "planner", Engine.of(QWEN, *GOOD), QWEN)

    async def many() -> list[Trajectory]:
        agents = []
        for _ in range(5):
            own = make_policy(config, "planner", Engine.of(QWEN, *GOOD), QWEN)
            agents.append(ToolCallingAgent(AgentContext(config, {"planner": own}, {}, {}, 9)))
        return await asyncio.gather(*(agent.run(TASK, n) for n, agent in enumerate(agents)))

    assert policy.max_tokens == 4000
    assert all(done.reported["state"] == 0.9 for done in asyncio.run(many()))


@pytest.mark.parametrize(
    ("maker", "error"),
    [("Broken", "agent: OSError: no shop today"), ("BadReward", "agent: ValueError: could not")],
)
def test_an_environment_that_fails_costs_its_rollout(maker: str, error: str) -> None:
    done, _ = play(*GOOD, maker=maker)
    assert done.error.startswith(error) and done.reported == {}


def test_an_environment_that_hangs_is_closed_when_the_rollouts_are_cut_off() -> None:
    cutoff = Cutoff()
    cutoff.set(0.0)
    done, _ = play("hm", maker="Slow", cutoff=cutoff)
    assert done.truncated == "straggler"
    (group,) = score([Group(0, (done,))])
    assert group.trajectories[0].reward is None, "the rule of the task knows nothing of the shop"
    assert "cut off (straggler) before it had a reward" in group.trajectories[0].error


def test_an_environment_may_reward_turns() -> None:
    done, _ = play(*GOOD, maker="Stepwise")
    assert done.turn_rewards == (0.0, 0.0, 0.0, -0.5) and done.reported["state"] == 0.9
    (group,) = score([Group(0, (done,))])
    assert group.trajectories[0].reward == 0.5
    done, _ = play("bye", maker="Stepwise")
    assert "turn_rewards: 4 numbers for 1 turns" in done.error


def test_one_that_does_not_close_costs_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowtrain.agents.chat.environment._CLOSE_S", 0.01)
    done, _ = play(*GOOD, maker="Sticky")
    assert done.error == "" and done.reported == {"state": 0.9, "brevity": 0.1}


def test_a_function_can_make_them_and_a_number_is_a_reward() -> None:
    assert play("bye", maker="plain_number")[0].reported == {"reward": 0.5}


# ---- branches


def test_a_branch_finds_the_world_as_its_parent_left_it() -> None:
    parent, _ = play(*GOOD)
    EVENTS.clear()
    start = BranchStart(parent, BranchPoint(0, 3, 0, 0.0))
    branch, engine = play("Adieu, bye.", start=start)
    assert branch.error == "" and branch.reported == {"state": 0.9, "brevity": 0.1}
    assert EVENTS.count("cancelled 2") == 1, "in the shop of the branch, too"
    assert branch.turns[:3] == parent.turns[:3] and len(engine.prompts) == 1
    assert engine.prompts[0] == QWEN.decode(list(parent.turns[3].calls["planner"].prompt_ids))


def test_a_branch_of_an_environment_that_does_not_repeat_itself_fails() -> None:
    texts = (call("look_up", 1), call("look_up", 2), "bye")
    parent, _ = play(*texts, maker="Forgetful")
    start = BranchStart(parent, BranchPoint(0, 2, 0, 0.0))
    branch, _ = play("bye", maker="Forgetful", start=start)
    assert branch.error.startswith("agent: ValueError: it cannot branch")


def test_algorithms_that_branch_need_one_that_repeats_itself() -> None:
    assert load_kind(config_of("Shop")).can_branch
    config = config_of("Unrepeatable")
    appo = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"name": "appo"})}
    )
    with pytest.raises(UserError, match=r"rewinds rollouts .* agent\.environment=.*Unrepeatable"):
        load_algorithm(appo).check_agent(load_kind(appo))


# ---- mistakes


@pytest.mark.parametrize(
    ("maker", "reason"),
    [("Nothing", "has no 'Nothing'"), ("NO_MAKER", "cannot be called: it is a int")],
)
def test_what_is_no_maker_is_refused(maker: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"agent.environment=.*{reason}"):
        load_kind(config_of(maker))


def test_options_that_do_not_go_together() -> None:
    assert config_of("Shop").agent.tools == ()
    for agent in ({"name": "single", "environment": "a.py:b"}, {"environment": "a.py:b"}):
        with pytest.raises(ValueError, match=r"agent\.environment="):
            Config.model_validate({"agent": agent})


@pytest.mark.parametrize("style", TEMPLATES)
def test_first_messages_go_through_every_style_of_template(style: str) -> None:
    config = Config.model_validate({"agent": {"name": "tools", "instructions": "Be brief."}})
    dialect = Dialect.of(config, styled(style), "the test")
    tools = [definition(ToolCard("look_up", "Tells."))]
    first = [
        {"role": "system", "content": "You work for a shop."},
        {"role": "user", "content": "Cancel it."},
    ]
    begun = dialect.start(with_instructions(config, first), tools)
    text = begun.template.decode(begun.prompt_ids)
    for part in ("You work for a shop.", "Be brief.", "Cancel it.", "look_up"):
        assert text.count(part) == 1
    assert text.index("You work") < text.index("Be brief.") < text.index("Cancel it.")
