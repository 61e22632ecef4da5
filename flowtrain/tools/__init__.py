"""Tools that an agent can call: search, web pages, Python in a sandbox, tools of other packages.

A tool of another package imports the names below (docs/tools.md).
"""

from flowtrain.tools.base import Parameter, Tool, ToolCard, ToolError, run_tool, schema_of
from flowtrain.tools.blocking import BlockingPool
from flowtrain.tools.registry import ToolContext

__all__ = [
    "BlockingPool",
    "Parameter",
    "Tool",
    "ToolCard",
    "ToolContext",
    "ToolError",
    "run_tool",
    "schema_of",
]
