"""The tools a planner may call, and how they are run."""

from flowtrain.agents.tools.base import Parameter, Tool, ToolCard, ToolError, run_tool
from flowtrain.agents.tools.base_generator import BaseGenerator
from flowtrain.agents.tools.python_coder import PythonCoder
from flowtrain.agents.tools.sandbox import Sandbox
from flowtrain.agents.tools.search import Search

TOOL_NAMES = (BaseGenerator.card.name, PythonCoder.card.name, Search.card.name)
"""Canonical names, in the order in which prompts list them."""

__all__ = [
    "TOOL_NAMES",
    "BaseGenerator",
    "Parameter",
    "PythonCoder",
    "Sandbox",
    "Search",
    "Tool",
    "ToolCard",
    "ToolError",
    "run_tool",
]
