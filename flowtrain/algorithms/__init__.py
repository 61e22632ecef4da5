"""One file per algorithm: rewards in, advantages and token weights out. Plain Python on plain
records.
"""

from flowtrain.algorithms.appo import appo
from flowtrain.algorithms.flow_grpo import flow_grpo
from flowtrain.algorithms.infoflow import infoflow
from flowtrain.algorithms.sample_filter import filter_samples

__all__ = ["appo", "filter_samples", "flow_grpo", "infoflow"]
