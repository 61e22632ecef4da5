"""One file per algorithm: rewards in, advantages and token weights out. Plain Python on plain records."""

from flowtrain.algorithms.flow_grpo import Advantages, flow_grpo

__all__ = ["Advantages", "flow_grpo"]
