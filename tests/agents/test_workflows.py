"""Programs that ask several policies: whose calls their turns hold, and what each is trained on."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from chat_templates import SMOLLM2, tokenizer_of
from hypothesis import given
from hypothesis import strategies as st
from make import Engine, call, group, rollout, turn
from toy_options import toy

from flowtrain.agents.agentflow.build import make_policy
from flowtrain.agents.base import AgentContext
from flowtrain.agents.chat import Chat
from flowtrain.agents.session import Session, SessionAgent
from flowtrain.algorithms.registry import load_algorithm
from flowtrain.config import Config
from flowtrain.records import (
    BranchPoint,
    BranchStart,
    Group,
    SampleId,
    Task,
    Trajectory,
    UserError,
)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "workflows" / "solver_verifier.py"
TASK = Task("t", "What is 2 + 3?", ("5",))
TOKENIZER = tokenizer_of(SMOLLM2, "<|im_end|>")
BOTH = {"solver": {}, "verifier": {}}


def config_of(**sections: Any) -> Config:
    agent = {"name": f"{EXAMPLE}:SolverVerifier", **sections.pop("agent", {})}
    return toy({"agent": agent, "policies": BOTH, **sections})


def agent_of(make: Any, **said: tuple[str, ...]) -> SessionAgent:
    """`said`: what each policy says, in turn."""
    config, tokenizer = config_of(), TOKENIZER
    policies = {
        name: make_policy(config, name, Engine.of(tokenizer, *texts), tokenizer)
        for name, texts in said.items()
    }
    agent: SessionAgent = make(AgentContext(config, policies, {}, {}, 4))
    return agent


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return loaded(EXAMPLE)


def rolled_out(example: ModuleType, solver: tuple[str, ...], verdict: str) -> Trajectory:
    agent = agent_of(example.SolverVerifier, solver=solver, verifier=(verdict,))
    return asyncio.run(agent.run(TASK, 1))


# ---- who is asked


def test_a_turn_holds_the_call_of_whoever_was_asked(example: ModuleType) -> None:
    found = rolled_out(example, ("4", "5"), "No.")
    assert [t.policy for t in found.turns] == ["solver", "verifier", "solver"]
    assert [t.call.text for t in found.turns] == ["4", "No.", "5"] and found.answer == "5"
    assert all(list(t.calls) == [t.policy] for t in found.turns)
    told = TOKENIZER.decode(found.turns[1].call.prompt_ids)
    assert "Somebody says: 4" in told and "Say yes or no." in told
    assert found.num_tokens("verifier") == len(found.turns[1].call.response_ids)
    assert found.num_sampled_tokens == sum(len(t.call.response_ids) for t in found.turns)


def test_the_verifier_ends_it(example: ModuleType) -> None:
    found = rolled_out(example, ("5",), "Yes!")
    assert [t.policy for t in found.turns] == ["solver", "verifier"] and found.answer == "5"


@pytest.mark.parametrize(
    ("drafts", "choice", "answer", "paid"),
    [
        (("4", "5", "6"), "The 2nd.", "5", {"solver": 1 / 3, "selector": 1.0}),
        (("4", "5", "5"), "1", "4", {"solver": 2 / 3, "selector": 0.0}),
        (("4", "5", "6"), "None.", "", {"solver": 1 / 3, "selector": 0.0}),
        (("5", "5", "<answer>5</answer>"), "", "5", {"solver": 1.0, "selector": 1.0}),
    ],
)
def test_a_selector_chooses_among_drafts_that_differ(
    drafts: tuple[str, ...], choice: str, answer: str, paid: dict[str, float]
) -> None:
    select = loaded(EXAMPLE.with_name("solver_selector.py"))
    agent = agent_of(select.SolverSelector, solver=drafts, selector=(choice,))
    found = asyncio.run(agent.run(TASK, 1))
    asked = ["solver"] * 3 + ["selector"] * bool(choice)
    assert found.answer == answer and [t.policy for t in found.turns] == asked
    assert asyncio.run(select.reward(TASK, answer, found)) == pytest.approx(paid)


def test_a_policy_that_the_run_has_not_ends_it_in_one_line() -> None:
    class Asks(SessionAgent):
        async def answer(self, session: Session) -> str:
            return await Chat(session, policy="judge").ask("Hi")

    agent = agent_of(Asks, solver=("x",), verifier=("y",))
    told = r"this run has no policy 'judge'; \[policies\] defines solver, verifier"
    with pytest.raises(UserError, match=told):
        asyncio.run(agent.run(TASK, 1))


@pytest.mark.parametrize("left", [1, 2])
def test_a_branch_leaves_at_the_call_of_any_policy(example: ModuleType, left: int) -> None:
    parent = rolled_out(example, ("four", "five"), "No, no.")
    agent = agent_of(example.SolverVerifier, solver=("nine",), verifier=("No, so.",))
    start = BranchStart(parent, BranchPoint(0, left, 2, 1.0))
    branch = asyncio.run(agent.run(TASK, 2, start=start))
    assert branch.turns[:left] == parent.turns[:left]
    shared = branch.turns[left].call.response_ids[:2]
    assert shared == parent.turns[left].call.response_ids[:2]
    who = branch.turns[left].policy
    own = sum(len(t.call.response_ids) for t in parent.turns[:left] if t.policy == who)
    assert branch.num_shared(who) == own + 2


def test_a_branch_that_asks_somebody_else_fails(example: ModuleType) -> None:
    parent = rolled_out(example, ("4", "5"), "No.")

    class Other(SessionAgent):
        async def answer(self, session: Session) -> str:
            return await Chat(session, policy="verifier").ask(session.task.prompt)

    agent = agent_of(Other, solver=("x",), verifier=("y",))
    found = asyncio.run(agent.run(TASK, 1, start=BranchStart(parent, BranchPoint(0, 1, 0, 1.0))))
    assert "it cannot branch" in found.error


# ---- what each is paid


@pytest.mark.parametrize(
    ("answers", "verdict", "paid"),
    [
        (("5",), "Yes", {"solver": 1.0, "verifier": 1.0}),
        (("4",), "Yes", {"solver": 0.0, "verifier": 0.0}),
        (("4", "5"), "No", {"solver": 1.0, "verifier": 1.0}),
        (("5", "4"), "No", {"solver": 0.0, "verifier": 0.0}),
    ],
)
def test_the_example_pays_each_for_its_own(
    example: ModuleType, answers: tuple[str, ...], verdict: str, paid: dict[str, float]
) -> None:
    found = rolled_out(example, answers, verdict)
    assert asyncio.run(example.reward(TASK, found.answer, found)) == paid


def said(policy: str, tokens: int) -> Any:
    return turn(calls={policy: call(tokens)})


def test_a_group_is_seen_by_each_policy_as_its_own() -> None:
    both = rollout(said("solver", 2), said("verifier", 1), reward=1.0)
    both_paid = rollout(*both.turns, reward=0.25, policy_rewards={"solver": 0.25, "verifier": 0.75})
    alone = rollout(said("solver", 3), reward=0.0)
    failed = rollout(error="x")
    seen = group(both, both_paid, alone, failed).of_policy("verifier")
    assert [t.reward for t in seen.trajectories] == [1.0, 0.75, 0.0, None]
    assert seen.finished == seen.trajectories[:2]
    assert seen.trajectories[2].error == "verifier: it was not asked"
    of_solver = group(both, both_paid, alone, failed).of_policy("solver")
    assert [t.reward for t in of_solver.finished] == [1.0, 0.25, 0.0]


# ---- the batch of each, as somebody counts it by hand

NAMES = ("solver", "verifier", "writer")
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3)), max_size=5)
PAID = st.fixed_dictionaries({name: st.sampled_from([0.0, 0.5, 1.0]) for name in NAMES})
ROLLOUTS = st.lists(st.tuples(CALLS, PAID, st.booleans()), min_size=1, max_size=5)


@given(groups=st.lists(ROLLOUTS, min_size=1, max_size=3))
def test_each_policy_gets_the_batch_that_a_hand_written_accountant_gives_it(
    groups: list[list[tuple[list[tuple[str, int]], dict[str, float], bool]]],
) -> None:
    made = [
        Group(
            index,
            tuple(
                rollout(
                    *(said(name, tokens) for name, tokens in calls),
                    **({"error": "x"} if fails else {"reward": 0.0, "policy_rewards": paid}),
                )
                for calls, paid, fails in rollouts
            ),
        )
        for index, rollouts in enumerate(groups)
    ]
    for policy in NAMES:
        sections = {
            "policies": {name: {} for name in NAMES},
            "train": {"policy": policy, "num_minibatches": 1},
            "algorithm": {"equal_groups": "keep"},
        }
        algorithm = load_algorithm(config_of(**sections))
        batch = algorithm.advantages([each.of_policy(policy) for each in made])
        expected: dict[SampleId, tuple[int, float]] = {}
        for index, rollouts in enumerate(groups):
            asked = [
                (member, calls, paid[policy])
                for member, (calls, paid, fails) in enumerate(rollouts)
                if not fails and any(name == policy for name, _ in calls)
            ]
            rewards = [reward for *_, reward in asked]
            mean = sum(rewards) / max(len(rewards), 1)
            std = (sum((x - mean) ** 2 for x in rewards) / max(len(rewards), 1)) ** 0.5
            for member, calls, reward in asked:
                for number, (name, tokens) in enumerate(calls):
                    if name == policy and tokens:
                        advantage = (reward - mean) / (std + 1e-6)
                        expected[SampleId(index, member, number)] = (tokens, advantage)
        found = {
            sample.sample_id: (len(sample.response_ids), sample.advantages[0])
            for sample in batch.samples
        }
        assert found.keys() == expected.keys()
        for place, (tokens, advantage) in expected.items():
            assert found[place][0] == tokens
            assert found[place][1] == pytest.approx(advantage, abs=1e-9)
