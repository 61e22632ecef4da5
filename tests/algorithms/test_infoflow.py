"""Sub-goal rewards and hint groups, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowtrain.agents.registry import load_kind
from flowtrain.algorithms.flow_grpo import flow_grpo
from flowtrain.algorithms.infoflow import infoflow
from flowtrain.algorithms.registry import load_algorithm
from flowtrain.config import Config
from flowtrain.types import (
    Call,
    FinishReason,
    Group,
    Task,
    ToolResult,
    Trajectory,
    Turn,
    UserError,
    Verdict,
)

TASK = Task("t", "q", ("a",))
CALL = Call((7,), (1, 2), (-1.0, -1.0), (), FinishReason.STOP)
TURN = Turn({"planner": CALL}, None, "", ToolResult(), Verdict.CONTINUE, seconds=0.0)


def rollout(reward: float, sub_goals: float, hint_turn: int | None = None) -> Trajectory:
    return Trajectory(
        TASK,
        (TURN,),
        "",
        seconds=0.0,
        seed=0,
        reward=reward,
        sub_goals=sub_goals,
        hint_turn=hint_turn,
    )


def advantages(*trajectories: Trajectory, **options: Any) -> list[float]:
    return [
        sample.advantages[0] for sample in infoflow([Group(0, trajectories)], **options).samples
    ]


def test_sub_goals_tell_wrong_answers_apart() -> None:
    """R = 0, 0.15, 0.3: mean 0.15, population std sqrt(0.015)."""
    wrong = rollout(0, 0), rollout(0, 0.5), rollout(0, 1)
    std = 0.015**0.5 + 1e-6
    assert advantages(*wrong) == pytest.approx([-0.15 / std, 0, 0.15 / std])
    assert flow_grpo([Group(0, wrong)]).num_groups_dropped == 1, (
        "without them there is nothing to learn"
    )


def test_a_right_answer_is_worth_more_than_all_sub_goals() -> None:
    """R = 1.3 and 0.3."""
    assert advantages(rollout(1, 1), rollout(0, 1)) == pytest.approx(
        [0.5 / 0.500001, -0.5 / 0.500001]
    )


def test_without_a_weight_it_is_flow_grpo() -> None:
    group = Group(0, (rollout(1, 0.2), rollout(0, 0.9), rollout(0, 0)))
    assert infoflow([group], sub_goal_weight=0.0) == flow_grpo([group])


def test_hinted_rollouts_may_be_compared_among_themselves() -> None:
    """Unhinted R = 0, 1; hinted R = 1, 1.3 and 0.7: each half has its own mean and spread, and
    counts as a group.
    """
    trajectories = (
        rollout(0, 0),
        rollout(1, 0, 2),
        rollout(1, 0),
        rollout(1, 1, 3),
        rollout(0.7, 0, 2),
    )
    half, std = 0.5 / 0.500001, (2 * 0.3**2 / 3) ** 0.5 + 1e-6
    out = infoflow([Group(0, trajectories)], hint_group="split")
    assert [s.advantages[0] for s in out.samples] == pytest.approx(
        [-half, half, 0, 0.3 / std, -0.3 / std]
    )
    assert sum(sum(s.loss_weights) for s in out.samples) == pytest.approx(2.0)
    assert [s.sample_id for s in out.samples] == [(0, member, 0) for member in (0, 2, 1, 3, 4)]


def test_split_halves_may_weigh_what_they_are_of_the_group() -> None:
    """Of five rollouts two have no hint. Each has one turn of two tokens: all weights are 1/10, and
    the question's sum is 1, as without a split; in mode "released" a token weighs 1 anyway.
    """
    trajectories = (
        rollout(0, 0),
        rollout(1, 0, 2),
        rollout(1, 0),
        rollout(1, 1, 3),
        rollout(0.7, 0, 2),
    )
    group = Group(0, trajectories)
    split = infoflow([group], hint_group="split").samples
    weighted = infoflow([group], hint_group="split-weighted").samples
    assert [s.loss_weights[0] for s in split] == pytest.approx([1 / 4, 1 / 4, *[1 / 6] * 3])
    assert [s.loss_weights for s in weighted] == [pytest.approx((0.1, 0.1))] * 5
    assert [s.advantages for s in weighted] == [s.advantages for s in split]
    joint = {s.sample_id: s.loss_weights for s in infoflow([group]).samples}
    assert {s.sample_id: pytest.approx(s.loss_weights) for s in weighted} == joint
    released = infoflow([group], hint_group="split-weighted", mode="released").samples
    assert {weight for s in released for weight in s.loss_weights} == {1.0}


def test_a_failed_rollout_has_no_share() -> None:
    """Three of four finished, one of these hinted and so without anybody to compare it to."""
    failed = replace(rollout(0, 0, 2), reward=None, sub_goals=None, error="generator: down")
    group = Group(0, (rollout(0, 0), rollout(1, 0), rollout(1, 0, 2), failed))
    out = infoflow([group], hint_group="split-weighted")
    assert [s.loss_weights[0] for s in out.samples] == pytest.approx([1 / 6, 1 / 6])
    assert out.num_groups_dropped == 1


def test_a_half_of_one_reward_is_left_out_and_counted() -> None:
    out = infoflow(
        [Group(0, (rollout(0, 0), rollout(1, 0), rollout(1, 0, 2), rollout(1, 0, 2)))],
        hint_group="split",
    )
    assert (len(out.samples), out.num_groups_dropped) == (2, 1)
    assert (
        infoflow([Group(0, (rollout(0, 0), rollout(1, 0)))], hint_group="split").num_groups_dropped
        == 0
    ), "an empty half is none"


def test_it_credits_the_verifiers_calls_too() -> None:
    call = Call((9,), (4, 5, 6), (-1.0,) * 3, (), FinishReason.STOP)
    turn = replace(TURN, calls={"planner": CALL, "verifier": call})
    rollouts = [replace(rollout(0, share), turns=(turn,)) for share in (0, 1)]
    samples = infoflow([Group(0, tuple(rollouts))], policy="verifier").samples
    assert [sample.response_ids for sample in samples] == [(4, 5, 6)] * 2
    assert [sample.advantages[0] for sample in samples] == pytest.approx([-1, 1], rel=1e-4)


def test_an_agent_of_one_turn_is_refused() -> None:
    config = Config.model_validate({"agent": {"name": "single"}, "algorithm": {"name": "infoflow"}})
    with pytest.raises(UserError, match=r"algorithm\.name='infoflow'.*agent\.name='single'"):
        load_algorithm(config).check_agent(load_kind(config))
