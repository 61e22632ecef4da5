"""Means of the parts of a reward, by hand, over ranks whose rollouts have different parts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from flowtrain.run.reward_stats import reward_metrics
from flowtrain.training.world import World
from flowtrain.types import Task, Trajectory

NONE = {f"reward_failures/{reason}": 0.0 for reason in ("exception", "timeout", "value")}


def rollout(scored_by: str = "mine.py:score", error: str = "", **parts: float) -> Trajectory:
    return Trajectory(
        Task("t", "q", ()), (), "", 1.0, 0, scored_by=scored_by, error=error, reward_parts=parts
    )


def failed(reason: str) -> Trajectory:
    return rollout(f"mine.py:score: {reason}", "gone")


def test_means_are_over_the_rollouts_that_have_a_part() -> None:
    found = reward_metrics(
        [
            rollout(a=1.0, b=-2.0),
            rollout(a=0.5),
            failed("timeout"),
            failed("timeout"),
            failed("value"),
            rollout("", "generator: gone"),
        ],
        World(0, 1, torch.device("cpu")),
    )
    assert found == {
        **NONE,
        "reward/a": 0.75,
        "reward/b": -2.0,
        "reward_failures/timeout": 2.0,
        "reward_failures/value": 1.0,
    }


def test_without_rollouts_there_is_no_mean() -> None:
    assert reward_metrics([], World(0, 1, torch.device("cpu"))) == NONE


@dataclass
class Ranks:
    """The collective calls of two threads."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=60))
    given: dict[int, Any] = field(default_factory=dict)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.given[rank] = value
        self.barrier.wait()
        both = [self.given[0], self.given[1]]
        self.barrier.wait()
        return both


@dataclass
class Rank:
    ranks: Ranks
    rank: int

    def gather_text(self, text: str) -> list[str]:
        return self.ranks.exchange(self.rank, text)

    def sum(self, values: list[float]) -> list[float]:
        first, second = self.ranks.exchange(self.rank, values)
        return [a + b for a, b in zip(first, second, strict=True)]


def test_every_rank_has_the_means_over_all_of_them() -> None:
    ranks = Ranks()
    parts = [[rollout(a=1.0, c=3.0)], [rollout(b=2.0), rollout(a=0.0), failed("exception")]]
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(
            lambda rank: reward_metrics(parts[rank], Rank(ranks, rank)),  # type: ignore[arg-type]
            range(2),
        )
    assert (
        first
        == second
        == pytest.approx(
            {
                **NONE,
                "reward/a": 0.5,
                "reward/b": 2.0,
                "reward/c": 3.0,
                "reward_failures/exception": 1.0,
            }
        )
    )
