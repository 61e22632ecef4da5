"""The rule-based stand-in for AgentFlow's base generator, which answers from a model's own knowledge."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from flowtrain.agents.tools.base import ToolCard
from flowtrain.agents.tools.registry import ToolContext
from flowtrain.types import UserError


class BaseGenerator:
    """Guesses. It has no model behind it: it picks one of a few fixed values by a hash of the query and looks nothing up.

    The embedded default uses it so that a planner has a tool that answers every query, fast, and is almost always wrong.
    """

    card = ToolCard("Base_Generator", "Guesses a value without looking anything up; it has no model and is rarely right.")

    def __init__(self, guesses: Sequence[str]) -> None:
        """`guesses` are the values it draws from; the same query always draws the same one."""
        if not guesses:
            raise UserError("Base_Generator needs at least one guess to draw from")
        self._guesses = tuple(guesses)

    async def execute(self, query: str) -> str:
        """One of the guesses."""
        digest = hashlib.sha256(query.encode("utf-8", "surrogatepass")).digest()
        return self._guesses[int.from_bytes(digest, "big") % len(self._guesses)]

    def close(self) -> None:
        """Nothing to release."""


def make(context: ToolContext) -> BaseGenerator:
    return BaseGenerator(context.guesses)
