"""The executor, E(e^t | a^t, K), turns a sub-goal into a tool command and runs it.

Every failure is an error in the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from flowtrain.agents.commands import find_command, write_command
from flowtrain.agents.deadlines import Deadline
from flowtrain.agents.planner import NO_TOOL
from flowtrain.agents.prompts import tool_text
from flowtrain.engines.chat import ChatEngine
from flowtrain.engines.protocol import EngineError
from flowtrain.tools import Tool, run_tool
from flowtrain.tools.base import shorten
from flowtrain.types import Action, ToolResult

NO_COMMAND = "No command was run."


class Executor(Protocol):
    """Runs an action."""

    async def execute(
        self, question: str, action: Action, seed: int, deadline_s: float
    ) -> tuple[str, ToolResult]:
        """Return (command, result) within `deadline_s` seconds; `seed` is this turn's."""


@dataclass(frozen=True, slots=True)
class RuleExecutor:
    """Stands in for AgentFlow's LLM executor: the query is the sub-goal, word for word."""

    tools: Mapping[str, Tool]
    timeout_s: float
    """Seconds per command of a tool that does not keep its own time."""
    max_chars: int
    """Characters of a result that are kept, and of a reply that holds no command."""

    async def execute(
        self, question: str, action: Action, seed: int, deadline_s: float
    ) -> tuple[str, ToolResult]:
        tool = self.tools.get(action.tool_name)
        if tool is None:
            return _not_found(action)
        arguments = {"query": action.sub_goal}
        return write_command(arguments), await self._run(tool, arguments, deadline_s)

    async def _run(self, tool: Tool, arguments: Mapping[str, object], left_s: float) -> ToolResult:
        """Run a command in the time that the rollout has left."""
        timeout_s = left_s if tool.card.keeps_time else min(self.timeout_s, left_s)
        return await run_tool(tool, arguments, timeout_s, self.max_chars)


@dataclass(frozen=True, slots=True)
class LLMExecutor(RuleExecutor):
    """AgentFlow's executor: a model writes the command from sub-goal, context and tool card.

    It runs the first command that can be read; a note in the command says when there were more.
    """

    engine: ChatEngine
    ask_timeout_s: float
    """Seconds that the model may take to write it."""

    async def execute(
        self, question: str, action: Action, seed: int, deadline_s: float
    ) -> tuple[str, ToolResult]:
        tool = self.tools.get(action.tool_name)
        if tool is None:
            return _not_found(action)
        deadline = Deadline(deadline_s)
        prompt = PROMPT.format(
            question=question,
            sub_goal=action.sub_goal,
            context=action.context,
            tool=tool_text(tool.card),
        )
        try:
            reply = await self.engine.ask(
                prompt, seed=seed, deadline_s=min(self.ask_timeout_s, deadline_s)
            )
            arguments, count = find_command(reply, tool.card)
        except EngineError as error:
            problem = shorten(f"the executor failed: {error}", self.max_chars)
            return NO_COMMAND, ToolResult(error=problem)
        except ValueError:
            command = f"No command found in: {shorten(reply, self.max_chars)}"
            return command, ToolResult(error="the executor wrote no command")
        note = f"  # the first of {count} commands" if count > 1 else ""
        result = await self._run(tool, arguments, deadline.left_s())
        return write_command(arguments) + note, result


def _not_found(action: Action) -> tuple[str, ToolResult]:
    """AgentFlow's rule for a bad tool: nothing is called, and the turn is spent."""
    name = action.tool_name.removeprefix(NO_TOOL)
    return NO_COMMAND, ToolResult(error=f"tool {name!r} was not found")


PROMPT = """You write the command that makes a tool do one step of a larger task.

The question behind it all, for orientation: {question}

Sub-goal of this step: {sub_goal}

What is known for it: {context}

The tool:
{tool}

Write exactly one command, as a Python call with literal arguments: no variables, no other \
statements. The tool knows nothing but the
arguments, so put every name, number and detail that the sub-goal needs into them, exactly as \
given above.

Answer in this form and add nothing after it:
Analysis: what the sub-goal asks of the tool
Explanation: why these arguments
Generated Command:
```python
execution = tool.execute(query="...")
```"""
