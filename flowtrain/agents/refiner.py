"""The refiner turns what a search found into short evidence; only its text enters the memory.

Source: InfoFlow, arXiv 2510.26575, section 3; its input follows the paper's outline. The loop does
not train it; fine-tuning on good rollouts does where it is the policy (`rft.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flowtrain.agents.memory import Memory
from flowtrain.engines.chat import ChatEngine
from flowtrain.utils.text import words


@dataclass(frozen=True, slots=True)
class Finding:
    """The passages that a search found for a sub-goal."""

    question: str
    memory: Memory
    sub_goal: str
    passages: str

    def prompt(self) -> str:
        """The prompt of a model that refines it."""
        known = "\n".join(f"- {entry.sub_goal}: {entry.result}" for entry in self.memory.entries)
        return PROMPT.format(
            question=self.question,
            known=known or "- nothing yet",
            sub_goal=self.sub_goal,
            passages=self.passages,
        )


class Refiner(Protocol):
    """Makes evidence of a finding."""

    async def refine(self, finding: Finding, seed: int, deadline_s: float) -> str:
        """Return evidence in a few lines, and perhaps what to do next. Raises EngineError."""


class RuleRefiner:
    """Picks the passage (a line) with most words of the sub-goal, the earlier of equals.

    It stands in for a language model and suggests nothing.
    """

    async def refine(self, finding: Finding, seed: int, deadline_s: float) -> str:
        wanted = set(words(finding.sub_goal))
        lines = [line for line in finding.passages.splitlines() if line.strip()]
        return max(
            lines,
            key=lambda line: len(wanted.intersection(words(line))),
            default=finding.passages,
        )


@dataclass(frozen=True, slots=True)
class LLMRefiner:
    """Asks any language model."""

    engine: ChatEngine
    max_chars: int
    """Characters of a reply that are kept."""

    async def refine(self, finding: Finding, seed: int, deadline_s: float) -> str:
        reply = await self.engine.ask(finding.prompt(), seed=seed, deadline_s=deadline_s)
        return reply.strip()[: self.max_chars]


PROMPT = """A researcher works on a question step by step. Read what the last search found and \
write down what matters, so that the
researcher need not read the passages.

Question: {question}

Known so far:
{known}

Looked for: {sub_goal}

Passages:
{passages}

Answer in at most 150 words, in this form:
Evidence: the facts from the passages that bear on what was looked for, with names and numbers \
exactly as they stand there; "nothing" if
there are none. State nothing that the passages do not say.
Next: one sentence that says what to look for next."""
