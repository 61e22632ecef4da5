"""InfoFlow (arXiv 2510.26575): reward what was found out on the way, so that groups without a right
answer teach something too.

R = R_final + w * (weight of the solved sub-goals), w = 0.3, then GRPO's statistics as in
`flow_grpo`. Rollouts that were given a hint have it easier: they are compared with all of their
group, or among themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from flowtrain.agents.hints import Hints
from flowtrain.agents.registry import AgentKind
from flowtrain.algorithms.advantages import EqualGroups, Mode
from flowtrain.algorithms.base import Algorithm
from flowtrain.algorithms.flow_grpo import flow_grpo
from flowtrain.tasks import sub_goals
from flowtrain.tasks.sets import TaskSet
from flowtrain.tools import Tool
from flowtrain.types import (
    FilterReason,
    Group,
    PolicyName,
    Sample,
    TrainBatch,
    Trajectory,
    UserError,
)

HintGroup = Literal["joint", "split", "split-weighted"]
"""With whom rollouts that read a hint are compared."""


class Infoflow(Algorithm):
    """InfoFlow: Flow-GRPO of a reward with sub-goals, and hints for rollouts that are stuck."""

    def advantages(self, groups: Sequence[Group]) -> TrainBatch:
        return infoflow(
            groups,
            sub_goal_weight=self.config.infoflow.sub_goal_weight,
            hint_group=self.config.infoflow.hint_group,
            mode=self.config.algorithm.mode,
            num_minibatches=self.config.train.num_minibatches,
            num_groups=self.config.rollout.num_questions,
            policy=self.config.train.policy,
            equal_groups=self.config.algorithm.equal_groups,
        )

    def hints(self, step: int) -> Hints | None:
        """Give fewer hints from step to step, and none after `infoflow.hint_until`."""
        options = self.config.infoflow
        last_step = max(options.hint_until * self.config.train.num_steps, 1)
        rate = options.hint_rate * max(0.0, 1 - (step - 1) / last_step)
        return Hints(rate, options.hint_turn, options.hint_patience) if rate > 0 else None

    def check_agent(self, kind: AgentKind) -> None:
        if not kind.takes_hints:
            raise UserError(
                "algorithm.name='infoflow' rewards sub-goals and gives hints between turns, which "
                f"agent.name={self.config.agent.name!r} does not take"
            )

    def check_inputs(self, tasks: TaskSet, tools: Mapping[str, Tool]) -> None:
        if not any(map(sub_goals.sought, tasks.train)):
            raise UserError(
                "algorithm.name='infoflow' needs tasks with sub_goals; none of the training tasks "
                "has any to find"
            )


def infoflow(
    groups: Sequence[Group],
    sub_goal_weight: float = 0.3,
    hint_group: HintGroup = "joint",
    mode: Mode = "paper",
    num_minibatches: int = 1,
    num_groups: int | None = None,
    policy: PolicyName = "planner",
    equal_groups: EqualGroups | None = None,
) -> TrainBatch:
    """Compute Flow-GRPO's advantages of R.

    Args:
        sub_goal_weight: w.
        hint_group: "joint" compares all rollouts of a question; "split" compares hinted rollouts
            with each other and the others with each other, as two groups of full weight;
            "split-weighted" does so too, but in mode "paper" each half weighs as its share of the
            rollouts, so that every rollout weighs as in "joint".
        mode, num_minibatches, num_groups, policy, equal_groups: as for `flow_grpo`.
    """
    num_groups = len(groups) if num_groups is None else num_groups
    samples: list[Sample] = []
    num_dropped, num_filtered = 0, Counter[FilterReason]()
    for group in map(partial(_rewarded, weight=sub_goal_weight), groups):
        for members in _by_hint(group) if hint_group != "joint" else [_all(group)]:
            part = replace(
                group, trajectories=tuple(group.trajectories[member] for member in members)
            )
            out = flow_grpo([part], mode, num_minibatches, num_groups, policy, equal_groups)
            keeps_sum = hint_group == "split-weighted" and mode == "paper"
            share = len(part.finished) / max(len(group.finished), 1) if keeps_sum else 1.0
            samples += [_in_whole_group(sample, members, share) for sample in out.samples]
            num_dropped += out.num_groups_dropped
            num_filtered.update(out.num_filtered)
    return TrainBatch(tuple(samples), num_dropped, num_filtered)


def _rewarded(group: Group, weight: float) -> Group:
    def rewarded(trajectory: Trajectory) -> Trajectory:
        if trajectory.error:
            return trajectory
        assert trajectory.reward is not None and trajectory.sub_goals is not None, "not scored"
        return replace(trajectory, reward=trajectory.reward + weight * trajectory.sub_goals)

    return replace(group, trajectories=tuple(map(rewarded, group.trajectories)))


def _by_hint(group: Group) -> list[list[int]]:
    """Split the members by whether they read a hint; an empty half is left out."""
    halves = [
        [n for n, t in enumerate(group.trajectories) if (t.hint_turn is not None) == hinted]
        for hinted in (False, True)
    ]
    return [half for half in halves if half]


def _all(group: Group) -> list[int]:
    return list(range(len(group.trajectories)))


def _in_whole_group(sample: Sample, members: Sequence[int], share: float) -> Sample:
    """Name a sample of a part of a group by its number in the whole group, and weigh it by the
    part's share.
    """
    assert sample.sample_id is not None
    member = members[sample.sample_id.trajectory]
    return replace(
        sample,
        sample_id=sample.sample_id._replace(trajectory=member),
        loss_weights=tuple(weight * share for weight in sample.loss_weights),
    )
