"""The refiner turns what a search found into short evidence; only its text enters the memory.

Source: InfoFlow, arXiv 2510.26575, section 3; its input follows the paper's outline. As a policy of
its own it is fine-tuned (`rft.py`), as in the paper, and can be trained in the loop, which the
paper does not do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from flowtrain.agents.agentflow.prompts import compact_steps
from flowtrain.agents.agentflow.voices import Voice
from flowtrain.agents.policy import Moment, Prompt, PromptTooLong
from flowtrain.inference.protocol import EngineError
from flowtrain.records import Call
from flowtrain.utils.text import words


class Evidence(NamedTuple):
    """The evidence that a refiner makes of a finding."""

    text: str
    """A few lines, and perhaps what to do next; "": there is none, and the passages stay."""
    call: Call | None = None
    """The prompt and the sampled tokens of a policy."""


class Refiner(Protocol):
    """Makes evidence of the passages of a moment; `seed` is this turn's."""

    async def refine(self, moment: Moment, seed: int, deadline_s: float) -> Evidence: ...


class RuleRefiner:
    """Picks the passage (a line) with most words of the sub-goal, the earlier of equals.

    The rule replaces a language model and adds no suggestions.
    """

    async def refine(self, moment: Moment, seed: int, deadline_s: float) -> Evidence:
        return Evidence(best_passage(moment))


def best_passage(moment: Moment) -> str:
    """Return the passage that `RuleRefiner` picks."""
    terms = set(words(moment.sub_goal))
    lines = [line for line in moment.passages.splitlines() if line.strip()]
    return max(
        lines, key=lambda line: len(terms.intersection(words(line))), default=moment.passages
    )


class CompactRefinerPrompt:
    """A prompt for a tiny refiner:

    Question: What is the area of Chad plus the area of Mali?
    1. Search | area of Chad | The area of Chad is 1284.
    Looked for: area of Mali
    The area of Mali is 1240.
    The capital of Mali is Bamako.
    Evidence:
    """

    prefix, is_message = "", False

    def render(self, moment: Moment) -> str:
        lines = [f"Question: {moment.task.prompt}", *compact_steps(moment.memory)]
        lines += [f"Looked for: {moment.sub_goal}", moment.passages.strip(), "Evidence:"]
        return "\n".join(lines)

    def write(self, evidence: str) -> str:
        return f" {evidence}"


class FullRefinerPrompt:
    """The prompt of a language model as refiner."""

    prefix, is_message = "", True

    def render(self, moment: Moment) -> str:
        entries = moment.memory.entries
        findings = "\n".join(f"- {entry.sub_goal}: {entry.result}" for entry in entries)
        return PROMPT.format(
            question=moment.task.prompt,
            known=findings or "- nothing yet",
            sub_goal=moment.sub_goal,
            passages=moment.passages,
        )

    def write(self, evidence: str) -> str:
        return evidence


@dataclass(frozen=True, slots=True)
class ModelRefiner:
    """The refiner that a voice speaks for: a reply in whatever form is the evidence."""

    voice: Voice
    prompt: Prompt
    max_chars: int
    """Characters of a reply that the memory keeps; all of it is trained."""

    async def refine(self, moment: Moment, seed: int, deadline_s: float) -> Evidence:
        """Return the reply as evidence; "" where the passages do not fit into the model, or a
        frozen model fails. Raises EngineError of others.
        """
        is_frozen = self.voice.is_frozen
        try:
            call = await self.voice.reply(self.prompt, moment, seed=seed, deadline_s=deadline_s)
        except PromptTooLong:
            return Evidence("")
        except EngineError:
            if not is_frozen:
                raise
            return Evidence("")
        return Evidence(call.text.strip()[: self.max_chars], None if is_frozen else call)


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
