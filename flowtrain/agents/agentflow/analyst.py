"""The analyst describes what a question asks for, and which skills and tools it needs.

The analyst runs once per question, before the first turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from flowtrain.inference.chat import ChatEngine
from flowtrain.inference.protocol import EngineError
from flowtrain.records import Task
from flowtrain.tools.base import shorten
from flowtrain.utils.event_loop import current_call
from flowtrain.utils.seeds import derive_seed

_MAX_CHARS = 8_000
"""Longest analysis in characters, some 2,000 tokens, because every prompt contains it."""


@dataclass(slots=True)
class Analyst:
    """AgentFlow's query analysis, one for all rollouts of a group, whose prompts share it.

    The first rollout samples the reply and the others wait for it. A reply is cached for one call
    of `collect` and for as long as its group has its task, because the policy may change before a
    later group. Failures are not cached.
    """

    engine: ChatEngine
    tools: str
    """The toolset as prompts show it."""
    timeout_s: float
    _call: object = field(default=None, init=False)
    _requests: MutableMapping[Task, asyncio.Task[str]] = field(
        default_factory=WeakKeyDictionary, init=False
    )

    async def analyse(self, task: Task) -> str:
        """Return the analysis within `timeout_s`. Raises EngineError."""
        if self._call is not (call := current_call()):
            self._call = call
            self._requests = WeakKeyDictionary()
        if task not in self._requests:
            self._requests[task] = asyncio.create_task(self._ask(task.prompt))
        request = self._requests[task]
        try:
            # Shielded, so that a rollout that is cut does not take the reply from the others.
            return await asyncio.shield(request)
        except EngineError:
            if self._requests.get(task) is request:
                del self._requests[task]
            raise

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
