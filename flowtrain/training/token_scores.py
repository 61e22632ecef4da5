"""The trainer's own log-probs of the tokens that it trained, for the log of rollouts.

The loss has them anyway. They stay on the device during the step and come to the host in one copy
afterwards, and only when asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import torch
from torch import Tensor

from flowtrain.training.tree import PackedRow
from flowtrain.types import Group, PolicyName, Sample, SampleId, Trajectory, Turn, TurnTraining


class TokenScores:
    """Log-probs [T] of the rows of one batch."""

    def __init__(self) -> None:
        self._rows: list[tuple[tuple[SampleId, ...], Tensor, Tensor]] = []

    def add(self, row: PackedRow, logprob_T: Tensor) -> None:
        """`logprob_T` as the loss of the row took them."""
        if row.sample_ids:
            # The loss does not read what has no weight, and gives 0 there.
            self._rows.append(
                (
                    row.sample_ids,
                    row.cu_targets_S1,
                    torch.where(row.loss_weight_T != 0, logprob_T, math.nan),
                )
            )

    def by_sample(self) -> dict[SampleId, tuple[float, ...]]:
        """Log-probs of each sample, one per response token; waits for the device."""
        if not self._rows:
            return {}
        logprobs = torch.cat([logprob_T for _, _, logprob_T in self._rows]).tolist()
        bounds = torch.cat([cu_targets_S1 for _, cu_targets_S1, _ in self._rows]).tolist()
        found: dict[SampleId, tuple[float, ...]] = {}
        start = place = 0
        for sample_ids, cu_targets_S1, logprob_T in self._rows:
            cuts = bounds[place : place + len(cu_targets_S1)]
            for sample_id, (first, last) in zip(sample_ids, pairwise(cuts), strict=True):
                found[sample_id] = tuple(logprobs[start + first : start + last])
            start, place = start + len(logprob_T), place + len(cuts)
        return found


Scored = tuple[tuple[float, ...], tuple[float, ...]]
"""Log-probs of a sample under the policy and under the reference, as `Sample` has them; () for what
is not known."""


def attach_logprobs(samples: Sequence[Sample], scored: Mapping[SampleId, Scored]) -> list[Sample]:
    """The samples with what is known of them already."""
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
    groups: Sequence[Group],
    samples: Sequence[Sample],
    logprobs: Mapping[SampleId, tuple[float, ...]],
    policy: PolicyName = "planner",
) -> list[Group]:
    """The groups with `Call.training` of every turn in which `policy` was trained."""
    trained = {
        sample.sample_id: TurnTraining(
            fmean(sample.advantages), sample.minibatch, logprobs[sample.sample_id]
        )
        for sample in samples
        if sample.sample_id is not None and sample.sample_id in logprobs
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
