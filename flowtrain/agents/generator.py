"""The generator, G(o | q, M^T): writes the answer from the memory. It always runs, also when the loop ran out of turns or time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from flowtrain.agents.memory import Memory
from flowtrain.tasks.corpus import passage_value


class Generator(Protocol):
    """Answers the question from the memory alone."""

    async def answer(self, question: str, memory: Memory) -> str: ...


@dataclass(frozen=True, slots=True)
class RuleGenerator:
    """Rule-based stand-in for AgentFlow's LLM generator; "" when the memory holds no result."""

    extract: Callable[[Memory], str]

    async def answer(self, question: str, memory: Memory) -> str:
        return self.extract(memory)


def last_result(memory: Memory) -> str:
    """The last result that is no error; of a passage, the value that it states."""
    for entry in reversed(memory.entries):
        if not entry.is_error:
            return passage_value(entry.result) or entry.result
    return ""


def last_expression(memory: Memory) -> str:
    """The last expression that was computed, for Game of 24, where the expression is the answer."""
    return next((e.sub_goal for e in reversed(memory.entries) if e.tool_name == "Python_Coder" and not e.is_error), "")
