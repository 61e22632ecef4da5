"""Held-out evaluation and the statistics of rollouts."""

from flowtrain.evals.evaluate import Evaluation, comparison, evaluate
from flowtrain.evals.stats import RolloutStats

__all__ = ["Evaluation", "RolloutStats", "comparison", "evaluate"]
