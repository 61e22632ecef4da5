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
    """Makes rollouts; keeps no state of a rollout, so any number may run at once."""

    async def run(
        self, task: Task, seed: int, cutoff: Cutoff | None = None, start: BranchStart | None = None
    ) -> Trajectory:
        """Roll out one task; the same task and seed give the same rollout.

        Every call in the trajectory holds the exact ids that a policy of the agent's context read
        and sampled. Training uses these ids; nothing is tokenized again.

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
    """Policies that are or could be trained, by name, in the config's order."""
    tools: Mapping[str, Tool]
    """The tools of `agent.tools`, by name."""
    chats: Mapping[str, ChatEngine]
    """Frozen models, by the role that `[roles]` gives them."""
    max_turns: int
    """Limit of a rollout's turns, in training or in evaluation."""

    @property
    def first_policy(self) -> Policy:
        """Return the config's first policy, the only one of most agents."""
        return next(iter(self.policies.values()))
