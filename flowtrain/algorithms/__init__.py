"""One object per algorithm: the only place that knows what training by it needs."""

from flowtrain.algorithms.base import Algorithm, Branches
from flowtrain.algorithms.registry import load_algorithm
from flowtrain.algorithms.sample_filter import filter_samples

__all__ = ["Algorithm", "Branches", "filter_samples", "load_algorithm"]
