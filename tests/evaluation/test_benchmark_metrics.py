"""pass@k against an example that is written out."""

from __future__ import annotations

import statistics
from itertools import combinations

import make
import pytest
import torch

from flowtrain.evaluation.benchmark_metrics import pass_at_k, pass_metrics
from flowtrain.training.world import World
from flowtrain.types import Task, Trajectory

WORLD = World(0, 1, torch.device("cpu"))


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


def test_metrics_are_means_over_questions() -> None:
    """With one of four right pass@2 is 1/2, with none 0, with two of three 1; only the first two
    have four answers. Half a reward is not right.
    """
    every = [
        *rollouts("a", 1.0, 0.0, 0.5, 0.0),
        *rollouts("b", 0.0, 0.0, 0.0, 0.0),
        *rollouts("c", 1.0, 1.0, 0.0, None),
    ]
    assert pass_metrics(every, 4, WORLD) == {"pass_at_2": 0.5, "pass_at_4": 0.5}
    assert list(pass_metrics(every, 6, WORLD)) == ["pass_at_2", "pass_at_4"]
    assert pass_metrics(every, 1, WORLD) == pass_metrics([], 4, WORLD) == {}
