"""Engines that sample, and the collector that drives the flow over them."""

from flowtrain.rollout.engine import Engine

__all__ = ["Engine"]
