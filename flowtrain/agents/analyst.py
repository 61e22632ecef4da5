"""The analyst says what a question asks for, and which skills and tools it needs.

It is asked once per question, before the first turn.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from flowtrain.engines.chat import ChatEngine
from flowtrain.tools.base import shorten
from flowtrain.utils.seeds import derive_seed

_MAX_CHARS = 8_000
"""Characters of an analysis that are kept, some 2,000 tokens; every prompt of a rollout has it."""


@dataclass(slots=True)
class Analyst:
    """AgentFlow's query analysis, one for all rollouts of a question, whose prompts share it.

    The first rollout asks and the others wait for the same reply. Replies are kept for one event
    loop: the next batch of rollouts asks again, because the policy may have changed.
    """

    engine: ChatEngine
    tools: str
    """The toolset as prompts show it."""
    timeout_s: float
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)
    _asked: dict[str, asyncio.Task[str]] = field(default_factory=dict, init=False)

    async def analyse(self, question: str) -> str:
        """Return the analysis within `timeout_s`. Raises EngineError."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._asked = {}
        if question not in self._asked:
            self._asked[question] = loop.create_task(self._ask(question))
        # Shielded, so that a rollout that is cut does not take the reply from the others.
        return await asyncio.shield(self._asked[question])

    async def _ask(self, question: str) -> str:
        # The seed is the question's, so that no rollout depends on which of its group came first.
        prompt = PROMPT.format(question=question, tools=self.tools)
        reply = await self.engine.ask(
            prompt, seed=derive_seed("analysis", question), deadline_s=self.timeout_s
        )
        return shorten(reply.strip(), _MAX_CHARS)


PROMPT = """You prepare the work of a team that answers questions step by step with tools. \
Analyse the question; do not answer it.

Question: {question}

Tools:
{tools}

Write four short parts:
1. Summary: what is asked, and in which form the answer must come.
2. Required skills: what one must be able to do.
3. Relevant tools: which of the tools help, each with how, and what to watch out for.
4. Considerations: traps, missing details, and how an answer could be checked."""
