"""Records as tests need them, with defaults for what a test does not care about, and stand-ins for
engines, chats and planners that do as a test says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowtrain.agents.agentflow.planner import Plan
from flowtrain.types import (
    Action,
    Call,
    Completion,
    FinishReason,
    Group,
    Sampling,
    Task,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
    VersionSpan,
)

TASK = Task("t", "q", ("a",))
Tokens = int | Sequence[int]
"""Ids, or how many tokens there are."""


def ids_of(tokens: Tokens) -> tuple[int, ...]:
    return tuple(range(tokens) if isinstance(tokens, int) else tokens)


def completion(
    tokens: Tokens = 1,
    logprobs: float | Sequence[float] = -1.0,
    version: int | None = None,
    reason: FinishReason = FinishReason.STOP,
    **fields: Any,
) -> Completion:
    """`logprobs`: one for all tokens, or each; `version`: of the weights that sampled them."""
    ids = ids_of(tokens)
    each = (float(logprobs),) * len(ids) if isinstance(logprobs, int | float) else tuple(logprobs)
    spans = () if version is None or not ids else (VersionSpan(0, len(ids), version),)
    return Completion(ids, each, spans, reason, **fields)


def call(
    response: Tokens = 1,
    prompt: Tokens = (7,),
    logprobs: float | Sequence[float] = -1.0,
    version: int | None = None,
    reason: FinishReason = FinishReason.STOP,
    **fields: Any,
) -> Call:
    done = completion(response, logprobs, version, reason)
    return Call(ids_of(prompt), done.ids, done.logprobs, done.spans, reason, **fields)


def turn(said: Call | Tokens = 1, act: Action | str | None = None, **fields: Any) -> Turn:
    """`said`: the planner's; `act`: an action, or the tool that it names."""
    calls = {"planner": said if isinstance(said, Call) else call(said)}
    action = Action("", "", "", act) if isinstance(act, str) else act
    given = {
        "calls": calls,
        "action": action,
        "command": "",
        "result": ToolResult(),
        "seconds": 0.0,
    }
    return Turn(**{**given, "verdict": Verdict.CONTINUE, **fields})


def rollout(*turns: Turn, task: Task = TASK, answer: str = "", **fields: Any) -> Trajectory:
    return Trajectory(task, turns, answer, **{"seconds": 0.0, "seed": 0, **fields})


def group(*rollouts: Trajectory, index: int = 0) -> Group:
    return Group(index, rollouts)


@dataclass
class Engine:
    """Samples the ids that a function makes of prompt and sampling; remembers what it was asked."""

    say: Callable[[tuple[int, ...], Sampling], Sequence[int]]
    version: int = 1
    max_tokens: int = 4000
    reason: FinishReason = FinishReason.STOP
    asked: list[tuple[tuple[int, ...], Sampling]] = field(default_factory=list)

    @classmethod
    def of(cls, tokenizer: Any, *texts: str, **options: Any) -> Engine:
        """Says one text after the other, with the end token."""
        rest = iter(texts)
        encode = tokenizer.encode
        return cls(
            lambda *_: encode(next(rest) + tokenizer.eos_token, add_special_tokens=False), **options
        )

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.asked.append((tuple(prompt_ids), sampling))
        ids = self.say(tuple(prompt_ids), sampling)
        return completion(ids, -0.5, self.version, self.reason)

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [prompt for prompt, _ in self.asked]

    def load(self, version: int) -> None: ...

    def sleep(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


@dataclass
class Chat:
    """A frozen model: replies as it is told; remembers prompts, seeds and deadlines."""

    reply: str | Exception | Callable[[str, int], str] = ""
    name: str = "scripted"
    asked: list[tuple[str, int, float]] = field(default_factory=list)
    now: int = 0
    most: int = 0

    @property
    def prompts(self) -> list[str]:
        return [prompt for prompt, _, _ in self.asked]

    async def ask(self, prompt: str, *, seed: int = 0, deadline_s: float = 60.0) -> str:
        self.asked.append((prompt, seed, deadline_s))
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply if isinstance(self.reply, str) else self.reply(prompt, seed)


@dataclass
class Planner:
    """Does what a function makes of turn and seed: an action, or None for a malformed one."""

    act: Callable[[int, int], Action | None]
    said: Call = field(default_factory=call)

    async def plan(self, task: Any, memory: Any, turn: int, seed: int, deadline_s: float) -> Plan:
        return Plan(self.said, self.act(turn, seed))

    async def resume(self, prefix: Any, turn: int, seed: int, deadline_s: float) -> Plan:
        raise AssertionError("nobody branches")

    def measure(self, memory: Any) -> int:
        return 0
