"""A gateway around an engine that says what it is told, and logs every id that passes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from chat_templates import styled

from flowtrain.agents.base import AgentContext
from flowtrain.agents.gateway.agent import GatewayAgent
from flowtrain.agents.policy import Policy
from flowtrain.config import Config
from flowtrain.records import Call, FinishReason, Sampling, Task, Trajectory, VersionSpan

TASK = Task("t-1", "What is the area of Chad?", ("1284",), columns='{"level": 3}')
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Looks words up.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}


def call_text(*queries: str) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{query}"}}}}\n</tool_call>'
        for query in queries
    )


@dataclass
class LoggingEngine:
    """Says replies in turn, or by the prompt, in tokens of its own: never the canonical ones."""

    tokenizer: Any
    replies: list[str] = field(default_factory=list)
    reply: Callable[[str], str] = lambda prompt: "Yes."
    wait: Callable[[], Awaitable[Any]] | None = None
    spell: Callable[[Any, str], tuple[int, ...]] = lambda tokenizer, text: spelled(tokenizer, text)
    log: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    asked: list[Sampling] = field(default_factory=list)
    num_cancelled: int = 0
    version: int = 0
    max_tokens: int = 4000

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Call:
        self.asked.append(sampling)
        if self.wait is not None:
            try:
                await self.wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        text = (
            self.replies.pop(0) if self.replies else self.reply(self.tokenizer.decode(prompt_ids))
        )
        ids = self.spell(self.tokenizer, text)
        for stop in sampling.stop_strings:
            if stop in text:
                ids = self.spell(self.tokenizer, text[: text.index(stop) + len(stop)])
        reason = FinishReason.STOP
        if len(ids) > sampling.max_new_tokens:
            ids, reason = ids[: sampling.max_new_tokens], FinishReason.LENGTH
        elif not sampling.stop_strings:
            ids += (self.tokenizer.eos_token_id,)
        self.log.append((tuple(prompt_ids), ids))
        logprobs = (-0.5,) * len(ids)
        spans = (VersionSpan(0, len(ids), 0),)
        return Call(tuple(prompt_ids), ids, logprobs, spans, reason)

    def load(self, version: int) -> None: ...

    def sleep(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def spelled(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The text letter by letter, special tokens as they are: other ids than encoding it gives."""
    special = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
    ids: list[int] = []
    while text:
        word = next((each for each in special if text.startswith(each)), text[0])
        ids += tokenizer.encode(word, add_special_tokens=False)
        text = text[len(word) :]
    return tuple(ids)


def make_agent(
    engine: LoggingEngine,
    *,
    agent: dict[str, Any] | None = None,
    tasks: dict[str, Any] | None = None,
    **gateway: Any,
) -> GatewayAgent:
    options = {"name": "gateway", "max_turns": 8, **(agent or {})}
    config = Config.model_validate({"agent": options, "gateway": gateway, "tasks": tasks or {}})
    GatewayAgent.check(config, engine.tokenizer)
    policy = Policy(engine, engine.tokenizer, 300, temperature=1.0, request_timeout_s=20.0)
    context = AgentContext(config, {"planner": policy}, {}, {}, config.agent.max_turns)
    return GatewayAgent(context)


@contextlib.contextmanager
def function_agent(
    tmp_path: Path, source: str, engine: LoggingEngine | None = None, **options: Any
) -> Iterator[GatewayAgent]:
    """The agent of a function `solve` in a file of its own."""
    path = tmp_path / "program.py"
    path.write_text(source)
    made = make_agent(engine or logging_engine(), function=f"{path}:solve", **options)
    with contextlib.closing(made) as agent:
        yield agent


def logging_engine(*replies: str, style: str = "qwen2.5", **options: Any) -> LoggingEngine:
    return LoggingEngine(styled(style), list(replies), **options)


def roll_out(
    agent: GatewayAgent, seed: int = 0, task: Task = TASK, limit_s: float = 30
) -> Trajectory:
    async def run() -> Trajectory:
        return await asyncio.wait_for(agent.run(task, seed), limit_s)

    return asyncio.run(run())


def calls_of(trajectory: Trajectory) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What would be trained: prompt and response of each call."""
    calls = [turn.calls["planner"] for turn in trajectory.turns]
    return [(call.prompt_ids, call.response_ids) for call in calls]


def solved(
    tmp_path: Path, source: str, *replies: str, style: str = "qwen2.5"
) -> tuple[Trajectory, LoggingEngine]:
    """Roll a function out; what is trained is what the engine read and sampled."""
    engine = logging_engine(*replies, style=style)
    with function_agent(tmp_path, source, engine) as agent:
        trajectory = roll_out(agent)
    assert trajectory.error == "", trajectory.error
    assert calls_of(trajectory) == engine.log
    return trajectory, engine


def check_grown(log: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Each prompt begins with the one before it and what was sampled."""
    for (prompt, said), (later, _) in pairwise(log):
        assert later[: len(prompt) + len(said)] == prompt + said


def check_used(trajectory: Trajectory) -> None:
    """Both calls of the first response were recorded, with their results."""
    used = trajectory.turns[0].tool_calls
    assert [each.arguments for each in used] == ['{"query": "area of Chad"}', '{"query": "Chad"}']
    assert [each.result.output for each in used] == ["area of Chad: 1284", "Chad: 1284"]
