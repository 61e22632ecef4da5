"""Flow-GRPO (AgentFlow, arXiv 2510.05592, section 3.2): one final reward, broadcast to every turn.

Two modes. "paper": the advantage is normalised over the G trajectories (population std) and the
objective averages over trajectories, then turns, then tokens. "released": what AgentFlow's code
does: statistics over all turn samples of the question (std with N - 1), and a mean over all tokens
of the mini-batch, so long answers and many-turn rollouts weigh more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from flowtrain.algorithms.advantages import (
    EPS,
    EqualGroups,
    Mode,
    are_equal,
    broadcast,
    normalise,
    reward_of,
    trained_calls,
)
from flowtrain.algorithms.base import Algorithm
from flowtrain.types import FilterReason, Group, PolicyName, Sample, TrainBatch, UserError


class FlowGrpo(Algorithm):
    """Flow-GRPO: the defaults of every algorithm, and its advantages."""

    def check(self) -> None:
        super().check()
        if self.config.rollout.group_size == 1 and self.config.algorithm.mode == "paper":
            raise UserError(
                "rollout.group_size=1 compares a rollout with itself, so that every advantage is "
                "0; it must be at least 2"
            )

    def advantages(self, groups: Sequence[Group]) -> TrainBatch:
        return flow_grpo(
            groups,
            mode=self.config.algorithm.mode,
            num_minibatches=self.config.train.num_minibatches,
            num_groups=self.config.rollout.num_questions,
            policy=self.config.train.policy,
            equal_groups=self.config.algorithm.equal_groups,
        )


def flow_grpo(
    groups: Sequence[Group],
    mode: Mode = "paper",
    num_minibatches: int = 1,
    num_groups: int | None = None,
    policy: PolicyName = "planner",
    equal_groups: EqualGroups | None = None,
) -> TrainBatch:
    """Compute advantages and loss weights of scored groups.

    Args:
        groups: this rank's groups, every trajectory with a reward but those that failed.
        mode: "paper" or "released".
        num_minibatches: optimizer steps per batch; a group belongs to one, decided by its index
            alone, so it is the same for any number of ranks.
        num_groups: groups in the batch over all ranks; by default `len(groups)`.
        policy: whose calls are trained, one per turn.
        equal_groups: "drop" or "keep" groups of one reward; by default "drop" in mode "paper", so
            that the size of a step does not depend on how many questions were too easy or too hard.

    The weights are not divided by the size of the batch: the trainer divides by their sum over all
    ranks, which is the number of kept groups in mode "paper" and of tokens in mode "released". A
    reward that is not finite spoils the advantages of its group.
    """
    num_groups = len(groups) if num_groups is None else num_groups
    drops_equals = (equal_groups or ("drop" if mode == "paper" else "keep")) == "drop"
    samples: list[Sample] = []
    num_dropped = num_empty = 0
    for group in groups:
        rewards = [reward_of(trajectory) for trajectory in group.finished]
        if not rewards or (drops_equals and are_equal(rewards)):
            num_dropped += 1
            continue
        found, empty = broadcast(
            group,
            _advantages(group, rewards, mode, policy),
            mode=mode,
            minibatch=group.index * num_minibatches // num_groups,
            policy=policy,
        )
        samples += found
        num_empty += empty
    return TrainBatch(tuple(samples), num_dropped, {FilterReason.EMPTY: num_empty})


def _advantages(
    group: Group, rewards: Sequence[float], mode: Mode, policy: PolicyName
) -> list[float]:
    """One per trajectory: (R - mean) / (std + 1e-6), over trajectories or over turn samples."""
    if not all(map(math.isfinite, rewards)):
        return [math.nan] * len(rewards)
    if mode == "paper":
        return normalise(rewards)
    per_turn = [
        reward
        for trajectory, reward in zip(group.finished, rewards, strict=True)
        for _ in trained_calls(trajectory, policy)
    ]
    # A single sample has no spread: the released code then keeps the reward itself.
    mean, std = (fmean(per_turn), stdev(per_turn)) if len(per_turn) > 1 else (0.0, 1.0)
    return [(reward - mean) / (std + EPS) for reward in rewards]
