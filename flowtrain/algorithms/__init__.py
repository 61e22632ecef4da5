"""The algorithms: each is one object that defines everything specific to training with it."""

from flowtrain.algorithms.base import Algorithm, Branches
from flowtrain.algorithms.registry import load_algorithm
from flowtrain.algorithms.sample_filter import filter_samples

__all__ = ["Algorithm", "Branches", "filter_samples", "load_algorithm"]
