"""What a tool is, and the one way to run it: whatever a tool does, its caller gets a `ToolResult`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

from flowtrain.types import ToolResult


class ToolError(Exception):
    """A failure the tool foresaw; its text is what the planner reads."""


class Tool(Protocol):
    """One thing the planner may call."""

    name: str
    """Canonical, as the planner writes it."""
    description: str
    """One line for the prompts."""

    async def execute(self, query: str) -> str:
        """Answer the query; raises ToolError when there is no answer. It must not block the event loop."""
        ...

    def close(self) -> None:
        """Release what the tool holds; may be called twice."""
        ...


async def run_tool(tool: Tool, arguments: Mapping[str, object], timeout_s: float, max_chars: int) -> ToolResult:
    """Call `tool.execute(**arguments)` and turn whatever happens into a result, in `timeout_s` seconds at most.

    The arguments are exactly one string, `query`. Texts beyond `max_chars` characters lose their middle; the note that says so comes
    on top. A tool that ignores its cancellation is left behind. Only the cancellation of the caller itself passes through.
    """
    start = time.perf_counter()
    output, error = await _call_within(tool, arguments, timeout_s)
    if error is None and not output.strip():
        output, error = "", "no output"
    if error is not None:
        error = shorten(error, max_chars)
    return ToolResult(shorten(output, max_chars), error, time.perf_counter() - start)


def shorten(text: str, max_chars: int) -> str:
    """Keep the first and the last half of `max_chars` characters and say how many between them were left out."""
    left_out = len(text) - max_chars
    if left_out <= 0:
        return text
    head = (max_chars + 1) // 2
    return f"{text[:head]}\n... {left_out} characters left out ...\n{text[head + left_out :]}"


async def _call_within(tool: Tool, arguments: Mapping[str, object], timeout_s: float) -> tuple[str, str | None]:
    """The tool's (output, error), or the error that its time is up."""
    query = arguments.get("query")
    if len(arguments) != 1 or not isinstance(query, str):
        given = ", ".join(f"{name}: {type(value).__name__}" for name, value in arguments.items())
        return "", f"{tool.name} takes one argument, query: str; got ({given})"
    # A task of its own: `asyncio.timeout` would wait for ever for a tool that swallows its cancellation.
    task = asyncio.ensure_future(_call(tool, query))
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            return "", f"timed out after {timeout_s:g} s"
        return ("", f"{tool.name} was cancelled") if task.cancelled() else task.result()
    finally:
        task.cancel()


async def _call(tool: Tool, query: str) -> tuple[str, str | None]:
    """The tool's (output, error)."""
    try:
        output: object = await tool.execute(query)
    except ToolError as error:
        return "", str(error) or "the tool failed and did not say why"
    # A tool is foreign code, and its crash must cost one turn, not the rollout; some libraries even exit when a key is missing.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return "", f"{type(error).__name__}: {error}"
    if not isinstance(output, str):
        return "", f"{tool.name} returned {type(output).__name__}, not a string"
    return output, None
