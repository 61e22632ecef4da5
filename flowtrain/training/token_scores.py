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
from flowtrain.types import Group, PolicyName, Sample, Trajectory, Turn, TurnTraining

Origin = tuple[int, int, int]
"""(group index, trajectory, turn), as in `Sample.origin`."""


class TokenScores:
    """Log-probs [T] of the rows of one batch."""

    def __init__(self) -> None:
        self._rows: list[tuple[tuple[Origin | None, ...], Tensor, Tensor]] = []

    def add(self, row: PackedRow, logprob_T: Tensor) -> None:
        """`logprob_T` as the loss of the row took them."""
        if any(row.origins):
            # The loss does not read what has no weight, and gives 0 there.
            self._rows.append(
                (
                    row.origins,
                    row.cu_targets_S1,
                    torch.where(row.weight_T != 0, logprob_T, math.nan),
                )
            )

    def by_origin(self) -> dict[Origin, tuple[float, ...]]:
        """Log-probs by the turn that they belong to, one per response token; waits for the device."""
        if not self._rows:
            return {}
        logprobs = torch.cat([logprob_T for _, _, logprob_T in self._rows]).tolist()
        bounds = torch.cat([cu_targets_S1 for _, cu_targets_S1, _ in self._rows]).tolist()
        found: dict[Origin, tuple[float, ...]] = {}
        start = place = 0
        for origins, cu_targets_S1, logprob_T in self._rows:
            cuts = bounds[place : place + len(cu_targets_S1)]
            for origin, (first, last) in zip(origins, pairwise(cuts), strict=True):
                if origin is not None:
                    found[origin] = tuple(logprobs[start + first : start + last])
            start, place = start + len(logprob_T), place + len(cuts)
        return found


Scored = tuple[tuple[float, ...], tuple[float, ...]]
"""Log-probs of a sample under the policy and under the reference, as `Sample` has them; () for what
is not known."""


def attach_logprobs(samples: Sequence[Sample], scored: Mapping[Origin, Scored]) -> list[Sample]:
    """The samples with what is known of them already."""
    if not scored:
        return list(samples)
    nothing: Scored = ((), ())
    known = [
        nothing if sample.origin is None else scored.get(sample.origin, nothing)
        for sample in samples
    ]
    return [
        replace(s, old_logprobs=old, ref_logprobs=ref)
        for s, (old, ref) in zip(samples, known, strict=True)
    ]


def with_training_stats(
    groups: Sequence[Group],
    samples: Sequence[Sample],
    logprobs: Mapping[Origin, tuple[float, ...]],
    policy: PolicyName = "planner",
) -> list[Group]:
    """The groups with `training` of every turn in which `policy` was trained; the verifier's stands
    in its call.
    """
    trained = {
        sample.origin: TurnTraining(
            fmean(sample.advantages), sample.minibatch, logprobs[sample.origin]
        )
        for sample in samples
        if sample.origin is not None and sample.origin in logprobs
    }

    def turn_of(turn: Turn, origin: Origin) -> Turn:
        if origin not in trained:
            return turn
        if policy == "planner":
            return replace(turn, training=trained[origin])
        assert turn.verifier_call is not None, "what was trained was sampled"
        return replace(turn, verifier_call=replace(turn.verifier_call, training=trained[origin]))

    def trajectory_of(trajectory: Trajectory, group: int, member: int) -> Trajectory:
        turns = tuple(
            turn_of(turn, (group, member, number)) for number, turn in enumerate(trajectory.turns)
        )
        return replace(trajectory, turns=turns)

    return [
        replace(
            g,
            trajectories=tuple(trajectory_of(t, g.index, n) for n, t in enumerate(g.trajectories)),
        )
        for g in groups
    ]
