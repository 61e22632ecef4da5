"""Sub-goal rewards, by hand."""

from __future__ import annotations

import functools

import make
import pytest
from batches import batch, flow_grpo
from make import call, group, turn

from flowtrain.agents.registry import load_kind
from flowtrain.algorithms.registry import load_algorithm
from flowtrain.config import Config
from flowtrain.records import Trajectory, UserError
from flowtrain.tasks.sub_goals import Hints

TURN = turn(2)


def rollout(reward: float, sub_goals: float) -> Trajectory:
    return make.rollout(TURN, reward=reward, sub_goals=sub_goals)


infoflow = functools.partial(batch, "infoflow")


def advantages(*trajectories: Trajectory) -> list[float]:
    return [sample.advantages[0] for sample in infoflow([group(*trajectories)]).samples]


def test_sub_goals_tell_wrong_answers_apart() -> None:
    """R = 0, 0.15, 0.3: mean 0.15, population std sqrt(0.015)."""
    wrong = rollout(0, 0), rollout(0, 0.5), rollout(0, 1)
    std = 0.015**0.5 + 1e-6
    assert advantages(*wrong) == pytest.approx([-0.15 / std, 0, 0.15 / std])
    assert flow_grpo([group(*wrong)]).num_groups_dropped == 1, (
        "without them there is nothing to learn"
    )


def test_a_right_answer_is_worth_more_than_all_sub_goals() -> None:
    """R = 1.3 and 0.3."""
    found = advantages(rollout(1, 1), rollout(0, 1))
    assert found == pytest.approx([0.5 / 0.500001, -0.5 / 0.500001])


def test_without_a_weight_it_is_flow_grpo() -> None:
    groups = [group(rollout(1, 0.2), rollout(0, 0.9), rollout(0, 0))]
    assert infoflow(groups, infoflow={"sub_goal_weight": 0.0}) == flow_grpo(groups)


def test_it_credits_the_verifiers_calls_too() -> None:
    both = turn(calls={"planner": call(2), "verifier": call((4, 5, 6), (9,))})
    rollouts = [make.rollout(both, reward=0, sub_goals=share) for share in (0, 1)]
    samples = infoflow([group(*rollouts)], policy="verifier").samples
    assert [sample.response_ids for sample in samples] == [(4, 5, 6)] * 2
    assert [sample.advantages[0] for sample in samples] == pytest.approx([-1, 1], rel=1e-4)


def test_an_agent_of_one_turn_has_sub_goals_and_no_hints() -> None:
    options = {"agent": {"name": "single"}, "algorithm": {"name": "infoflow"}}
    config = Config.model_validate(options)
    with pytest.raises(
        UserError, match=r"agent\.name='single' does not support hints.*hint_rate = 0"
    ):
        load_algorithm(config).check_agent(load_kind(config))
    config = Config.model_validate({**options, "infoflow": {"hint_rate": 0.0}})
    load_algorithm(config).check_agent(load_kind(config))


def test_hints_become_fewer_from_step_to_step_and_end() -> None:
    """Of 20 steps the first 10 give some."""
    rates = {"hint_rate": 0.8, "hint_until": 0.5, "hint_turn": 3, "hint_patience": 2}
    config = Config.model_validate(
        {"algorithm": {"name": "infoflow"}, "infoflow": rates, "train": {"num_steps": 20}}
    )
    hints = load_algorithm(config).hints
    assert hints(1) == Hints(0.8, 3, 2)
    given = [0.0 if (each := hints(step)) is None else each.rate for step in (2, 6, 10, 11, 20)]
    assert given == pytest.approx([0.72, 0.4, 0.08, 0.0, 0.0])
