"""When a run without anything to learn from ends, and what it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowtrain.algorithms import load_algorithm
from flowtrain.config import Config
from flowtrain.logging.learning_signal import MOST_BROKEN, LearningSignal, count_signal
from flowtrain.logging.tally import Tally
from flowtrain.records import Group, UserError
from tests.algorithms.test_flow_grpo import with_lengths

COUNTS = {
    "rollouts": 4,
    "finished": 4,
    "turns": 8,
    "malformed": 0,
    "samples": 8,
    "right": 0,
    "outgrown": 0,
    "tokens/sampled": 80,
    "tokens/shared": 0,
    "num_excluded/empty": 0,
    "signals": 0,
}
LEARNS, EQUAL, FAILED = {"signals": 3}, {}, {"finished": 0, "samples": 0}


def signal(max_idle_steps: int = 0) -> LearningSignal:
    config = Config.model_validate({"train": {"max_idle_steps": max_idle_steps}})
    return LearningSignal(config, is_main=True)


def watch(signal: LearningSignal, *steps: dict[str, Any]) -> None:
    for step, counts in enumerate(steps, 1):
        signal.watch(step, Tally(sums={**COUNTS, **counts}, said={"rewards": [[0.0, 0.0]] * 2}))


def test_what_is_broken_in_a_row_ends_the_run() -> None:
    assert MOST_BROKEN == 3
    with pytest.raises(UserError, match=r"step 3 \(3 steps in a row\): all 4 rollouts failed"):
        watch(signal(), FAILED, FAILED, FAILED)


MANY, HALF = ({"rollouts": 8, "finished": n, "signals": 3} for n in (3, 4))


def test_a_run_ends_where_most_rollouts_fail_step_after_step() -> None:
    """Though some are left to learn from: these are not like all."""
    watch(signal(), MANY, MANY, HALF, MANY, MANY, LEARNS)
    watch(signal(), *[HALF] * 9)
    with pytest.raises(UserError, match=r"step 3: 5 of 8 rollouts failed, and more than 50%"):
        watch(signal(), MANY, MANY, MANY)


def test_a_failure_is_told_by_its_first_example() -> None:
    failed = replace(with_lengths(1, 2), reward=None, error="generator: it is down")
    group = Group(0, (with_lengths(1, 2), failed, failed))
    tally = Tally()
    config = Config.model_validate({"algorithm": {"equal_groups": "keep"}})
    count_signal(tally, [group], load_algorithm(config).advantages([group]), 0.0)
    assert tally.said["failure"] == ["the first failed because of 'generator: it is down'"]


@pytest.mark.parametrize("has_teacher", [False, True])
def test_a_teacher_is_a_signal_whatever_was_earned(has_teacher: bool) -> None:
    group = Group(0, (with_lengths(1, 2), with_lengths(1, 3)))
    config = Config.model_validate({"algorithm": {"equal_groups": "keep"}})
    tally = Tally()
    count_signal(tally, [group], load_algorithm(config).advantages([group]), 0.0, has_teacher)
    assert (tally.sums["samples"], tally.sums["signals"]) == (2, 2 * has_teacher)


@pytest.mark.parametrize("between", [LEARNS, EQUAL])
def test_a_step_that_is_not_broken_begins_the_count_anew(between: dict[str, int]) -> None:
    watched = signal()
    watch(watched, FAILED, FAILED, between, FAILED, FAILED)
    assert watched.num_broken == 2


def test_idle_steps_end_the_run_after_as_many_as_the_config_says() -> None:
    watch(signal(3), EQUAL, EQUAL, LEARNS, EQUAL, EQUAL)
    with pytest.raises(UserError, match=r"step 3 \(3 steps in a row\): all 4 rewards are 0"):
        watch(signal(3), EQUAL, EQUAL, EQUAL)
    watch(signal(0), *[EQUAL] * 200)


@pytest.mark.parametrize(
    ("rewards", "malformed", "told"),
    [
        ([[0.1, 0.1], [0.1, 0.1]], 0, "all 4 rewards are 0.1"),
        (
            [[0.1, 0.1], [0.5, 0.5]],
            0,
            "all rollouts of each question have the same reward; rewards range from 0.1 to 0.5",
        ),
        (
            [[1.0, 1.0]],
            3,
            "all 4 rewards are 1; of 8 actions 3 could not be parsed or named no tool",
        ),
    ],
)
def test_equal_rewards_are_told_by_their_value(
    rewards: list[list[float]], malformed: int, told: str
) -> None:
    watched = signal()
    sums = {**COUNTS, "right": 4, "turns": 8, "malformed": malformed}
    watched.watch(1, Tally(sums=sums, said={"rewards": rewards}))
    assert watched.last_cause == told
