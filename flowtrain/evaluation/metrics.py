"""Benchmarks and what is measured on them beside the reward: pass@k, the share of questions of
which one of k answers is right, and EM and F1 of short answers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from flowtrain.config import Config
from flowtrain.logging.tally import Tally
from flowtrain.records import Task, Trajectory
from flowtrain.rewards.scorers import MAX_CHARS, check
from flowtrain.rewards.squad import published_metrics
from flowtrain.tasks.benchmarks import parse_benchmarks


def load_benchmarks(config: Config) -> dict[str, tuple[Task, ...]]:
    """Load the questions of `eval.benchmarks`, by name.

    Raises UserError for what is unknown or missing, and for a scorer that does not exist or cannot
    use a task's answers.
    """
    found = {}
    for benchmark in parse_benchmarks(config.eval.benchmarks):
        tasks = benchmark.load(config.tasks.benchmarks)
        found[benchmark.name] = tuple(tasks[: config.eval.rows or benchmark.num_rows])
        for task in found[benchmark.name]:
            check(task)
    return found


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """Estimate pass@k from `num` answers to a question, of which `num_right` are right, without
    bias: 1 - C(num - num_right, k) / C(num, k), the share of all sets of k answers with a right one
    (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    assert 0 <= num_right <= num and 1 <= k <= num, (num, num_right, k)
    return 1.0 - math.comb(num - num_right, k) / math.comb(num, k)


def count_passes(tally: Tally, trajectories: Sequence[Trajectory], trials: int) -> None:
    """Add "pass_at_2", "pass_at_4", ... and that of all trials, as means over questions; nothing
    for a single trial.

    An answer is right with the reward 1. A question counts where at least k of its rollouts did not
    fail.
    """
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.reward is not None:
            rewards[trajectory.task.id].append(trajectory.reward)
    powers = [2**n for n in range(1, trials.bit_length())]
    for k in sorted({*powers, trials} - {1}):
        for own in rewards.values():
            if len(own) >= k:
                num_right = sum(reward >= 1 for reward in own)
                tally.mean(f"pass_at_{k}", pass_at_k(len(own), num_right, k), 1)


def short_metrics(trajectory: Trajectory) -> dict[str, float]:
    """Compute EM and F1 of a short answer; {} for other answers."""
    return published_metrics(trajectory.task, trajectory.answer[-MAX_CHARS:])
