"""The tools a planner may call, and how they are run."""

from flowtrain.agents.tools.base import Tool, ToolError, run_tool
from flowtrain.agents.tools.base_generator import BaseGenerator
from flowtrain.agents.tools.python_coder import PythonCoder
from flowtrain.agents.tools.sandbox import Sandbox
from flowtrain.agents.tools.search import Search

TOOL_NAMES = (BaseGenerator.name, PythonCoder.name, Search.name)
"""Canonical names, in the order in which prompts list them."""

__all__ = ["TOOL_NAMES", "BaseGenerator", "PythonCoder", "Sandbox", "Search", "Tool", "ToolError", "run_tool"]
