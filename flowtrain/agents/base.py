"""The contract of an agent: how one rollout of a task goes.

`[agent] name` chooses one. The trainer, the nodes and the evaluations know no more than this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flowtrain.agents.deadlines import Cutoff
from flowtrain.agents.hints import Hints
from flowtrain.types import BranchPoint, Task, Trajectory


@dataclass(frozen=True, slots=True)
class BranchStart:
    """The point within a finished rollout at which a branch begins."""

    parent: Trajectory
    point: BranchPoint


class Agent(Protocol):
    """Makes rollouts; it holds no state of one, so any number run at once."""

    async def run(
        self, task: Task, seed: int, cutoff: Cutoff | None = None, start: BranchStart | None = None
    ) -> Trajectory:
        """Roll out one task; the same task and seed give the same rollout.

        Args:
            cutoff: ends many rollouts together; each then answers from the turns that it has.
            start: the rollout is a branch, which takes over what its parent did before that point.
        """

    def with_hints(self, hints: Hints | None) -> Agent:
        """Return the agent that gives hints by this rule; None: it gives none."""
