"""Versioned weights: the trainer publishes, engines pull."""

from flowtrain.weights.store import WeightStore

__all__ = ["WeightStore"]
