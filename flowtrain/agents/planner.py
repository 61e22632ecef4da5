"""The planner, pi_theta(a^t | q, K, M^t), decides the next step."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Protocol

from flowtrain.agents.memory import Memory
from flowtrain.agents.prompts import PlannerPrompt
from flowtrain.engines.protocol import Engine
from flowtrain.engines.token_chat import ChatTokenizer
from flowtrain.types import (
    Action,
    Call,
    Completion,
    FinishReason,
    Sampling,
    Task,
    Turn,
    VersionSpan,
)
from flowtrain.utils.seeds import derive_seed

NO_TOOL = "No matched tool given: "


class PromptTooLong(Exception):
    """The memory has outgrown the model's positions; the rollout ends with what it has."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A planner's decision and the call that it was read from."""

    call: Call
    action: Action | None
    """None when the text was malformed."""


@dataclass(frozen=True, slots=True)
class ResponsePrefix:
    """The prompt and the beginning of the response that a branch shares with its parent's turn."""

    prompt_ids: tuple[int, ...]
    response: Completion

    @classmethod
    def of(cls, turn: Turn, num_tokens: int) -> ResponsePrefix:
        """Take the first `num_tokens` tokens of a turn's response."""
        call = turn.calls["planner"]
        spans = tuple(
            replace(span, end=min(span.end, num_tokens))
            for span in call.spans
            if span.start < num_tokens
        )
        ids = call.response_ids[:num_tokens]
        logprobs = call.logprobs[:num_tokens]
        mask = None if call.sampling_mask is None else call.sampling_mask.first(num_tokens)
        return cls(call.prompt_ids, Completion(ids, logprobs, spans, FinishReason.LENGTH, mask))

    def joined(self, rest: Completion) -> Completion:
        """Return the whole response, of which `rest` was sampled now."""
        shift = len(self.response.ids)
        spans = (
            *self.response.spans,
            *(VersionSpan(s.start + shift, s.end + shift, s.version) for s in rest.spans),
        )
        ours = self.response.sampling_mask
        theirs = rest.sampling_mask
        return Completion(
            self.response.ids + rest.ids,
            self.response.logprobs + rest.logprobs,
            spans,
            rest.finish_reason,
            sampling_mask=None if ours is None or theirs is None else ours + theirs,
        )


class Planner(Protocol):
    """Decides the next step within `deadline_s` seconds; `turn` is from 0, `seed` the rollout's."""

    async def plan(
        self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
    ) -> Plan: ...

    def measure(self, memory: Memory) -> int:
        """Return the number of tokens that the steps of the memory take in the prompt."""

    async def resume(self, prefix: ResponsePrefix, turn: int, seed: int, deadline_s: float) -> Plan:
        """Complete the response at which a branch leaves its parent."""


@dataclass(frozen=True, slots=True)
class PolicyPlanner:
    """Samples from a policy's engine; it reads the question and the memory, no more of the task."""

    engine: Engine
    tokenizer: ChatTokenizer
    prompt: PlannerPrompt
    tool_names: tuple[str, ...]
    max_new_tokens: int
    temperature: float
    request_timeout_s: float
    top_k: int = 0
    top_p: float = 1.0

    async def plan(
        self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
    ) -> Plan:
        """Raises PromptTooLong."""
        prompt_ids = self.encode(task.question, memory)
        if len(prompt_ids) + self.max_new_tokens > self.engine.max_tokens:
            raise PromptTooLong(f"{len(prompt_ids)} prompt tokens")
        completion = await self.engine.generate(
            prompt_ids, self._sampling(self.max_new_tokens, turn, seed, deadline_s)
        )
        return self._plan(prompt_ids, completion)

    async def resume(self, prefix: ResponsePrefix, turn: int, seed: int, deadline_s: float) -> Plan:
        ids = prefix.response.ids
        sampling = self._sampling(self.max_new_tokens - len(ids), turn, seed, deadline_s)
        rest = await self.engine.generate(prefix.prompt_ids + ids, sampling)
        return self._plan(prefix.prompt_ids, prefix.joined(rest))

    def measure(self, memory: Memory) -> int:
        return len(self.tokenizer.encode(self.prompt.steps(memory), add_special_tokens=False))

    def encode(self, question: str, memory: Memory) -> tuple[int, ...]:
        return tuple(
            self.tokenizer.encode(self.prompt.render(question, memory), add_special_tokens=False)
        )

    def _sampling(self, max_new_tokens: int, turn: int, seed: int, deadline_s: float) -> Sampling:
        return Sampling(
            max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=derive_seed(seed, turn),
            deadline_s=min(self.request_timeout_s, deadline_s),
        )

    def _plan(self, prompt_ids: tuple[int, ...], completion: Completion) -> Plan:
        text = self.tokenizer.decode(completion.ids, skip_special_tokens=True)
        action = parse_action(self.prompt.prefix + text, self.tool_names)
        return Plan(Call.of(prompt_ids, completion, text), action)


