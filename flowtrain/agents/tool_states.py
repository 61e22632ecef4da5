"""The sessions of stateful tools: one per rollout. That of a branch goes on from the calls that its
parent had made by then.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import ExitStack, asynccontextmanager

from flowtrain.agents.agentflow.commands import written_calls
from flowtrain.tools import StatefulTool, Tool, ToolCard, ToolSession
from flowtrain.types import BranchStart, ToolCall, ToolResult
from flowtrain.utils.errors import foreign

_OPEN_S = 30.0
"""Seconds in which a tool must open a session."""


class NoSession(Exception):
    """A rollout cannot begin: a tool could not open its session; the text says why."""


class _InSession(Tool):
    """A stateful tool as one rollout has it."""

    def __init__(self, card: ToolCard, session: ToolSession) -> None:
        self._card = card
        self._session = session
        self._one_by_one = asyncio.Lock()

    @property
    def card(self) -> ToolCard:
        return self._card

    async def execute(self, /, **arguments: object) -> str | ToolResult:
        """Calls of one response may run at once: they take their turns here, in its order."""
        async with self._one_by_one:
            return await self._session.execute(**arguments)


@asynccontextmanager
async def tool_sessions(
    tools: Collection[Tool], start: BranchStart | None
) -> AsyncIterator[Mapping[str, Tool]]:
    """Give the stateful ones of these tools a session for a rollout, and close it at the end of the
    block; yields those tools by name. Raises NoSession.
    """
    with ExitStack() as closing:
        sessions: dict[str, Tool] = {}
        for tool in tools:
            if not isinstance(tool, StatefulTool):
                continue
            card = tool.card
            with foreign(f"{card.name} has no session", NoSession):
                async with asyncio.timeout(_OPEN_S):
                    session = await tool.open_session(_history(start, card))
            closing.callback(session.close)
            sessions[card.name] = _InSession(card, session)
        yield sessions


def _history(start: BranchStart | None, card: ToolCard) -> list[ToolCall]:
    """Return the calls of a tool that came before a branch, without those that its card refused."""
    if start is None:
        return []
    calls: list[ToolCall] = []
    for turn in start.parent.turns[: start.point.turn]:
        calls += [call for call in turn.tool_calls if call.name == card.name]
        if turn.action is not None and turn.action.tool_name == card.name:
            for arguments in written_calls(turn.command, card):
                calls.append(ToolCall(card.name, json.dumps(arguments), turn.result))
    return [call for call in calls if not card.check(json.loads(call.arguments))]
