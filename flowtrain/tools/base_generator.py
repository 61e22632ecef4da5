"""AgentFlow's base generator, which answers from a model's own knowledge, and a stand-in for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from flowtrain.inference.chat import ChatEngine
from flowtrain.inference.protocol import EngineError
from flowtrain.records import UserError
from flowtrain.tools.base import Tool, ToolCard, ToolError
from flowtrain.tools.registry import ToolContext


async def ask_model(chat: ChatEngine, prompt: str, timeout_s: float) -> str:
    """Return the reply of the model inside a tool; raises ToolError when there is none."""
    try:
        return await chat.ask(prompt, deadline_s=timeout_s)
    except EngineError as error:
        raise ToolError(f"the model did not answer: {error}") from error


@dataclass(frozen=True, slots=True)
class BaseGenerator(Tool):
    """Asks the model once. The query is the whole prompt, without the question and the memory."""

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
        aliases=("Generalist_Solution_Generator_Tool",),
    )

    async def execute(self, query: str) -> str:
        """Return the model's reply; raises ToolError when there is none."""
        if not query.strip():
            raise ToolError("empty query")
        return await ask_model(self.chat, query, self.timeout_s)


class GuessGenerator(Tool):
    """Picks one of a few fixed values by a hash of the query; it has no model.

    The embedded default needs a tool that answers every query fast and is almost always wrong.
    """

    card = ToolCard(
        "Base_Generator",
        "Guesses a value without looking anything up; it has no model and is rarely right.",
        aliases=("Generalist_Solution_Generator_Tool",),
    )

    def __init__(self, guesses: Sequence[str]) -> None:
        """Draw from `guesses`; a query always draws the same one."""
        if not guesses:
            raise UserError(
                "Base_Generator needs a model (roles.tools) or values to guess from, which the "
                "texts of [tasks] do not state"
            )
        self._guesses = tuple(guesses)

    async def execute(self, query: str) -> str:
        """Return one of the guesses."""
        digest = hashlib.sha256(query.encode("utf-8", "surrogatepass")).digest()
        return self._guesses[int.from_bytes(digest, "big") % len(self._guesses)]


def make(context: ToolContext) -> Tool:
    """Raises UserError where a model plans for questions of the user, and this would guess."""
    config = context.config
    if context.chat is None:
        if config.tasks.name == "file" and (
            config.agent.prompt == "full" or not config.tasks.corpus
        ):
            raise UserError(
                "roles.tools='none' with tasks.name='file': Base_Generator of "
                f"agent.tools={list(config.agent.tools)} would only guess. Set roles.tools to a "
                "model, such as policy, or remove the tool; the tiny planner "
                "(agent.prompt='compact') may have the guesses of tasks.corpus='shipped'"
            )
        return GuessGenerator(context.guesses)
    return BaseGenerator(context.chat, context.config.agent.tool_timeout_s)
