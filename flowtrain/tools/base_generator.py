"""AgentFlow's base generator, which answers from a model's own knowledge; and a stand-in for where
there is no model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from flowtrain.engines.chat import ChatEngine
from flowtrain.engines.protocol import EngineError
from flowtrain.tools.base import Tool, ToolCard, ToolError
from flowtrain.tools.registry import ToolContext
from flowtrain.types import UserError


@dataclass(frozen=True, slots=True)
class BaseGenerator:
    """Asks the model, once. The query is the whole prompt: the model knows neither the question nor
    the memory.
    """

    chat: ChatEngine
    timeout_s: float

    card = ToolCard(
        "Base_Generator",
        "Answers from a language model's own knowledge and reasoning; looks nothing up and runs "
        "nothing.",
        limits="It may be wrong and sound sure, about recent, rare or exact facts above all, and "
        "about long calculations.",
        advice="Give it small steps that need no source, with all they depend on; check what "
        "matters with another tool.",
        examples=({"query": "Sort these by size, largest first: Earth, Mars, Jupiter."},),
    )

    async def execute(self, query: str) -> str:
        """The model's reply. Raises ToolError when there is none."""
        if not query.strip():
            raise ToolError("empty query")
        try:
            return await self.chat.ask(query, deadline_s=self.timeout_s)
        except EngineError as error:
            raise ToolError(f"the model did not answer: {error}") from error

    def close(self) -> None:
        """The model is not the tool's own."""


class GuessGenerator:
    """Guesses. It has no model behind it: it picks one of a few fixed values by a hash of the query
    and looks nothing up.

    The embedded default uses it so that a planner has a tool that answers every query, fast, and is
    almost always wrong.
    """

    card = ToolCard(
        "Base_Generator",
        "Guesses a value without looking anything up; it has no model and is rarely right.",
    )

    def __init__(self, guesses: Sequence[str]) -> None:
        """`guesses` are the values it draws from; the same query always draws the same one."""
        if not guesses:
            raise UserError(
                "Base_Generator needs a model (roles.tools) or values to guess from, which the "
                "texts of [tasks] do not state"
            )
        self._guesses = tuple(guesses)

    async def execute(self, query: str) -> str:
        """One of the guesses."""
        digest = hashlib.sha256(query.encode("utf-8", "surrogatepass")).digest()
        return self._guesses[int.from_bytes(digest, "big") % len(self._guesses)]

    def close(self) -> None:
        """Nothing to release."""


def make(context: ToolContext) -> Tool:
    if context.chat is None:
        return GuessGenerator(context.guesses)
    return BaseGenerator(context.chat, context.config.agent.tool_timeout_s)
