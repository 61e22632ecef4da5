"""APPO (arXiv 2606.12384): branch where a choice mattered, and credit the choices that led to the
branch.

Of the M rollouts of a question N are roots; the others leave a root in the middle of a response
(`algorithms/branching.py` picks where, `Flow.run` rewinds). Only roots are trained. A token of a
root has two advantages: that of its rollout among the roots, and the mean of those of the branches
that share it, among the branches (dual groups, eq. 6). The future-aware factor of eqs. 7 and 8 is
part of the loss (`flowkernels.future`), because it hangs on the policy as it changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from flowtrain.types import FilterReason, Group, Sample, SampleId, TrainBatch, Trajectory

_EPS = 1e-6


def appo(
    groups: Sequence[Group],
    num_minibatches: int = 1,
    num_groups: int | None = None,
    trains_branches: bool = False,
) -> TrainBatch:
    """Per-token advantages of the roots of scored groups; every token weighs 1, so that the
    objective is the mean over tokens.

    Args:
        groups: this rank's groups, every trajectory with a reward but those that failed; roots
            first, then branches.
        num_minibatches, num_groups: as for `flow_grpo`.
        trains_branches: ARPO (arXiv 2507.19849) instead: one group of M, and branches are trained
            like roots.

    A group in which neither roots nor branches differ in reward carries no signal and is left out.
    Turns without tokens are counted.
    """
    num_groups = len(groups) if num_groups is None else num_groups
    samples: list[Sample] = []
    num_dropped = num_empty = 0
    for group in groups:
        minibatch = group.index * num_minibatches // num_groups
        credited = _everyone(group) if trains_branches else _roots(group)
        found = [sample for member in credited for sample in _samples(group, *member, minibatch)]
        has_signal = any(any(sample.advantages) for sample in found)
        num_dropped += not has_signal
        if has_signal:
            samples += found
            num_empty += sum(
                not turn.calls["planner"].response_ids
                for member, *_ in credited
                for turn in group.trajectories[member].turns
            )
    return TrainBatch(tuple(samples), num_dropped, {FilterReason.EMPTY: num_empty})


_Branches = tuple[tuple[int, int, float], ...]
"""(turn, token, advantage) of what left a rollout there; tokens before that are the branch's too.
"""


def _everyone(group: Group) -> list[tuple[int, float, _Branches]]:
    """(trajectory, advantage, its branches) of all of a group, none of which credits another."""
    members = [member for member, t in enumerate(group.trajectories) if not t.error]
    return [
        (member, advantage, ())
        for member, advantage in zip(members, _normalised(group.finished), strict=True)
    ]


def _roots(group: Group) -> list[tuple[int, float, _Branches]]:
    """The same of the roots, with what their branches found."""
    roots = [
        member for member, t in enumerate(group.trajectories) if t.branch is None and not t.error
    ]
    branches = [t for t in group.finished if t.branch is not None]
    left: dict[int, list[tuple[int, int, float]]] = {member: [] for member in roots}
    for branch, advantage in zip(branches, _normalised(branches), strict=True):
        assert branch.branch is not None
        left[branch.branch.parent].append((branch.branch.turn, branch.branch.token, advantage))
    advantages = _normalised([group.trajectories[member] for member in roots])
    return [
        (member, advantage, tuple(left[member]))
        for member, advantage in zip(roots, advantages, strict=True)
    ]


def _samples(
    group: Group, member: int, advantage: float, branches: _Branches, minibatch: int
) -> list[Sample]:
    """One per turn with tokens."""
    samples = []
    for index, turn in enumerate(group.trajectories[member].turns):
        call = turn.calls["planner"]
        num_tokens = len(call.response_ids)
        shared = [
            (num_tokens if at > index else min(token, num_tokens), a)
            for at, token, a in branches
            if at >= index
        ]
        advantages = tuple(
            advantage + _mean([a for end, a in shared if token < end])
            for token in range(num_tokens)
        )
        if num_tokens:
            samples.append(
                Sample(
                    prompt_ids=call.prompt_ids,
                    response_ids=call.response_ids,
                    logprobs=call.logprobs,
                    advantages=advantages,
                    loss_weights=(1.0,) * num_tokens,
                    minibatch=minibatch,
                    sample_id=SampleId(group.index, member, index),
                    sampling_mask=call.sampling_mask,
                )
            )
    return samples


def _mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0


def _normalised(trajectories: Sequence[Trajectory]) -> list[float]:
    """(R - mean) / (std + 1e-6), population std; [] of none."""
    rewards = [_reward(t) for t in trajectories]
    return [(reward - fmean(rewards)) / (pstdev(rewards) + _EPS) for reward in rewards]


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None, f"trajectory of task {trajectory.task.id} has no reward"
    return trajectory.reward
