"""Held-out evaluation and the statistics of rollouts."""

from flowtrain.evals.evaluate import Evaluation, evaluate, summary
from flowtrain.evals.stats import RolloutStats

__all__ = ["Evaluation", "RolloutStats", "evaluate", "summary"]
