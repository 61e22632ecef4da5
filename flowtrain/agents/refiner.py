"""The refiner turns what a search found into short evidence; only its text enters the memory.

Source: InfoFlow, arXiv 2510.26575, section 3; its input follows the paper's outline. As a policy of
its own it is fine-tuned (`rft.py`), as in the paper, and can be trained in the loop, which the
paper does not do. It reads all that a turn's command found at once, so that a turn has one call of
it at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from flowtrain.agents.memory import Memory
from flowtrain.agents.policy import Policy, PromptTooLong
from flowtrain.agents.prompts import compact_steps
from flowtrain.engines.chat import ChatEngine
from flowtrain.engines.protocol import EngineError
from flowtrain.engines.token_chat import ChatTokenizer, chat_text
from flowtrain.types import Call
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


class Evidence(NamedTuple):
    """The evidence that a refiner makes of a finding."""

    text: str
    """A few lines, and perhaps what to do next; "": there is none, and the passages stay."""
    call: Call | None = None
    """The prompt and the sampled tokens of a policy."""


class Refiner(Protocol):
    """Makes evidence of a finding; `seed` is this turn's."""

    async def refine(self, finding: Finding, seed: int, deadline_s: float) -> Evidence: ...


class RuleRefiner:
    """Picks the passage (a line) with most words of the sub-goal, the earlier of equals.

    It stands in for a language model and suggests nothing.
    """

    async def refine(self, finding: Finding, seed: int, deadline_s: float) -> Evidence:
        return Evidence(best_passage(finding))


def best_passage(finding: Finding) -> str:
    """Return the passage that `RuleRefiner` picks."""
    wanted = set(words(finding.sub_goal))
    lines = [line for line in finding.passages.splitlines() if line.strip()]
    return max(
        lines,
        key=lambda line: len(wanted.intersection(words(line))),
        default=finding.passages,
    )


@dataclass(frozen=True, slots=True)
class LLMRefiner:
    """Asks any language model; a failure leaves the passages."""

    engine: ChatEngine
    max_chars: int
    """Characters of a reply that are kept."""

    async def refine(self, finding: Finding, seed: int, deadline_s: float) -> Evidence:
        try:
            reply = await self.engine.ask(finding.prompt(), seed=seed, deadline_s=deadline_s)
        except EngineError:
            return Evidence("")
        return Evidence(reply.strip()[: self.max_chars])


class RefinerPrompt(Protocol):
    """Renders the prompt of a refiner that is a policy."""

    def render(self, finding: Finding) -> str: ...

    def write(self, evidence: str) -> str:
        """Write the reply that gives `evidence`, for a scripted expert."""


class CompactRefinerPrompt:
    """A prompt for a tiny refiner:

    Question: What is the area of Chad plus the area of Mali?
    1. Search | area of Chad | The area of Chad is 1284.
    Looked for: area of Mali
    The area of Mali is 1240.
    The capital of Mali is Bamako.
    Evidence:
    """

    def render(self, finding: Finding) -> str:
        found = finding.passages.strip()
        steps = compact_steps(finding.memory)
        lines = [f"Question: {finding.question}", *steps, f"Looked for: {finding.sub_goal}", found]
        return "\n".join([*lines, "Evidence:"])

    def write(self, evidence: str) -> str:
        return f" {evidence}"


@dataclass(frozen=True, slots=True)
class FullRefinerPrompt:
    """The prompt of a language model as refiner, through the chat template."""

    tokenizer: ChatTokenizer

    def render(self, finding: Finding) -> str:
        return chat_text(self.tokenizer, finding.prompt())

    def write(self, evidence: str) -> str:
        return evidence


@dataclass(frozen=True, slots=True)
class PolicyRefiner:
    """The refiner as a policy of its own: a reply in whatever form is the evidence."""

    policy: Policy
    prompt: RefinerPrompt
    max_chars: int
    """Characters of a reply that the memory keeps; all of it is trained."""

    async def refine(self, finding: Finding, seed: int, deadline_s: float) -> Evidence:
        """Sample evidence; passages that do not fit into the model stay as they are."""
        prompt_ids = self.policy.encode(self.prompt.render(finding))
        try:
            call = await self.policy.sample(prompt_ids, seed=seed, deadline_s=deadline_s)
        except PromptTooLong:
            return Evidence("")
        return Evidence(call.text.strip()[: self.max_chars], call)

    def imitate(self, finding: Finding, evidence: str, end_id: int) -> Evidence:
        """Return evidence of somebody else as if the policy had written it, for demonstrations."""
        text = self.prompt.write(evidence)
        call = self.policy.imitate(self.prompt.render(finding), text, end_id)
        return Evidence(evidence[: self.max_chars], call)


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
