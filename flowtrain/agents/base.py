"""The contract of an agent: how one rollout of a task goes.

`[agent] name` chooses one. The trainer, the nodes and the evaluations know no more than this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from flowtrain.agents.deadlines import Cutoff
from flowtrain.agents.policy import Policy
from flowtrain.config import Config
from flowtrain.inference.chat import ChatEngine
from flowtrain.records import BranchStart, PolicyName, Task, Trajectory
from flowtrain.tasks.sub_goals import Hints
from flowtrain.tools import Tool


class Agent(Protocol):
    """Makes rollouts; it holds no state of one, so any number run at once."""

    async def run(
        self, task: Task, seed: int, cutoff: Cutoff | None = None, start: BranchStart | None = None
    ) -> Trajectory:
        """Roll out one task; the same task and seed give the same rollout.

        Every call in the trajectory holds the ids that a policy of the agent's context read and
        sampled, as they were: those are trained, and nothing is encoded again.

        Args:
            cutoff: ends many rollouts together; each then answers from the turns that it has.
            start: the rollout is a branch, which takes over what its parent did before that point;
                given only where the agent can branch.
        """

    def with_hints(self, hints: Hints | None) -> Agent:
        """Return the agent that gives hints by this rule; None: it gives none."""

    def close(self) -> None:
        """Free what the agent holds; it makes no more rollouts. May be called twice."""


@dataclass(frozen=True, slots=True)
class AgentContext:
    """The parts that an agent is made from."""

    config: Config
    policies: Mapping[PolicyName, Policy]
    """Those that are trained or could be, by name, in the config's order."""
    tools: Mapping[str, Tool]
    """By name, those of `agent.tools`."""
    chats: Mapping[str, ChatEngine]
    """Frozen models, by the role that `[roles]` gives them."""
    max_turns: int
    """Turns of a rollout: those of training or of evaluation."""

    @property
    def first_policy(self) -> Policy:
        """Return the policy of agents that have no other."""
        return next(iter(self.policies.values()))
