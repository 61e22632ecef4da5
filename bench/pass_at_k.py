"""pass@k of what a run has trained: how often one of k answers to a held-out question is right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import comb
from pathlib import Path
from statistics import fmean

from bench.sampling import open_agent
from flowtrain.agents.collect import collect
from flowtrain.metrics import atomic_write_text
from flowtrain.rewards import score
from flowtrain.tasks.sets import MAIN_SPLIT
from flowtrain.training import checkpoint

NUM_ASKED = 8
"""Answers to each question."""
NUM_QUESTIONS = 40
"""Held-out questions that are asked, the first ones."""
KS = (1, 4, 8)


def pass_at_k(num_asked: int, num_right: int, k: int) -> float:
    """Compute the probability that k of the answers, drawn without putting back, have a right one:
    an unbiased estimate of that of k new answers (arXiv 2107.03374).
    """
    assert 0 <= num_right <= num_asked and 1 <= k <= num_asked, (num_asked, num_right, k)
    return 1 - comb(num_asked - num_right, k) / comb(num_asked, k)


def of_run(folder: Path, options: Sequence[str], seed: int) -> list[int]:
    """Ask the last checkpoint of a run `NUM_QUESTIONS` held-out questions `NUM_ASKED` times each,
    unless that has been done; return the right answers to each.

    Args:
        options: of the run.
        seed: of the answers.
    """
    path = folder / "right.json"
    if not path.exists():
        model = checkpoint.latest(folder / "checkpoints")
        assert model is not None, f"{folder} has no checkpoint"
        with open_agent([*options, "--model.path", str(model)]) as (components, agent):
            questions = components.tasks.held_out[MAIN_SPLIT][:NUM_QUESTIONS]
            groups = score(collect(agent, questions, group_size=NUM_ASKED, seed=seed))
            high = components.config.reward.high
        right = [sum(t.reward == high for t in group.trajectories) for group in groups]
        atomic_write_text(path, json.dumps(right))
    return list(json.loads(path.read_text()))


def mean_passes(right: Sequence[int]) -> dict[int, float]:
    """Average pass@k over questions, by k."""
    return {k: fmean(pass_at_k(NUM_ASKED, number, k) for number in right) for k in KS}
