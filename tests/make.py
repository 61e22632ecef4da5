"""Records as tests need them, with defaults for what a test does not care about, and stand-ins for
engines, chats and planners that do as a test says.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowtrain.records import (
    Action,
    Call,
    FinishReason,
    Group,
    Sampling,
    SamplingMask,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
    VersionSpan,
)

if TYPE_CHECKING:
    from flowtrain.agents.agentflow.planner import Plan
    from flowtrain.tools import ToolCard

TASK = Task("t", "q", ("a",))
Tokens = int | Sequence[int]
"""Ids, or how many tokens there are."""


def ids_of(tokens: Tokens) -> tuple[int, ...]:
    return tuple(range(tokens) if isinstance(tokens, int) else tokens)


def call(
    response: Tokens = 1,
    prompt: Tokens = (7,),
    logprobs: float | Sequence[float] = -1.0,
    version: int | None = None,
    reason: FinishReason = FinishReason.STOP,
    **fields: Any,
) -> Call:
    """`logprobs`: one for all tokens, or each; `version`: of the weights that sampled them."""
    ids = ids_of(response)
    each = (float(logprobs),) * len(ids) if isinstance(logprobs, int | float) else tuple(logprobs)
    spans = () if version is None or not ids else (VersionSpan(0, len(ids), version),)
    return Call(ids_of(prompt), ids, each, fields.pop("spans", spans), reason, **fields)


def turn(
    said: Call | Tokens = 1,
    act: Action | str | None = None,
    result: ToolResult | None = None,
    arguments: str = "{}",
    **fields: Any,
) -> Turn:
    """`said`: the planner's; `act`: an action, or the tool that it names; the rest: its call's."""
    calls = {"planner": said if isinstance(said, Call) else call(said)}
    action = Action("", "", "", act) if isinstance(act, str) else act
    given = {"calls": calls, "action": action, "verdict": Verdict.CONTINUE, "seconds": 0.0}
    if action is not None:
        given["tool_calls"] = (ToolCall(action.tool_name, arguments, result or ToolResult()),)
    return Turn(**{**given, **fields})


def rollout(*turns: Turn, task: Task = TASK, answer: str = "", **fields: Any) -> Trajectory:
    return Trajectory(task, turns, answer, **{"seconds": 0.0, "seed": 0, **fields})


def group(*rollouts: Trajectory, index: int = 0) -> Group:
    return Group(index, rollouts)


@dataclass
class Engine:
    """Samples the ids that a function makes of prompt and sampling; remembers what it was asked."""

    say: Callable[[Any, Sampling], Iterable[int]]
    version: int = 1
    max_tokens: int = 4000
    reason: FinishReason = FinishReason.STOP
    mask: SamplingMask | None = None
    decode: Callable[[list[int]], Any] = tuple
    """Makes of ids what `say` reads and `asked` holds."""
    error: Exception | None = None
    hangs: bool = False
    asked: list[tuple[Any, Sampling]] = field(default_factory=list)

    @classmethod
    def of(cls, tokenizer: Any, *texts: str, **options: Any) -> Engine:
        """Says one text after the other, with the end token."""
        rest, end = iter(texts), tokenizer.eos_token

        def say(*_: Any) -> list[int]:
            return list(tokenizer.encode(next(rest) + end, add_special_tokens=False))

        return cls(say, decode=tokenizer.decode, **options)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Call:
        prompt = self.decode(list(prompt_ids))
        self.asked.append((prompt, sampling))
        if self.error is not None:
            raise self.error
        if self.hangs:
            await asyncio.Event().wait()
        ids = tuple(self.say(prompt, sampling))
        return call(ids, prompt_ids, -0.5, self.version, self.reason, sampling_mask=self.mask)

    @property
    def prompts(self) -> list[Any]:
        return [prompt for prompt, _ in self.asked]

    def load(self, version: int) -> None: ...

    def sleep(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


@dataclass
class Chat:
    """A frozen model: says a reply, the next of several, or what a function makes of the prompt."""

    reply: Any = ""
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
        reply = self.reply
        if callable(reply):
            reply = reply(prompt, seed)
        elif isinstance(reply, list):
            reply = reply[min(len(self.asked), len(reply)) - 1]
        if isinstance(reply, Exception):
            raise reply
        return reply


@dataclass
class Planner:
    """Does what a function makes of turn and seed: an action, or None for a malformed one."""

    act: Callable[[int, int], Action | None]
    said: Call = field(default_factory=call)

    async def plan(self, task: Any, memory: Any, turn: int, seed: int, deadline_s: float) -> Plan:
        from flowtrain.agents.agentflow.planner import Plan  # many tests plan nothing

        return Plan(self.said, self.act(turn, seed))

    async def resume(self, prefix: Any, turn: int, seed: int, deadline_s: float) -> Plan:
        raise AssertionError("nobody branches")

    def measure(self, memory: Any) -> int:
        return 0


@dataclass
class Tool:
    """Says what a function, which may wait, makes of the arguments."""

    card: ToolCard
    act: Callable[..., Any]

    async def execute(self, *given: Any, **named: Any) -> str:
        said = self.act(*given, **named)
        return await said if inspect.isawaitable(said) else said

    def close(self) -> None: ...
