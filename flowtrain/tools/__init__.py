"""The tools a planner may call, and how they are run. These names are what a tool in another
package needs (docs/tools.md).
"""

from flowtrain.tools.base import Parameter, Tool, ToolCard, ToolError, run_tool
from flowtrain.tools.blocking import BlockingPool
from flowtrain.tools.registry import ToolContext

__all__ = ["BlockingPool", "Parameter", "Tool", "ToolCard", "ToolContext", "ToolError", "run_tool"]
