"""InfoFlow (arXiv 2510.26575): reward what was found out on the way, so that groups without a right
answer teach something too.

R = R_final + w * (weight of the solved sub-goals), w = 0.3, then GRPO's statistics as in
`flow_grpo`. Rollouts that were given a hint have it easier: they are compared with all of their
group, or among themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from flowtrain.algorithms.flow_grpo import flow_grpo
from flowtrain.types import FilterReason, Group, PolicyName, Sample, TrainBatch, Trajectory


def infoflow(
    groups: Sequence[Group],
    sub_goal_weight: float = 0.3,
    splits_hinted: bool = False,
    mode: Literal["paper", "released"] = "paper",
    num_minibatches: int = 1,
    num_groups: int | None = None,
    policy: PolicyName = "planner",
) -> TrainBatch:
    """`flow_grpo` of R.

    Args:
        sub_goal_weight: w.
        splits_hinted: compare hinted rollouts of a question with each other and the others with
            each other, as two groups.
        The others: as for `flow_grpo`.
    """
    num_groups = len(groups) if num_groups is None else num_groups
    samples: list[Sample] = []
    num_dropped, num_filtered = 0, Counter[FilterReason]()
    for group in map(partial(_rewarded, weight=sub_goal_weight), groups):
        for members in _by_hint(group) if splits_hinted else [range(len(group.trajectories))]:
            part = replace(
                group, trajectories=tuple(group.trajectories[member] for member in members)
            )
            out = flow_grpo([part], mode, num_minibatches, num_groups, policy)
            samples += [_placed(sample, members) for sample in out.samples]
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
    """Who read no hint, and who did; without an empty half."""
    halves = [
        [n for n, t in enumerate(group.trajectories) if (t.hint_turn is not None) == hinted]
        for hinted in (False, True)
    ]
    return [half for half in halves if half]


def _placed(sample: Sample, members: Sequence[int]) -> Sample:
    """The sample of a part of a group, told by its place in the whole."""
    assert sample.sample_id is not None
    member = members[sample.sample_id.trajectory]
    return replace(sample, sample_id=sample.sample_id._replace(trajectory=member))
