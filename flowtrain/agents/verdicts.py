"""Prompts of the verifier, and the parsers of its replies."""

from __future__ import annotations

import json
import re
from typing import Protocol

from flowtrain.agents.memory import Memory
from flowtrain.agents.policy import Prompt
from flowtrain.agents.prompts import analysis_text, compact_steps, memory_json
from flowtrain.engines.token_chat import ChatTokenizer, chat_text
from flowtrain.types import Verdict


class VerdictPrompt(Prompt, Protocol):
    """Renders the prompt of a policy."""

    def write(self, verdict: Verdict) -> str:
        """Write the reply that states `verdict`, without the prefix, for a scripted expert."""


class CompactVerdictPrompt:
    """A prompt for a tiny verifier:

    Question: What is the area of Chad plus the area of Mali?
    1. Search | area of Chad | The area of Chad is 1284.
    Conclusion:
    """

    prefix = "Conclusion:"

    def render(self, question: str, memory: Memory) -> str:
        return "\n".join([f"Question: {question}", *compact_steps(memory), self.prefix])

    def write(self, verdict: Verdict) -> str:
        return f" {verdict.value}"


class FullVerdictPrompt:
    """The prompt of a language model as verifier, through the chat template."""

    prefix = ""

    def __init__(self, tools: str, tokenizer: ChatTokenizer) -> None:
        """`tools`: the toolset as prompts show it."""
        self._tools = tools
        self._tokenizer = tokenizer

    def render(self, question: str, memory: Memory) -> str:
        return chat_text(self._tokenizer, verdict_message(question, memory, self._tools))

    def write(self, verdict: Verdict) -> str:
        return f"Conclusion: {verdict.value}"


def verdict_message(question: str, memory: Memory, tools: str) -> str:
    return PROMPT.format(
        question=question, analysis=analysis_text(memory), tools=tools, memory=memory_json(memory)
    )


def read_verdict(reply: str) -> Verdict | None:
    """Read a policy's verdict; None unless its last line is exactly as the prompt asks."""
    last = reply.strip().rpartition("\n")[2].strip()
    return next((verdict for verdict in Verdict if last == f"Conclusion: {verdict.value}"), None)


_CONCLUSION = re.compile(
    r"conclusion\W{0,12}\b(stop|continue)\b(?!\s{0,3}(?:[|/]|or\b))(?!\s+(?:is|would)\b)",
    re.IGNORECASE,
)
"""Excludes a reply that repeats both options, "Conclusion: STOP or CONTINUE", and one that speaks
of an option, "Conclusion: STOP is not warranted"."""


def parse_verdict(reply: str) -> Verdict | None:
    """Read a language model's verdict; None where there is none.

    It is the field "stop_signal" of a JSON object, or the last "Conclusion: STOP" or "Conclusion:
    CONTINUE". The word alone decides nothing: AgentFlow's parser stops at any "stop" in the text,
    "do not stop yet" included.
    """
    try:
        match json.loads(reply):
            case {"stop_signal": bool(stops)}:
                return Verdict.STOP if stops else Verdict.CONTINUE
    except (ValueError, RecursionError):
        pass
    conclusions = _CONCLUSION.findall(reply)
    return Verdict(conclusions[-1].upper()) if conclusions else None


PROMPT = """You check whether a question can be answered with what a team has found so far.

Question: {question}
{analysis}
Tools that the team could still use:
{tools}

Steps so far:
{memory}

Judge what the results say, not what they were meant to say. Check in this order:
1. Completeness: is every part of the question covered by a result?
2. Consistency: do the results contradict each other or the question?
3. Verification: is a result an error, a guess, or in need of a check by another tool?
4. Ambiguity: is anything left open that one more step could settle?

Give your reasons briefly. Then end with exactly one of these two lines:
Conclusion: STOP
Conclusion: CONTINUE

STOP when the answer can be written now; CONTINUE when another step is needed."""
