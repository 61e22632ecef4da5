"""The tools a planner may call, and how they are run."""

from flowtrain.agents.tools.base import Parameter, Tool, ToolCard, ToolError, run_tool
from flowtrain.agents.tools.registry import ToolContext

__all__ = ["Parameter", "Tool", "ToolCard", "ToolContext", "ToolError", "run_tool"]
