"""The tool that computes: Python in a sandbox."""

from __future__ import annotations

import re
import textwrap

from flowtrain.agents.tools.base import ToolCard, ToolError
from flowtrain.agents.tools.registry import ToolContext
from flowtrain.agents.tools.sandbox import Sandbox

FENCE = re.compile(r"^[ \t]*```(?:python\b|py\b)?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE | re.MULTILINE)


class PythonCoder:
    """Runs the query as Python: an expression prints its value, a program what it prints."""

    card = ToolCard("Python_Coder", "Runs Python code or evaluates an expression; prints the result.")

    def __init__(self, sandbox: Sandbox) -> None:
        """The tool owns the sandbox and closes it."""
        self._sandbox = sandbox

    async def execute(self, query: str) -> str:
        """What the code prints, without trailing space; raises ToolError with the reason when it fails."""
        code = strip_fence(query)
        if not code.strip():
            raise ToolError("no code given")
        return (await self._sandbox.run(code)).rstrip()

    def close(self) -> None:
        """End the processes of the sandbox."""
        self._sandbox.close()


def make(context: ToolContext) -> PythonCoder:
    return PythonCoder(Sandbox(timeout_s=context.config.agent.tool_timeout_s))


def strip_fence(text: str) -> str:
    """The code inside the first ``` or ```python fence that opens a line, or the whole text; without common indentation."""
    fence = FENCE.search(text)
    return textwrap.dedent(fence[1] if fence else text).strip("\n")
