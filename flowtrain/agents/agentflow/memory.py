"""The memory of one rollout is an explicit record: M^{t+1} = f_mem(M^t, a^t, e^t, v^t).

As in AgentFlow's released code an entry has four fields; the paper keeps the verifier's text
(appendix E.1.5) and the time (section 3.1) besides. The planner's context and justification are not
kept. Every rollout has a memory of its own, so no task can see another's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flowtrain.agents.agentflow.commands import NO_COMMAND, command_of
from flowtrain.records import ToolResult, Turn
from flowtrain.tools.base import shorten


@dataclass(frozen=True, slots=True)
class MemoryEntry:
    """One turn."""

    tool_name: str
    sub_goal: str
    command: str
    result: str
    """Output of the tool, "The area of Chad is 1284.", or "Error: ..."."""
    is_error: bool = False
    """The tool failed, or there was none to call; what a page says about errors does not count."""

    @classmethod
    def of(cls, turn: Turn) -> MemoryEntry:
        """Make the entry of a turn."""
        tool_name, sub_goal = ("None", "None")
        if turn.action is not None:
            tool_name, sub_goal = turn.action.tool_name, turn.action.sub_goal
        command, result = NO_COMMAND, ToolResult(error=turn.problem)
        if turn.tool_calls:
            call = turn.tool_calls[0]
            command, result = command_of(call), call.result
        text = turn.evidence or result.text
        return cls(tool_name, sub_goal, command, text, result.error is not None)


@dataclass(frozen=True, slots=True)
class Memory:
    """All turns so far, oldest first. Immutable: `add` returns a new memory."""

    entries: tuple[MemoryEntry, ...] = field(default=())
    analysis: str = ""
    """The analyst's text about the question."""
    hint: str = ""
    """The next thing to look for, where the rollout was stuck."""

    def add(self, entry: MemoryEntry) -> Memory:
        return replace(self, entries=(*self.entries, entry))

    def as_dict(self) -> dict[str, dict[str, str]]:
        """Return AgentFlow's form: {"Action Step 1": {"tool_name", "sub_goal", "command",
        "result"}}.
        """
        names = ("tool_name", "sub_goal", "command", "result")
        return {
            f"Action Step {number}": {name: getattr(entry, name) for name in names}
            for number, entry in enumerate(self.entries, 1)
        }


_WHOLE = 200
"""Characters up to which a result is never cut."""
_LEAST = 100
"""Characters that a longer result keeps at least."""
_MOST_PER_TOKEN = 8
"""Characters tried per token of the budget, twice those of prose; measuring more takes time."""


class Budget:
    """Keeps the growing memory of one rollout within a number of tokens; tokenising takes time, so
    each entry is measured once.
    """

    def __init__(self, max_tokens: int, measure: Callable[[Memory], int]) -> None:
        """`measure` is the planner's; `max_tokens` 0: nothing is cut."""
        self._max_tokens = max_tokens
        self._measure = measure
        self._costs: dict[MemoryEntry, int] = {}
        self._is_spent = False

    def bounded(self, memory: Memory) -> Memory:
        """Cut the memory, which only grows from call to call, deterministically.

        Results lose their middle and say how much was left out, the oldest first and hardly more
        than is needed. A result of up to 200 characters stays whole, a longer one keeps at least
        100. Tool names, sub-goals and commands are never cut, so a budget too small for them is
        exceeded.
        """
        if not self._max_tokens or self._fits(memory):
            return memory
        floor = replace(
            memory, entries=tuple(_shortened(entry, _LEAST) for entry in memory.entries)
        )
        spare = self._max_tokens - self._measure(floor)
        while True:
            filled = replace(floor, entries=self._filled(memory, floor, spare))
            excess = self._measure(filled) - self._max_tokens
            if excess <= 0 or filled == floor:
                return filled
            spare -= excess  # results take some tokens more together than one by one

    def _fits(self, memory: Memory) -> bool:
        # The memory only grows: once it did not fit it never does, and is not measured again.
        num_chars = sum(len(entry.result) for entry in memory.entries)
        self._is_spent = (
            self._is_spent
            or num_chars > _MOST_PER_TOKEN * self._max_tokens
            or self._measure(memory) > self._max_tokens
        )
        return not self._is_spent

    def _filled(self, memory: Memory, floor: Memory, spare: int) -> tuple[MemoryEntry, ...]:
        """Give `spare` tokens back to the results, from the newest on, until one is not whole."""
        entries = list(floor.entries)
        for index in reversed(range(len(entries))):
            entry = memory.entries[index]
            base = self._cost(floor.entries[index])
            keep = min(len(entry.result), _MOST_PER_TOKEN * max(spare, 0))
            while keep > _LEAST and entries[index] != entry:
                grown = _shortened(entry, keep)
                cost = (self._cost(entry) if grown == entry else self._entry_tokens(grown)) - base
                if cost <= spare:
                    entries[index] = grown
                    spare -= cost
                    break
                # In proportion to what is too much, but less each time, so that this ends.
                keep = min(keep * max(spare, 0) // cost, keep - keep // 64 - 1)
            if entries[index] != entry:
                break
        return tuple(entries)

    def _cost(self, entry: MemoryEntry) -> int:
        if entry not in self._costs:
            self._costs[entry] = self._entry_tokens(entry)
        return self._costs[entry]

    def _entry_tokens(self, entry: MemoryEntry) -> int:
        return self._measure(Memory((entry,)))


def _shortened(entry: MemoryEntry, num_chars: int) -> MemoryEntry:
    if len(entry.result) <= _WHOLE:
        return entry
    return replace(entry, result=shorten(entry.result, num_chars))
