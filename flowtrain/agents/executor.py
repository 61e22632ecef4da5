"""The executor, E(e^t | a^t, K): turns a sub-goal into a tool command and runs it.

AgentFlow's command is a line of Python, `execution = tool.execute(query="...")`. Here it is data: it is parsed, never executed.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from flowtrain.agents.planner import NO_TOOL
from flowtrain.agents.tools import Tool, run_tool
from flowtrain.types import Action, ToolResult

NO_COMMAND = "No command was run."


class Executor(Protocol):
    """Runs an action; whatever goes wrong is an error in the result."""

    async def execute(self, action: Action, deadline_s: float) -> tuple[str, ToolResult]:
        """(command, result)"""


@dataclass(frozen=True, slots=True)
class RuleExecutor:
    """Rule-based stand-in for AgentFlow's LLM executor: the sub-goal, word for word, is the query."""

    tools: Mapping[str, Tool]
    timeout_s: float
    """Seconds per command."""
    max_chars: int
    """Characters of a result that are kept."""

    async def execute(self, action: Action, deadline_s: float) -> tuple[str, ToolResult]:
        tool = self.tools.get(action.tool_name)
        if tool is None:
            return NO_COMMAND, ToolResult(error=f"tool {action.tool_name.removeprefix(NO_TOOL)!r} was not found")
        command = f"execution = tool.execute(query={json.dumps(action.sub_goal, ensure_ascii=False)})"
        return command, await run_tool(tool, parse_command(command), min(self.timeout_s, deadline_s), self.max_chars)


def parse_command(command: str) -> dict[str, object]:
    """Keyword arguments of `execution = tool.execute(name=literal, ...)`.

    Raises:
        ValueError: anything else than that one call with literal arguments.
    """
    try:
        statement = ast.parse(command.strip()).body
        call = statement[0].value  # type: ignore[attr-defined]
        is_execute = isinstance(call, ast.Call) and ast.unparse(call.func) == "tool.execute" and not call.args
        if len(statement) == 1 and isinstance(statement[0], ast.Assign) and is_execute and all(k.arg for k in call.keywords):
            return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, AttributeError, IndexError, RecursionError, MemoryError):
        pass
    raise ValueError(f"not a tool command: {command[:80]!r}")
