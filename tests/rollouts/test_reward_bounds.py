"""The bounds of rewards at the door of the dataflow, and what its rules see of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_groups import TASKS, group

from flowtrain.config import Config
from flowtrain.records import Group
from flowtrain.rollouts.contract import Refused
from flowtrain.rollouts.ledger.group_checks import GroupLimits


def limits(**reward: Any) -> GroupLimits:
    options = {"reward": {"function": "exact", **reward}} if reward else {}
    config = Config.model_validate({"rollout": {"group_size": 2}, **options})
    return GroupLimits(config, {"planner": (256, 512)})


def with_parts(parts: dict[str, float]) -> Group:
    whole = group(TASKS[0])
    first, second = whole.trajectories
    return replace(whole, trajectories=(first, replace(second, reward_parts=parts)))


@pytest.mark.parametrize("rewards", [(-2.0, 3.0), (0.5, None), (3.0, -1.0)])
def test_rules_see_rewards_within_the_bounds_as_shares(rewards: tuple[float | None, ...]) -> None:
    found = limits(low=-2, high=3).check(group(TASKS[0], rewards=rewards)).rewards
    assert found == tuple((each + 2) / 5 for each in rewards if each is not None)


def test_without_bounds_of_its_own_a_run_has_those_of_the_scorers() -> None:
    rewards = (0.1 + 0.2, 1 / 3)
    assert limits().check(group(TASKS[0], rewards=rewards)).rewards == rewards


@pytest.mark.parametrize(
    ("bounds", "reward", "why"),
    [
        ({}, 1.5, "the reward is 1.5, it must be from 0 to 1"),
        ({}, -0.5, "the reward is -0.5, it must be from 0 to 1"),
        ({"low": -2, "high": 3}, 3.5, "the reward is 3.5, it must be from -2 to 3"),
        ({"low": -2, "high": 3}, -2.5, "the reward is -2.5, it must be from -2 to 3"),
        ({"low": -2, "high": 3}, float("nan"), "the reward is nan"),
        ({"low": 0.5}, 0.0, "it must be from 0.5 to 1"),
    ],
)
def test_rewards_outside_of_the_bounds_are_refused(
    bounds: dict[str, float], reward: float, why: str
) -> None:
    with pytest.raises(Refused, match=why):
        limits(**bounds).check(group(TASKS[0], rewards=(1.0, reward)))


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"a": float("nan")}, "its part 'a' is nan"),
        ({str(n): 0.0 for n in range(33)}, "33 parts, 32 are allowed"),
        ({"a" * 65: 0.0}, "1 to 64 printable characters"),
        ({"\x1b": 0.0}, "1 to 64 printable characters"),
    ],
)
def test_parts_that_no_function_gives_are_refused(parts: dict[str, float], why: str) -> None:
    limits(low=-1).check(with_parts({"a": -5.0}))
    with pytest.raises(Refused, match=why):
        limits(low=-1).check(with_parts(parts))
