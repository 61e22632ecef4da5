"""The refiner (InfoFlow, arXiv 2510.26575, section 3): turns what a search found into short
evidence; only its text enters the memory.

The loop does not train it; fine-tuning on good rollouts does where it is the policy (`rft.py`).
What it is given follows the paper's outline: the question, what is known, what was looked for, the
passages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from flowtrain.agents.memory import Memory
from flowtrain.engines.chat import ChatEngine

_WORD = re.compile(r"\w+")


class Refiner(Protocol):
    """Reads the passages that a sub-goal found."""

    async def refine(
        self,
        question: str,
        memory: Memory,
        sub_goal: str,
        passages: str,
        seed: int,
        deadline_s: float,
    ) -> str:
        """Evidence in a few lines, and perhaps what to do next. Raises EngineError."""


@dataclass(frozen=True, slots=True)
class RuleRefiner:
    """Rule-based stand-in: the one passage (a line) that has most words of the sub-goal, the
    earlier of equals; it suggests nothing.
    """

    async def refine(
        self,
        question: str,
        memory: Memory,
        sub_goal: str,
        passages: str,
        seed: int,
        deadline_s: float,
    ) -> str:
        wanted = set(_WORD.findall(sub_goal.casefold()))
        lines = [line for line in passages.splitlines() if line.strip()]
        return max(
            lines,
            key=lambda line: len(wanted & set(_WORD.findall(line.casefold()))),
            default=passages,
        )


@dataclass(frozen=True, slots=True)
class LLMRefiner:
    """Any language model."""

    engine: ChatEngine
    max_chars: int
    """Characters of a reply that are kept."""

    async def refine(
        self,
        question: str,
        memory: Memory,
        sub_goal: str,
        passages: str,
        seed: int,
        deadline_s: float,
    ) -> str:
        reply = await self.engine.ask(
            render(question, memory, sub_goal, passages), seed=seed, deadline_s=deadline_s
        )
        return reply.strip()[: self.max_chars]


def render(question: str, memory: Memory, sub_goal: str, passages: str) -> str:
    """What the model reads."""
    known = (
        "\n".join(f"- {entry.sub_goal}: {entry.result}" for entry in memory.entries)
        or "- nothing yet"
    )
    return PROMPT.format(question=question, known=known, sub_goal=sub_goal, passages=passages)


PROMPT = """A researcher works on a question step by step. Read what the last search found and write down what matters, so that the
researcher need not read the passages.

Question: {question}

Known so far:
{known}

Looked for: {sub_goal}

Passages:
{passages}

Answer in at most 150 words, in this form:
Evidence: the facts from the passages that bear on what was looked for, with names and numbers exactly as they stand there; "nothing" if
there are none. State nothing that the passages do not say.
Next: one sentence that says what to look for next."""
