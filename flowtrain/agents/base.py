"""The contract of agents, which produce rollouts of tasks.

`agent.name` selects the agent. Trainer, nodes and evaluations depend on this interface only.
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
    """Produces rollouts and keeps no state of one, so any number may run at once."""

    async def run(
        self, task: Task, seed: int, cutoff: Cutoff | None = None, start: BranchStart | None = None
    ) -> Trajectory:
        """Roll out one task and return its trajectory; the same task and seed give the same
        rollout.

        Every call in the trajectory holds the exact ids that a policy of the agent's context read
        and sampled. Training uses these ids; nothing is tokenized again.

        Args:
            cutoff: ends many rollouts at the same time; each of them then answers from its finished
                turns.
            start: makes the rollout a branch, which copies its parent up to this point. Only agents
                that can branch receive it.
        """

    def with_hints(self, hints: Hints | None) -> Agent:
        """Return an agent that gives hints by this rule; None disables hints."""

    def close(self) -> None:
        """Release the agent's resources; no rollout may follow. May be called twice."""


@dataclass(frozen=True, slots=True)
class AgentContext:
    """The parts of a run that an agent is built from."""

    config: Config
    policies: Mapping[PolicyName, Policy]
    """Trainable policies by name, in the order of the config."""
    tools: Mapping[str, Tool]
    """The tools of `agent.tools`, by name."""
    chats: Mapping[str, ChatEngine]
    """Frozen models by their role in `[roles]`."""
    max_turns: int
    """Turn limit per rollout, of training or of evaluation."""

    @property
    def first_policy(self) -> Policy:
        """Return the config's first policy, the only one of most agents."""
        return next(iter(self.policies.values()))
