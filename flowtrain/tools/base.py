"""The protocol of tools, and `run_tool`, which turns every outcome into a `ToolResult`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from flowtrain.records import ToolResult
from flowtrain.utils.text import encodable, printable

_KINDS: Mapping[object, type] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}


class ToolError(Exception):
    """An expected failure of a tool; the policy reads its message."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """The description of a tool's argument."""

    name: str
    meaning: str
    kind: type = str
    """str, int, float, bool, list, dict, or object for any value."""
    is_required: bool = True


def schema_of(*parameters: Parameter) -> dict[str, Any]:
    """Return the JSON schema of the arguments, which rejects any others."""
    names = {kind: name for name, kind in _KINDS.items()}
    return {
        "type": "object",
        "properties": {
            p.name: {"type": names[p.kind], "description": p.meaning} for p in parameters
        },
        "required": [p.name for p in parameters if p.is_required],
        "additionalProperties": False,
    }


def one_line(text: str) -> str:
    """Return a text on one line, without control characters that a terminal would obey."""
    return printable(" ".join(text.split()), keep="")


@dataclass(frozen=True, slots=True)
class ToolCard:
    """The description of a tool for the policy; AgentFlow's tool metadata."""

    name: str
    """Canonical name, as the planner writes it."""
    description: str
    """One line."""
    schema: Mapping[str, Any] = field(
        default_factory=lambda: schema_of(Parameter("query", "what to find or to do"))
    )
    """The arguments as a JSON schema of an object. Names, top-level types and required arguments
    are checked before a call; the tool checks the rest."""
    output: str = "text"
    limits: str = ""
    """Known weaknesses of the tool, or ""."""
    advice: str = ""
    """Advice on how to get good results."""
    examples: tuple[Mapping[str, object], ...] = ()
    """Arguments of example calls."""
    finds_passages: bool = False
    """The results are passages, which a refiner may condense to evidence."""
    aliases: tuple[str, ...] = ()
    """Other names that planners use for the tool, for example AgentFlow's."""
    is_stateful: bool = False
    """A call may change the results of later calls. Rollouts with such a tool cannot branch."""
    keeps_time: bool = False
    """The tool enforces its own time limits, which do not depend on the machine's load;
    `agent.tool_timeout_s` does not apply."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Return the arguments of `schema` for prompts, required ones first."""
        required = self.schema.get("required", ())
        parameters = []
        for name, schema in self.schema.get("properties", {}).items():
            details = schema if isinstance(schema, dict) else {}
            kind = details.get("type")
            meaning = one_line(str(details.get("description") or details.get("title") or name))
            kind = _KINDS.get(kind, object) if isinstance(kind, str) else object
            parameters.append(Parameter(name, meaning, kind, name in required))
        return tuple(sorted(parameters, key=lambda parameter: not parameter.is_required))

    def check(self, arguments: Mapping[str, object]) -> str:
        """Return why the arguments of a call are invalid, or ""."""
        extra = object if self.schema.get("additionalProperties", True) else None
        kinds = {parameter.name: parameter.kind for parameter in self.parameters}
        required = {parameter.name for parameter in self.parameters if parameter.is_required}
        fits = all(
            kinds.get(name, extra) in (type(value), object)
            or (kinds.get(name) is float and type(value) is int)
            for name, value in arguments.items()
        )
        if fits and required <= arguments.keys():
            return ""
        types = ", ".join(f"{name}: {type(value).__name__}" for name, value in arguments.items())
        return f"{self.name} takes ({self._takes()}); got ({types})"

    def _takes(self) -> str:
        return ", ".join(
            f"{p.name}: {p.kind.__name__}{'' if p.is_required else ' (optional)'}"
            for p in self.parameters
        )


class Tool(Protocol):
    """The protocol of a tool that a policy may call."""

    @property
    def card(self) -> ToolCard: ...

    @property
    def execute(self) -> Callable[..., Coroutine[Any, Any, str | ToolResult]]:
        """Return a coroutine function that takes the card's parameters by name, returns text, and
        raises ToolError.

        A tool that runs code returns a `ToolResult` with the code's times, also for failures.

        The coroutine must not block the event loop, which hundreds of rollouts share; run blocking
        code in a `BlockingPool`.
        """
        ...

    def close(self) -> None:
        """Release the tool's resources, if it has any; may be called twice."""
        return


async def run_tool(
    tool: Tool, arguments: Mapping[str, object], timeout_s: float, max_chars: int
) -> ToolResult:
    """Call `tool.execute(**arguments)` and return a result within `timeout_s`, whatever the
    outcome.

    Texts longer than `max_chars` characters lose their middle; the note about the omission adds to
    the length. A tool that ignores its cancellation is abandoned. Only the caller's own
    cancellation propagates.
    """
    start = time.perf_counter()
    result = await _call_within(tool, arguments, timeout_s)
    output, error = result.output, result.error
    if error is None and not output.strip():
        output, error = "", "no output"
    return replace(
        result,
        output=shorten(encodable(output), max_chars),
        error=None if error is None else shorten(encodable(error), max_chars),
        seconds=time.perf_counter() - start,
    )


def shorten(text: str, max_chars: int) -> str:
    """Return the first and the last `max_chars` / 2 characters of a text, with a note on the number
    omitted.
    """
    left_out = len(text) - max_chars
    if left_out <= 0:
        return text
    head = (max_chars + 1) // 2
    return f"{text[:head]}\n... {left_out} characters left out ...\n{text[head + left_out :]}"


async def _call_within(tool: Tool, arguments: Mapping[str, object], timeout_s: float) -> ToolResult:
    """Return the tool's result, or a timeout error."""
    if problem := tool.card.check(arguments):
        return ToolResult(error=problem)
    # In a task of its own: `asyncio.timeout` would wait for ever for a tool that swallows its
    # cancellation.
    task = asyncio.ensure_future(_call(tool, arguments))
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            return ToolResult(error=f"timed out after {timeout_s:g} s")
        if task.cancelled():
            return ToolResult(error=f"{tool.card.name} was cancelled")
        return task.result()
    finally:
        task.cancel()


async def _call(tool: Tool, arguments: Mapping[str, object]) -> ToolResult:
    """Return the tool's result."""
    try:
        output: object = await tool.execute(**arguments)
    except ToolError as error:
        return ToolResult(error=str(error) or "the tool failed and did not say why")
    # A tool is foreign code whose crash must cost one turn, not the rollout; some libraries even
    # exit when a key is missing.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return ToolResult(error=f"{type(error).__name__}: {error}")
    if isinstance(output, ToolResult):
        return output
    if not isinstance(output, str):
        kind = type(output).__name__
        return ToolResult(error=f"{tool.card.name} returned {kind}, not a string")
    return ToolResult(output)
