"""InfoFlow (arXiv 2510.26575): reward intermediate findings, so that groups without a right answer
give a gradient too.

R = R_final + w * (weight of the solved sub-goals), w = 0.3, then Flow-GRPO's advantages of R.
Rollouts with a hint have an easier task, yet are compared with their whole group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flowtrain.agents.registry import AgentKind
from flowtrain.algorithms.advantages import reward_of
from flowtrain.algorithms.flow_grpo import FlowGrpo
from flowtrain.records import Group, TrainBatch, Trajectory, UserError
from flowtrain.tasks import sub_goals
from flowtrain.tasks.sets import TaskSet
from flowtrain.tasks.sub_goals import Hints
from flowtrain.tools import Tool


class Infoflow(FlowGrpo):
    """InfoFlow: Flow-GRPO of a reward with sub-goals, and hints for rollouts that are stuck."""

    def advantages(self, groups: Sequence[Group]) -> TrainBatch:
        weight = self.config.infoflow.sub_goal_weight
        return super().advantages([_rewarded(group, weight) for group in groups])

    def hints(self, step: int) -> Hints | None:
        """Return the hint rule of a step: the rate falls over the steps, to none after
        `infoflow.hint_until`.
        """
        options = self.config.infoflow
        last_step = max(options.hint_until * self.config.train.num_steps, 1)
        rate = options.hint_rate * max(0.0, 1 - (step - 1) / last_step)
        return Hints(rate, options.hint_turn, options.hint_patience) if rate > 0 else None

    def check_agent(self, kind: AgentKind) -> None:
        if self.config.infoflow.hint_rate > 0 and not kind.takes_hints:
            raise UserError(
                f"agent.name={self.config.agent.name!r} does not support hints between turns; "
                "infoflow.hint_rate = 0 keeps only the rewards for sub-goals"
            )

    def check_inputs(self, tasks: TaskSet, tools: Mapping[str, Tool]) -> None:
        if not any(map(sub_goals.sought, tasks.train)):
            raise UserError(
                "algorithm.name='infoflow' needs tasks with sub_goals, but no training task has any"
            )


def _rewarded(group: Group, weight: float) -> Group:
    def rewarded(trajectory: Trajectory) -> Trajectory:
        if trajectory.error:
            return trajectory
        assert trajectory.sub_goals is not None, "not scored"
        return replace(trajectory, reward=reward_of(trajectory) + weight * trajectory.sub_goals)

    return replace(group, trajectories=tuple(map(rewarded, group.trajectories)))
