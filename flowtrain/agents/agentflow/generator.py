"""The generator, G(o | q, M^T), writes the answer from the memory.

The generator always runs, even after the loop has run out of turns or time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flowtrain.agents.agentflow.memory import Memory
from flowtrain.agents.agentflow.prompts import analysis_text, memory_json
from flowtrain.agents.agentflow.replies import find_answer
from flowtrain.inference.chat import ChatEngine
from flowtrain.records import Task
from flowtrain.tasks.corpus import passage_value


class Answer(NamedTuple):
    """The answer of a rollout."""

    text: str
    output: str = ""
    """All that the generator wrote; "" where a rule answered."""
    rescued: tuple[str, ...] = ()
    """Lenient rules that it took to find the answer in it."""


@dataclass(frozen=True, slots=True)
class Generator:
    """Answers the question from the memory alone: a model writes a summary of the process, then the
    answer, as AgentFlow's "direct" output does. Without a model a rule of the task answers, with ""
    when the memory holds no result.
    """

    engine: ChatEngine | None = None

    async def answer(self, task: Task, memory: Memory, seed: int, deadline_s: float) -> Answer:
        """Raises EngineError."""
        if self.engine is None:
            return Answer(by_rule(task, memory).strip())
        prompt = PROMPT.format(
            question=task.prompt, analysis=analysis_text(memory), memory=memory_json(memory)
        )
        output = await self.engine.ask(prompt, seed=seed, deadline_s=deadline_s)
        text, rules = find_answer(output)
        return Answer(text, output, rules)


def by_rule(task: Task, memory: Memory) -> str:
    """Return the answer by the rules of the task."""
    return last_expression(memory) if task.rules == "gameof24" else last_result(memory)


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
