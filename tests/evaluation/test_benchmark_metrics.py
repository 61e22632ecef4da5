"""pass@k against an example that is written out."""

from __future__ import annotations

import statistics
from itertools import combinations

import make
import pytest

from flowtrain.evaluation.summary import count_passes, pass_at_k
from flowtrain.logging.tally import Tally
from flowtrain.records import Task, Trajectory


def test_of_four_answers_one_right() -> None:
    """Of the six pairs ab, ac, ad, bc, bd, cd three hold the right answer a."""
    assert pass_at_k(4, 1, 2) == 0.5
    assert [pass_at_k(4, 1, k) for k in (1, 4)] == [0.25, 1.0]
    assert pass_at_k(4, 0, 4) == 0.0


@pytest.mark.parametrize("num_right", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_it_is_the_share_of_all_sets(num_right: int, k: int) -> None:
    answers = [True] * num_right + [False] * (6 - num_right)
    expected = statistics.fmean(map(any, combinations(answers, k)))
    assert pass_at_k(6, num_right, k) == pytest.approx(expected)


def rollouts(name: str, *rewards: float | None) -> list[Trajectory]:
    task = Task(name, "?", ("x",))
    return [
        make.rollout(task=task, reward=reward, error="lost" if reward is None else "")
        for reward in rewards
    ]


def passes(trajectories: list[Trajectory], trials: int) -> dict[str, float]:
    tally = Tally()
    count_passes(tally, trajectories, trials)
    return tally.all_means()


def test_metrics_are_means_over_questions() -> None:
    """With one of four right pass@2 is 1/2, with none 0, with two of three 1; only the first two
    have four answers. Half a reward is not right.
    """
    every = [
        *rollouts("a", 1.0, 0.0, 0.5, 0.0),
        *rollouts("b", 0.0, 0.0, 0.0, 0.0),
        *rollouts("c", 1.0, 1.0, 0.0, None),
    ]
    assert passes(every, 4) == {"pass_at_2": 0.5, "pass_at_4": 0.5}
    assert passes(every, 6) == {"pass_at_2": 0.5, "pass_at_4": 0.5}
    assert passes(every, 1) == passes([], 4) == {}
