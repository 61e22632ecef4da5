"""AgentFlow: planner, executor, verifier and generator around an explicit memory. Only the planner
is trained.
"""

from flowtrain.agents.flow import Flow, FlowLimits
from flowtrain.agents.memory import Memory

__all__ = ["Flow", "FlowLimits", "Memory"]
