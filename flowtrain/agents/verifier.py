"""The verifier, V(v^t | q, e^t, M^t): is the memory enough to answer?"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from flowtrain.agents.memory import Memory
from flowtrain.types import Verdict


class Verifier(Protocol):
    """Reads the question and the memory, whose last entry is this turn's; knows no answers."""

    async def verify(self, question: str, memory: Memory) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class RuleVerifier:
    """Rule-based stand-in for AgentFlow's LLM verifier; `is_enough` belongs to a family of tasks and never sees a reference answer."""

    is_enough: Callable[[str, Memory], bool]

    async def verify(self, question: str, memory: Memory) -> Verdict:
        return Verdict.STOP if not memory.entries[-1].is_error and self.is_enough(question, memory) else Verdict.CONTINUE


def facts_enough(question: str, memory: Memory) -> bool:
    """A guess is taken at its word; a computed number ends a calculation; a passage that states the asked attribute ends a look-up.

    It does not check whether the passage is about the right entity: a planner that searches for the wrong one is stopped and wrong.
    """
    entry = memory.entries[-1]
    if entry.tool_name == "Base_Generator":
        return True
    if re.search(r"\b(plus|minus|times)\b", question):
        return entry.tool_name == "Python_Coder"
    asked = re.search(r"\bthe (.+?) of ", question)
    return entry.tool_name == "Search" and (asked is None or entry.result.startswith(f"The {asked.group(1)} of "))


def gameof24_enough(question: str, memory: Memory) -> bool:
    """The last expression came out as 24."""
    entry = memory.entries[-1]
    return entry.tool_name == "Python_Coder" and _is_24(entry.result)


def any_result_enough(question: str, memory: Memory) -> bool:
    """For tasks that we know nothing about: the first result that is no error."""
    return True


def _is_24(text: str) -> bool:
    try:
        return abs(float(text) - 24) < 1e-6
    except ValueError:
        return False
