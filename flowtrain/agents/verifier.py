"""The verifier, V(v^t | q, e^t, M^t): is the memory enough to answer?"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from flowtrain.agents.memory import Memory
from flowtrain.agents.prompts import analysis_text, memory_json
from flowtrain.rollout.chat import ChatEngine
from flowtrain.rollout.engine import EngineError
from flowtrain.types import Verdict


class Verifier(Protocol):
    """Reads the question and the memory, whose last entry is this turn's; knows no answers. `seed` is this turn's."""

    async def verify(self, question: str, memory: Memory, seed: int, deadline_s: float) -> tuple[Verdict, str]:
        """The verdict, and the text in which it was given: "" where a rule decided."""


@dataclass(frozen=True, slots=True)
class RuleVerifier:
    """Rule-based stand-in for AgentFlow's LLM verifier; `is_enough` belongs to a family of tasks and never sees a reference answer."""

    is_enough: Callable[[str, Memory], bool]

    async def verify(self, question: str, memory: Memory, seed: int, deadline_s: float) -> tuple[Verdict, str]:
        is_enough = not memory.entries[-1].is_error and self.is_enough(question, memory)
        return Verdict.STOP if is_enough else Verdict.CONTINUE, ""


@dataclass(frozen=True, slots=True)
class LLMVerifier:
    """AgentFlow's. A model that fails, or says nothing that can be read, is taken to say CONTINUE."""

    engine: ChatEngine
    tools: str
    """The toolset as prompts show it."""

    async def verify(self, question: str, memory: Memory, seed: int, deadline_s: float) -> tuple[Verdict, str]:
        prompt = PROMPT.format(question=question, analysis=analysis_text(memory), tools=self.tools, memory=memory_json(memory))
        try:
            reply = await self.engine.ask(prompt, seed=seed, deadline_s=deadline_s)
        except EngineError as error:
            return Verdict.CONTINUE, f"the verifier failed: {error}"
        return parse_verdict(reply), reply


_CONCLUSION = re.compile(r"conclusion\W{0,12}\b(stop|continue)\b(?!\s{0,3}(?:[|/]|or\b))", re.IGNORECASE)
"""Not the form that was asked for, word for word: "Conclusion: STOP or CONTINUE"."""


def parse_verdict(reply: str) -> Verdict:
    """The last "Conclusion: STOP" or "Conclusion: CONTINUE"; or the field "stop_signal" of a JSON object; else CONTINUE.

    The word alone decides nothing: AgentFlow's parser stops at any "stop" in the text, "do not stop yet" included.
    """
    try:
        match json.loads(reply):
            case {"stop_signal": bool(stops)}:
                return Verdict.STOP if stops else Verdict.CONTINUE
    except (ValueError, RecursionError):
        pass
    conclusions = _CONCLUSION.findall(reply)
    return Verdict(conclusions[-1].upper()) if conclusions else Verdict.CONTINUE


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
    """The last expression came out as 24 and has the numbers that the question states in brackets, each once."""
    entry = memory.entries[-1]
    given = re.search(r"\[([0-9, ]+)\]", question)
    uses_them = given is None or sorted(re.findall("[0-9]+", entry.sub_goal)) == sorted(re.findall("[0-9]+", given[1]))
    return entry.tool_name == "Python_Coder" and _is_24(entry.result) and uses_them


def any_result_enough(question: str, memory: Memory) -> bool:
    """For tasks that we know nothing about: the first result that is no error."""
    return True


def _is_24(text: str) -> bool:
    try:
        return abs(float(text) - 24) < 1e-6
    except ValueError:
        return False


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
