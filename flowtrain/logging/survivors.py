"""Comparison of trained with sampled rollouts.

Rollouts that run out of tokens or of time, or whose tools fail, are left out, and these are the
long and the slow ones: a policy may then seem to learn to be short, which only survived. So the
lengths and the seconds of both are laid beside each other, with the largest difference of their
distributions (the statistic of Kolmogorov and Smirnov, from 0 to 1).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from statistics import fmean

from flowtrain.logging.tally import Tally
from flowtrain.records import Group, TrainBatch

_OF_TOKENS = "sampled_tokens_mean", "trained_tokens_mean", "tokens_distance"
_OF_SECONDS = "sampled_mean_s", "trained_mean_s", "distance_s"


def count_survivors(tally: Tally, groups: Sequence[Group], batch: TrainBatch) -> None:
    """Return the tokens and seconds of this rank's rollouts, and which of them are trained."""
    trained = {sample.sample_id[:2] for sample in batch.samples if sample.sample_id is not None}
    rows = [
        (rollout.num_sampled_tokens, rollout.seconds, (group.index, member) in trained)
        for group in groups
        for member, rollout in enumerate(group.trajectories)
    ]
    tally.say("survivors", rows)


def survivor_metrics(total: Tally) -> dict[str, float]:
    """Return the means over all rollouts and over the trained ones, and the distance of their
    distributions; {} if either set is empty.
    """
    rows = [row for of_rank in total.said.get("survivors", []) for row in of_rank]
    metrics: dict[str, float] = {}
    for index, names in enumerate((_OF_TOKENS, _OF_SECONDS)):
        sampled = sorted(row[index] for row in rows)
        trained = sorted(row[index] for row in rows if row[2])
        if trained:
            numbers = fmean(sampled), fmean(trained), distance(sampled, trained)
            metrics |= dict(zip(names, numbers, strict=True))
    return metrics


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the largest difference of two distributions, given values in order."""
    places = {*a, *b}
    return max(abs(bisect_right(a, x) / len(a) - bisect_right(b, x) / len(b)) for x in places)
