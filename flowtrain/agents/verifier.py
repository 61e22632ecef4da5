"""The verifier, V(v^t | q, e^t, M^t): is the memory enough to answer?"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from flowtrain.agents.memory import Memory
from flowtrain.agents.planner import PromptTooLong
from flowtrain.agents.verdicts import VerdictPrompt, parse_verdict, read_verdict, verdict_message
from flowtrain.engines.chat import ChatEngine
from flowtrain.engines.protocol import Engine, EngineError
from flowtrain.engines.token_chat import ChatTokenizer
from flowtrain.types import Call, Sampling, Task, Verdict


@dataclass(frozen=True, slots=True)
class Verification:
    """A verdict and how it came about."""

    verdict: Verdict
    text: str = ""
    """In which it was given; "" where a rule decided."""
    call: Call | None = None
    """What a policy read and sampled for it."""


class Verifier(Protocol):
    """Reads the question and the memory, whose last entry is this turn's; nothing else of the task.
    `seed` is this turn's.
    """

    async def verify(
        self, task: Task, memory: Memory, seed: int, deadline_s: float
    ) -> Verification: ...


@dataclass(frozen=True, slots=True)
class RuleVerifier:
    """Rule-based stand-in for AgentFlow's LLM verifier; `is_enough` belongs to a family of tasks
    and never sees a reference answer.
    """

    is_enough: Callable[[str, Memory], bool]

    async def verify(
        self, task: Task, memory: Memory, seed: int, deadline_s: float
    ) -> Verification:
        return Verification(self.verdict(task.question, memory))

    def verdict(self, question: str, memory: Memory) -> Verdict:
        is_enough = not memory.entries[-1].is_error and self.is_enough(question, memory)
        return Verdict.STOP if is_enough else Verdict.CONTINUE


@dataclass(frozen=True, slots=True)
class LLMVerifier:
    """AgentFlow's. A model that fails, or says nothing that can be read, is taken to say CONTINUE."""

    engine: ChatEngine
    tools: str
    """The toolset as prompts show it."""

    async def verify(
        self, task: Task, memory: Memory, seed: int, deadline_s: float
    ) -> Verification:
        prompt = verdict_message(task.question, memory, self.tools)
        try:
            reply = await self.engine.ask(prompt, seed=seed, deadline_s=deadline_s)
        except EngineError as error:
            return Verification(Verdict.CONTINUE, f"the verifier failed: {error}")
        return Verification(parse_verdict(reply), reply)


@dataclass(frozen=True, slots=True)
class PolicyVerifier:
    """A policy of its own behind an engine: tokens in, tokens out, as the planner. A malformed
    verdict is taken for CONTINUE.
    """

    engine: Engine
    tokenizer: ChatTokenizer
    prompt: VerdictPrompt
    max_new_tokens: int
    temperature: float
    request_timeout_s: float

    async def verify(
        self, task: Task, memory: Memory, seed: int, deadline_s: float
    ) -> Verification:
        """Raises PromptTooLong."""
        prompt_ids = self.encode(task.question, memory)
        if len(prompt_ids) + self.max_new_tokens > self.engine.max_tokens:
            raise PromptTooLong(f"{len(prompt_ids)} prompt tokens")
        sampling = Sampling(
            self.max_new_tokens,
            self.temperature,
            seed=seed,
            deadline_s=min(self.request_timeout_s, deadline_s),
        )
        done = await self.engine.generate(prompt_ids, sampling)
        text = self.tokenizer.decode(done.ids, skip_special_tokens=True)
        call = Call.of(prompt_ids, done, text)
        reply = self.prompt.prefix + text
        return Verification(read_verdict(reply) or Verdict.CONTINUE, reply, call)

    def encode(self, question: str, memory: Memory) -> tuple[int, ...]:
        return tuple(
            self.tokenizer.encode(self.prompt.render(question, memory), add_special_tokens=False)
        )


def facts_enough(question: str, memory: Memory) -> bool:
    """A guess is taken at its word; a computed number ends a calculation; a passage that states the
    asked attribute ends a look-up.

    It does not check whether the passage is about the right entity: a planner that searches for the
    wrong one is stopped and wrong.
    """
    entry = memory.entries[-1]
    if entry.tool_name == "Base_Generator":
        return True
    if re.search(r"\b(plus|minus|times)\b", question):
        return entry.tool_name == "Python_Coder"
    asked = re.search(r"\bthe (.+?) of ", question)
    return entry.tool_name == "Search" and (
        asked is None or entry.result.startswith(f"The {asked.group(1)} of ")
    )


def gameof24_enough(question: str, memory: Memory) -> bool:
    """The last expression came out as 24 and has the numbers that the question states in brackets,
    each once.
    """
    entry = memory.entries[-1]
    given = re.search(r"\[([0-9, ]+)\]", question)
    uses_them = given is None or sorted(re.findall("[0-9]+", entry.sub_goal)) == sorted(
        re.findall("[0-9]+", given[1])
    )
    return entry.tool_name == "Python_Coder" and _is_24(entry.result) and uses_them


def any_result_enough(question: str, memory: Memory) -> bool:
    """For tasks that we know nothing about: the first result that is no error."""
    return True


def _is_24(text: str) -> bool:
    try:
        return abs(float(text) - 24) < 1e-6
    except ValueError:
        return False
