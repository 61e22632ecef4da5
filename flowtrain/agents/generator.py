"""The generator, G(o | q, M^T), writes the answer from the memory.

It always runs, also when the loop ran out of turns or time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from flowtrain.agents.lenient import find_answer
from flowtrain.agents.memory import Memory
from flowtrain.agents.prompts import analysis_text, memory_json
from flowtrain.engines.chat import ChatEngine
from flowtrain.tasks.corpus import passage_value
from flowtrain.types import Task


class Answer(NamedTuple):
    """The answer of a rollout."""

    text: str
    output: str = ""
    """All that the generator wrote; "" where a rule answered."""
    rescued: tuple[str, ...] = ()
    """Lenient rules that it took to find the answer in it."""


class Generator(Protocol):
    """Answers the question from the memory alone."""

    async def answer(self, task: Task, memory: Memory, seed: int, deadline_s: float) -> Answer:
        """Raises EngineError."""


@dataclass(frozen=True, slots=True)
class RuleGenerator:
    """Stands in for AgentFlow's LLM generator; answers "" when the memory holds no result."""

    async def answer(self, task: Task, memory: Memory, seed: int, deadline_s: float) -> Answer:
        is_expression = task.rules == "gameof24"
        return Answer(last_expression(memory) if is_expression else last_result(memory))


@dataclass(frozen=True, slots=True)
class LLMGenerator:
    """AgentFlow's "direct" output: a summary of the process, then the answer."""

    engine: ChatEngine

    async def answer(self, task: Task, memory: Memory, seed: int, deadline_s: float) -> Answer:
        prompt = PROMPT.format(
            question=task.prompt, analysis=analysis_text(memory), memory=memory_json(memory)
        )
        output = await self.engine.ask(prompt, seed=seed, deadline_s=deadline_s)
        found, rules = find_answer(output)
        return Answer(found, output, rules)


def last_result(memory: Memory) -> str:
    """Return the last result that is no error; of a passage, the value that it states."""
    for entry in reversed(memory.entries):
        if not entry.is_error:
            return passage_value(entry.result) or entry.result
    return ""


def last_expression(memory: Memory) -> str:
    """Return the last expression that was computed; in the game of 24 it is the answer."""
    for entry in reversed(memory.entries):
        if entry.tool_name == "Python_Coder" and not entry.is_error:
            return entry.sub_goal
    return ""


PROMPT = """You write the final answer to a question from what a team has found out.

Question: {question}
{analysis}
Steps that were taken, with their results:
{memory}

Write two parts:
1. Process summary: what was done and what each step found, in a few sentences.
2. Answer: the answer to the question, from these results. Where they are not enough, give the \
most probable answer all the same.

End with the final answer alone, as short as the question allows, between tags: \
<answer>...</answer>"""
