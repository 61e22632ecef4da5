"""The executor, E(e^t | a^t, K), turns a sub-goal into a tool command and runs it.

Every failure is an error in the result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flowtrain.agents.agentflow.commands import fitted, json_object, read_command
from flowtrain.agents.agentflow.planner import NO_TOOL
from flowtrain.agents.agentflow.prompts import tool_text
from flowtrain.agents.deadlines import Deadline
from flowtrain.inference.chat import ChatEngine
from flowtrain.inference.protocol import EngineError
from flowtrain.records import Action, ToolCall, ToolResult
from flowtrain.tools import Tool, ToolCard, run_tool
from flowtrain.tools.base import shorten


class Executed(NamedTuple):
    """A tool call, or the reason why none was possible."""

    tool_call: ToolCall | None
    problem: str = ""
    rescued: tuple[str, ...] = ()
    """Lenient rules that it took to read the command."""


class NoCommand(Exception):
    """Raised without a command to run; the planner reads the message."""


@dataclass(frozen=True, slots=True)
class Executor:
    """AgentFlow's executor: a model writes the command from sub-goal, context and tool card.

    The executor runs the first command that parses; a note beside the command mentions further
    ones. Without a model `arguments_of` makes the command of the sub-goal.
    """

    tools: Mapping[str, Tool]
    timeout_s: float
    """Seconds per command of a tool that does not keep its own time."""
    max_chars: int
    """Longest kept text of a result, or of a reply without a command, in characters."""
    engine: ChatEngine | None = None
    ask_timeout_s: float = 0.0
    """Seconds that the model may take to write it."""

    async def execute(
        self, question: str, action: Action, seed: int, deadline_s: float
    ) -> Executed:
        """Run within `deadline_s` seconds; `seed` is this turn's."""
        deadline = Deadline(deadline_s)
        tool = self.tools.get(action.tool_name)
        if tool is None:
            # AgentFlow's rule for a bad tool: nothing is called, and the turn is spent.
            name = action.tool_name.removeprefix(NO_TOOL)
            return Executed(None, f"tool {name!r} was not found")
        try:
            arguments, note, rules = await self._command(
                tool.card, question, action, seed, deadline
            )
        except NoCommand as none:
            return Executed(ToolCall(action.tool_name, "", ToolResult(error=str(none))))
        # An error names these seconds, which are the same each time where no model took any.
        left_s = deadline.left_s() if self.engine else deadline_s
        timeout_s = left_s if tool.card.keeps_time else min(self.timeout_s, left_s)
        result = await run_tool(tool, arguments, timeout_s, self.max_chars)
        text = json.dumps(arguments, ensure_ascii=False)
        return Executed(ToolCall(action.tool_name, text, result, note=note), rescued=rules)

    async def _command(
        self, card: ToolCard, question: str, action: Action, seed: int, deadline: Deadline
    ) -> tuple[dict[str, object], str, tuple[str, ...]]:
        """Return arguments, a note for the command, and the lenient rules used. Raises
        NoCommand.
        """
        if self.engine is None:
            return arguments_of(card, action.sub_goal), "", ()
        prompt = PROMPT.format(
            question=question,
            sub_goal=action.sub_goal,
            context=action.context,
            tool=tool_text(card),
        )
        timeout_s = min(self.ask_timeout_s, deadline.left_s())
        try:
            reply = await self.engine.ask(prompt, seed=seed, deadline_s=timeout_s)
            command = read_command(reply, card)
        except EngineError as error:
            problem = shorten(f"the executor failed: {error}", self.max_chars)
            raise NoCommand(problem) from None
        except ValueError:
            text = f"the executor wrote no command: {shorten(reply, self.max_chars)}"
            raise NoCommand(text) from None
        arguments, rules = command.arguments, command.rules
        if card.check(arguments) and (fits := fitted(arguments, card)) != arguments:
            arguments, rules = fits, (*rules, "arguments")
        try:
            arguments = json.loads(json.dumps(arguments, allow_nan=False))
        except (TypeError, ValueError):
            raise NoCommand(f"its arguments are not valid JSON: {arguments!r}") from None
        note = f"the first of {command.num_commands} commands" if command.num_commands > 1 else ""
        return arguments, note, rules


def arguments_of(card: ToolCard, sub_goal: str) -> dict[str, object]:
    """Return the sub-goal, word for word, as the tool's one text. A tool that takes more, or
    something else, takes it as the arguments in a JSON object.

    Where it is neither, the tool's error says what the tool takes.
    """
    required = [parameter for parameter in card.parameters if parameter.is_required]
    texts = [parameter.name for parameter in required or card.parameters if parameter.kind is str]
    if len(card.parameters) != 1 or not texts:
        names = {parameter.name for parameter in card.parameters}
        arguments = json_object(sub_goal)
        if arguments is not None and (len(required) != 1 or arguments.keys() <= names):
            return arguments
    return {texts[0] if texts else "query": sub_goal}


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
