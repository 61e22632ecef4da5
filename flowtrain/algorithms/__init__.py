"""One file per algorithm: rewards in, advantages and token weights out. Plain Python on plain records."""

from flowtrain.algorithms.advantages import Advantages
from flowtrain.algorithms.appo import appo
from flowtrain.algorithms.flow_grpo import flow_grpo
from flowtrain.algorithms.infoflow import infoflow
from flowtrain.algorithms.screen import screen

__all__ = ["Advantages", "appo", "flow_grpo", "infoflow", "screen"]
