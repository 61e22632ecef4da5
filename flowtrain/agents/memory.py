"""The memory of one rollout: an explicit, deterministic record, M^{t+1} = f_mem(M^t, a^t, e^t, v^t).

As in AgentFlow's released code an entry has four fields; the planner's context and justification and the verifier's text are not kept.
A memory is made anew for every rollout and never shared, so no task can see another's.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class MemoryEntry:
    """One turn. Example:

    MemoryEntry("Search", "area of Chad", 'execution = tool.execute(query="area of Chad")', "The area of Chad is 1284.")
    """

    tool_name: str
    sub_goal: str
    command: str
    result: str
    """Output of the tool, or "Error: ..."."""

    @property
    def is_error(self) -> bool:
        return self.result.startswith("Error: ")


@dataclass(frozen=True, slots=True)
class Memory:
    """All turns so far, oldest first. Immutable: `add` gives a new one."""

    entries: tuple[MemoryEntry, ...] = field(default=())

    def add(self, entry: MemoryEntry) -> Memory:
        return Memory((*self.entries, entry))

    def as_dict(self) -> dict[str, dict[str, str]]:
        """AgentFlow's form: {"Action Step 1": {"tool_name", "sub_goal", "command", "result"}}."""
        return {
            f"Action Step {number}": {"tool_name": e.tool_name, "sub_goal": e.sub_goal, "command": e.command, "result": e.result}
            for number, e in enumerate(self.entries, 1)
        }
