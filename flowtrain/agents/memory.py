"""The memory of one rollout: an explicit, deterministic record, M^{t+1} = f_mem(M^t, a^t, e^t,
v^t).

As in AgentFlow's released code an entry has four fields; the planner's context and justification
and the verifier's text are not kept. A memory is made anew for every rollout and never shared, so
no task can see another's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flowtrain.tools.base import shorten
from flowtrain.types import Action, ToolResult


@dataclass(frozen=True, slots=True)
class MemoryEntry:
    """One turn. Example:

    MemoryEntry("Search", "area of Chad", 'execution = tool.execute(query="area of Chad")', "The
    area of Chad is 1284.")
    """

    tool_name: str
    sub_goal: str
    command: str
    result: str
    """Output of the tool, or "Error: ..."."""

    @classmethod
    def of(cls, action: Action | None, command: str, result: ToolResult) -> MemoryEntry:
        """Of a turn, whose action is None when it was malformed."""
        if action is None:
            return cls("None", "None", command, result.text)
        return cls(action.tool_name, action.sub_goal, command, result.text)

    @property
    def is_error(self) -> bool:
        return self.result.startswith("Error: ")


@dataclass(frozen=True, slots=True)
class Memory:
    """All turns so far, oldest first. Immutable: `add` gives a new one."""

    entries: tuple[MemoryEntry, ...] = field(default=())
    analysis: str = ""
    """What the analyst wrote about the question; no step, and the same throughout the rollout."""
    hint: str = ""
    """What the environment told a stuck rollout to look for."""

    def add(self, entry: MemoryEntry) -> Memory:
        return replace(self, entries=(*self.entries, entry))

    def as_dict(self) -> dict[str, dict[str, str]]:
        """AgentFlow's form: {"Action Step 1": {"tool_name", "sub_goal", "command", "result"}}."""
        return {
            f"Action Step {number}": {
                "tool_name": e.tool_name,
                "sub_goal": e.sub_goal,
                "command": e.command,
                "result": e.result,
            }
            for number, e in enumerate(self.entries, 1)
        }


_WHOLE, _LEAST = 200, 100
"""Characters up to which a result is never cut, and that a longer one keeps at least."""
_MOST_PER_TOKEN = 8
"""Characters per token of the budget that are looked at: twice what a token of prose has, and
measuring takes time."""


def bounded(memory: Memory, max_tokens: int, measure: Callable[[Memory], int]) -> Memory:
    """The memory in `max_tokens` tokens by the planner's `measure`; always the same for the same
    memory.

    Results lose their middle and say how much was left out, the oldest first and hardly more than
    is needed. One of up to 200 characters stays whole, a longer one keeps 100. Tool names,
    sub-goals and commands are never cut, so a budget too small for them is exceeded.
    """
    if (
        sum(len(entry.result) for entry in memory.entries) <= _MOST_PER_TOKEN * max_tokens
        and measure(memory) <= max_tokens
    ):
        return memory
    least = replace(memory, entries=tuple(_keeping(entry, _LEAST) for entry in memory.entries))
    spare = max_tokens - measure(least)
    while True:
        filled = replace(least, entries=_filled(memory, least, spare, measure))
        excess = measure(filled) - max_tokens
        if excess <= 0 or filled == least:
            return filled
        spare -= excess  # together they take some tokens more than one by one


def _filled(
    memory: Memory, least: Memory, spare: int, measure: Callable[[Memory], int]
) -> tuple[MemoryEntry, ...]:
    """From the newest on, give results back what `spare` tokens hold; the first that gets a part
    only is the last that gets any.
    """
    entries = list(least.entries)
    for index in reversed(range(len(entries))):
        whole, base = memory.entries[index], measure(Memory((least.entries[index],)))
        keep = min(len(whole.result), _MOST_PER_TOKEN * max(spare, 0))
        while keep > _LEAST and entries[index] != whole:
            grown = _keeping(whole, keep)
            cost = measure(Memory((grown,))) - base
            if cost <= spare:
                entries[index], spare = grown, spare - cost
                break
            keep = min(keep * max(spare, 0) // cost, keep - keep // 64 - 1)
        if entries[index] != whole:
            break
    return tuple(entries)


def _keeping(entry: MemoryEntry, num_chars: int) -> MemoryEntry:
    return (
        entry
        if len(entry.result) <= _WHOLE
        else replace(entry, result=shorten(entry.result, num_chars))
    )