def parse_action(text: str, tool_names: Collection[str]) -> Action | None:
    """Read the four fields; return None when there is no sub-goal or no tool name.

    The text is JSON with the keys justification, context, sub_goal and tool_name, or else labelled
    lines, of which the last "Tool Name:" and the nearest fields before it count. A tool that is not
    in the toolset keeps the turn: its name becomes "No matched tool given: ...".
    """
    fields = _json_fields(text) or _labelled_fields(text)
    sub_goal = fields.get("sub-goal", "")
    tool_name = fields.get("tool name", "")
    if not sub_goal or not tool_name:
        return None
    return Action(
        justification=fields.get("justification", ""),
        context=fields.get("context", ""),
        sub_goal=sub_goal,
        tool_name=match_tool(tool_name, tool_names),
    )


def match_tool(name: str, tool_names: Collection[str]) -> str:
    """Return the tool's own spelling; case and runs of spaces and underscores do not matter."""
    wanted = _canonical(name)
    return next((tool for tool in tool_names if _canonical(tool) == wanted), NO_TOOL + name)


def _canonical(name: str) -> str:
    return re.sub(r"[\s_]+", "_", name.strip()).casefold()


def _json_fields(text: str) -> dict[str, str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    keys = dict(zip(("justification", "context", "sub_goal", "tool_name"), _LABELS, strict=True))
    # JSON can spell half a surrogate pair, which no tokenizer takes.
    return {
        label: str(value[key]).encode(errors="replace").decode().strip()
        for key, label in keys.items()
        if value.get(key) is not None
    }


_LABELS = ("justification", "context", "sub-goal", "tool name")
_LABEL = re.compile(rf"(?:\*\*)?({'|'.join(_LABELS)})(?:\*\*)?[ \t]*:(?:\*\*)?", re.IGNORECASE)


def _labelled_fields(text: str) -> dict[str, str]:
    """Walk the labels backwards from the last tool name until one breaks the order."""
    labels = list(_LABEL.finditer(text))
    names = [label.group(1).casefold() for label in labels]
    if "tool name" not in names:
        return {}
    last = len(names) - 1 - names[::-1].index("tool name")
    # A tool name ends with its paragraph or a closing fence.
    tool_name = re.split(r"\n\s*\n|```", text[labels[last].end() :], maxsplit=1)[0]
    fields = {"tool name": _plain(tool_name)}
    first = "tool name"
    for index in range(last - 1, -1, -1):
        if _LABELS.index(names[index]) >= _LABELS.index(first):
            break
        first = names[index]
        fields[first] = _plain(text[labels[index].end() : labels[index + 1].start()])
    return fields


def _plain(value: str) -> str:
    """Strip bold marks around the value; those inside may be Python's power."""
    return value.strip().removeprefix("**").removesuffix("**").strip()
