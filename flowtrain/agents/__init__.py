"""AgentFlow: planner, executor, verifier and generator around an explicit memory."""

from flowtrain.agents.flow import Flow, FlowLimits
from flowtrain.agents.memory import Memory

__all__ = ["Flow", "FlowLimits", "Memory"]
