"""Means of the parts of a reward, by hand, over ranks whose rollouts have different parts."""

from __future__ import annotations

from collections.abc import Sequence

import make

from flowtrain.logging.rollout_parts import count_rewards, part_metrics
from flowtrain.logging.tally import Tally
from flowtrain.records import Trajectory

NONE = {f"reward_failures/{reason}": 0.0 for reason in ("exception", "timeout", "value")}


def rollout(scored_by: str = "mine.py:score", error: str = "", **parts: float) -> Trajectory:
    return make.rollout(scored_by=scored_by, error=error, reward_parts=parts)


def failed(reason: str) -> Trajectory:
    return rollout(f"mine.py:score: {reason}", "gone")


def reward_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    tally = Tally()
    count_rewards(tally, trajectories)
    return part_metrics(tally)


def test_means_are_over_the_rollouts_that_have_a_part() -> None:
    found = reward_metrics(
        [
            rollout(a=1.0, b=-2.0),
            rollout(a=0.5),
            failed("timeout"),
            failed("timeout"),
            failed("value"),
            rollout("", "generator: gone"),
        ]
    )
    assert found == {
        **NONE,
        "reward/a": 0.75,
        "reward/b": -2.0,
        "reward_failures/timeout": 2.0,
        "reward_failures/value": 1.0,
    }


def test_without_rollouts_there_is_no_mean() -> None:
    assert reward_metrics([]) == NONE


class Told:
    """A world in which ranks speak one after the other."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def gather_text(self, text: str) -> list[str]:
        self.texts.append(text)
        return self.texts


def test_every_rank_has_the_means_over_all_of_them() -> None:
    texts = list[str]()
    first = [rollout(a=1.0, c=3.0), rollout(a=1.0), rollout(a=1.0)]
    for part in (first, [rollout(b=2.0), rollout(a=0.0), failed("exception")]):
        tally = Tally()
        count_rewards(tally, part)
        total = tally.of_all(Told(texts))
    assert part_metrics(total) == {
        **NONE,
        "reward/a": 0.75,
        "reward/b": 2.0,
        "reward/c": 3.0,
        "reward_failures/exception": 1.0,
    }


def test_a_tally_keeps_the_highest_and_all_that_was_said() -> None:
    texts = list[str]()
    for number in (-3.0, -2.0, -7.0):
        tally = Tally()
        tally.highest("x", number)
        tally.say("said", [number])
        tally.add({"sum": number})
        total = tally.of_all(Told(texts))
    assert (total.maxima, total.sums) == ({"x": -2.0}, {"sum": -12.0})
    assert total.said == {"said": [[-3.0], [-2.0], [-7.0]]}
