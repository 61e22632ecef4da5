"""Metrics of benchmarks: pass@k, the share of questions of which one of k answers is right, and EM
and F1 of short answers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from flowtrain.rewards.scorers import MAX_CHARS
from flowtrain.rewards.squad import published_metrics
from flowtrain.training.world import World
from flowtrain.types import Trajectory
from flowtrain.utils.text import final_answer


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """Estimate pass@k from `num` answers to a question, of which `num_right` are right, without
    bias: 1 - C(num - num_right, k) / C(num, k), the share of all sets of k answers with a right one
    (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    assert 0 <= num_right <= num and 1 <= k <= num, (num, num_right, k)
    return 1.0 - math.comb(num - num_right, k) / math.comb(num, k)


def pass_metrics(trajectories: Sequence[Trajectory], trials: int, world: World) -> dict[str, float]:
    """Compute "pass_at_2", "pass_at_4", ... and that of all trials from this rank's rollouts;
    collective. {} for a single trial.

    An answer is right with the reward 1. A question counts where at least k of its rollouts did not
    fail.
    """
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.reward is not None:
            rewards[trajectory.task.id].append(trajectory.reward)
    counts = [(len(own), sum(reward >= 1 for reward in own)) for own in rewards.values()]
    found = {}
    powers = [2**n for n in range(1, trials.bit_length())]
    for k in sorted({*powers, trials} - {1}):
        passed = [pass_at_k(num, num_right, k) for num, num_right in counts if num >= k]
        total, num_questions = world.sum([math.fsum(passed), len(passed)])
        if num_questions:
            found[f"pass_at_{k}"] = total / num_questions
    return found


def short_metrics(trajectory: Trajectory) -> dict[str, float]:
    """Compute EM and F1 of a short answer; {} for other answers."""
    return published_metrics(trajectory.task, final_answer(trajectory.answer)[-MAX_CHARS:])


def mean_metrics(trajectories: Sequence[Trajectory], world: World) -> dict[str, float]:
    """Compute the mean EM and F1 of the short answers that did not fail; collective. {} without
    any.
    """
    found = [short_metrics(each) for each in trajectories if not each.error]
    short = [metrics for metrics in found if metrics]
    num, *sums = world.sum(
        [len(short), *(math.fsum(each[name] for each in short) for name in ("em", "f1"))]
    )
    return {name: total / num for name, total in zip(("em", "f1"), sums, strict=True) if num}
