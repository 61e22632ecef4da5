"""A run whose long rollouts are left out is seen in its metrics."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.algorithms import load_algorithm
from flowtrain.config import Config
from flowtrain.logging.survivors import count_survivors, distance, survivor_metrics
from flowtrain.logging.tally import Tally
from flowtrain.records import Group
from tests.algorithms.test_flow_grpo import with_lengths


def metrics(groups: list[Group]) -> dict[str, float]:
    config = Config.model_validate({"rollout": {"num_questions": 2, "group_size": 4}})
    tally = Tally()
    count_survivors(tally, groups, load_algorithm(config).advantages(groups))
    said = json.loads(json.dumps(tally.said))  # as it travels between ranks
    return survivor_metrics(Tally(said=said))


def rollouts(*, fails_when_long: bool) -> list[Group]:
    """Two questions of four rollouts of 1 to 8 tokens, which take as many seconds."""
    made = [
        [replace(with_lengths(n % 2, 4 * g + n + 1), seconds=4.0 * g + n + 1) for n in range(4)]
        for g in range(2)
    ]
    groups = [Group(index, tuple(each)) for index, each in enumerate(made)]
    if not fails_when_long:
        return groups
    return [
        replace(
            group,
            trajectories=tuple(
                replace(t, error="generator: time", reward=None) if t.seconds > 5 else t
                for t in group.trajectories
            ),
        )
        for group in groups
    ]


def test_what_is_trained_is_what_was_sampled() -> None:
    found = metrics(rollouts(fails_when_long=False))
    assert found["tokens_distance"] == found["distance_s"] == 0.0
    assert found["sampled_tokens_mean"] == found["trained_tokens_mean"] == 4.5


def test_the_long_ones_that_failed_are_missed() -> None:
    """Of 1 to 8 tokens those up to 5 are left: all of them are below what 3 of 8 had."""
    found = metrics(rollouts(fails_when_long=True))
    assert found["sampled_tokens_mean"] == 4.5 and found["trained_tokens_mean"] == 3.0
    assert found["tokens_distance"] == pytest.approx(3 / 8)
    assert found["trained_mean_s"] == 3.0


def test_nothing_trained_is_nothing_to_compare() -> None:
    assert survivor_metrics(Tally()) == {}
    assert survivor_metrics(Tally(said={"survivors": [[[3, 1.0, False]], []]})) == {}


numbers = st.lists(st.integers(0, 9), min_size=1, max_size=20)


@given(numbers, numbers)
def test_the_distance_is_that_of_step_functions(a: list[int], b: list[int]) -> None:
    wanted = max(
        abs(sum(x <= n for x in a) / len(a) - sum(x <= n for x in b) / len(b)) for n in range(10)
    )
    assert distance(sorted(a), sorted(b)) == pytest.approx(wanted)
    assert distance(sorted(a), sorted(a)) == 0.0
