"""What training knows of single turns: log-probs that are computed before it, and what it made of
them for the log of rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from flowtrain.types import Group, PolicyName, Sample, SampleId, Trajectory, Turn, TurnTraining

Scored = tuple[tuple[float, ...], tuple[float, ...]]
"""Log-probs of a sample under the policy and under the reference, as `Sample` has them; () where
they are not known."""


def attach_logprobs(samples: Sequence[Sample], scored: Mapping[SampleId, Scored]) -> list[Sample]:
    """Return the samples with the log-probs that are known already."""
    if not scored:
        return list(samples)
    nothing: Scored = ((), ())
    known = [
        nothing if sample.sample_id is None else scored.get(sample.sample_id, nothing)
        for sample in samples
    ]
    return [
        replace(s, old_logprobs=old, ref_logprobs=ref)
        for s, (old, ref) in zip(samples, known, strict=True)
    ]


def with_training_stats(
    groups: Sequence[Group], samples: Sequence[Sample], policy: PolicyName = "planner"
) -> list[Group]:
    """Return the groups with `Call.training` of every turn in which `policy` was trained."""
    trained = {
        sample.sample_id: TurnTraining(fmean(sample.advantages), sample.minibatch)
        for sample in samples
    }

    def turn_of(turn: Turn, sample_id: SampleId) -> Turn:
        if sample_id not in trained:
            return turn
        call = replace(turn.calls[policy], training=trained[sample_id])
        return replace(turn, calls={**turn.calls, policy: call})

    def trajectory_of(trajectory: Trajectory, group: int, member: int) -> Trajectory:
        turns = tuple(
            turn_of(turn, SampleId(group, member, number))
            for number, turn in enumerate(trajectory.turns)
        )
        return replace(trajectory, turns=turns)

    return [
        replace(
            g,
            trajectories=tuple(trajectory_of(t, g.index, n) for n, t in enumerate(g.trajectories)),
        )
        for g in groups
    ]
