"""The verifier, V(v^t | q, e^t, M^t), decides whether the memory suffices to answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from flowtrain.agents.agentflow.memory import Memory
from flowtrain.agents.agentflow.prompts import analysis_text, compact_steps, memory_json, tools_text
from flowtrain.agents.agentflow.replies import read_verdict
from flowtrain.agents.agentflow.voices import Voice
from flowtrain.agents.policy import Moment, Prompt
from flowtrain.inference.protocol import EngineError
from flowtrain.records import Call, Task, Verdict
from flowtrain.tools import Tool


@dataclass(frozen=True, slots=True)
class Verification:
    """A verdict and its origin."""

    verdict: Verdict
    text: str = ""
    """The reply that gives the verdict; "" where a rule decided."""
    call: Call | None = None
    """The prompt and the sampled tokens of a policy."""
    rescued: tuple[str, ...] = ()
    """Lenient rules that it took to read it."""


class Verifier(Protocol):
    """Reads the question and the memory, whose last entry is this turn's; `seed` is this turn's."""

    async def verify(
        self, task: Task, memory: Memory, seed: int, deadline_s: float
    ) -> Verification: ...


def enough(task: Task, memory: Memory) -> bool:
    """Decide by the rules of the task; for a task without rules any result suffices."""
    match task.rules:
        case "facts":
            return facts_enough(task.question, memory)
        case "gameof24":
            return gameof24_enough(task.question, memory)
    return True


@dataclass(frozen=True, slots=True)
class RuleVerifier:
    """Stands in for AgentFlow's LLM verifier."""

    is_enough: Callable[[Task, Memory], bool] = enough
    """The rule, which never sees a reference answer."""

    async def verify(
        self, task: Task, memory: Memory, seed: int, deadline_s: float
    ) -> Verification:
        return Verification(self.verdict(task, memory))

    def verdict(self, task: Task, memory: Memory) -> Verdict:
        is_enough = not memory.entries[-1].is_error and self.is_enough(task, memory)
        return Verdict.STOP if is_enough else Verdict.CONTINUE


class CompactVerdictPrompt:
    """A prompt for a tiny verifier:

    Question: What is the area of Chad plus the area of Mali?
    1. Search | area of Chad | The area of Chad is 1284.
    Conclusion:
    """

    prefix, is_message = "Conclusion:", False

    def render(self, moment: Moment) -> str:
        steps = compact_steps(moment.memory)
        return "\n".join([f"Question: {moment.task.prompt}", *steps, self.prefix])

    def write(self, verdict: Verdict) -> str:
        return f" {verdict.value}"


class FullVerdictPrompt:
    """The prompt of a language model as verifier."""

    prefix, is_message = "", True

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools = tools_text(tools)

    def render(self, moment: Moment) -> str:
        return PROMPT.format(
            question=moment.task.prompt,
            analysis=analysis_text(moment.memory),
            tools=self._tools,
            memory=memory_json(moment.memory),
        )

    def write(self, verdict: Verdict) -> str:
        return f"Conclusion: {verdict.value}"


@dataclass(frozen=True, slots=True)
class ModelVerifier:
    """The verifier that a voice speaks for, AgentFlow's if that is frozen.

    A reply without a verdict counts as CONTINUE, and so do a failure of a frozen model and a
    policy's verdict in any form but the one that its prompt asks for.
    """

    voice: Voice
    prompt: Prompt

    async def verify(
        self, task: Task, memory: Memory, seed: int, deadline_s: float
    ) -> Verification:
        """Raises PromptTooLong, and EngineError unless the voice is frozen."""
        is_frozen = self.voice.is_frozen
        try:
            call = await self.voice.reply(
                self.prompt, Moment(task, memory), seed=seed, deadline_s=deadline_s
            )
        except EngineError as error:
            if not is_frozen:
                raise
            return Verification(Verdict.CONTINUE, f"the verifier failed: {error}")
        reply = self.prompt.prefix + call.text
        verdict, rules = read_verdict(reply)
        if is_frozen:
            return Verification(verdict or Verdict.CONTINUE, reply, rescued=rules)
        return Verification(verdict if verdict and not rules else Verdict.CONTINUE, reply, call)


def facts_enough(question: str, memory: Memory) -> bool:
    """Accept a guess, a computed number in a calculation, or a passage with the asked attribute.

    The rule does not check the entity of the passage: a planner that searches for the wrong one is
    stopped and wrong.
    """
    entry = memory.entries[-1]
    if entry.tool_name == "Base_Generator":
        return True
    if re.search(r"\b(plus|minus|times)\b", question):
        return entry.tool_name == "Python_Coder"
    attribute = re.search(r"\bthe (.+?) of ", question)
    return entry.tool_name == "Search" and (
        attribute is None or entry.result.startswith(f"The {attribute.group(1)} of ")
    )


def gameof24_enough(question: str, memory: Memory) -> bool:
    """Accept an expression of 24 that uses each number in the question's brackets once."""
    entry = memory.entries[-1]
    brackets = re.search(r"\[([0-9, ]+)\]", question)
    if entry.tool_name != "Python_Coder" or not _is_24(entry.result):
        return False
    numbers = sorted(re.findall("[0-9]+", entry.sub_goal))
    return brackets is None or numbers == sorted(re.findall("[0-9]+", brackets[1]))


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
