"""Shared parts of algorithms: from rewards to advantages, from calls to samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Literal

from flowtrain.records import (
    Call,
    FilterReason,
    Group,
    PolicyName,
    Sample,
    SampleId,
    TrainBatch,
    Trajectory,
)

if TYPE_CHECKING:
    from flowtrain.trainer.distributed import World

EPS = 1e-6
"""Added to a standard deviation before the division."""
Mode = Literal["paper", "released"]
"""The averages of AgentFlow's objective: as in the paper, or as in its released code."""
Average = Literal["rollout", "token", "constant"]
"""The items that an objective is a mean over. rollout: rollouts of a group, then turns, then tokens
(GRPO). token: all tokens of an update (DAPO). constant: rollouts, of the sum over their tokens
divided by a constant C (Dr.GRPO)."""
Credit = float | Sequence[float]
"""The advantage of a turn: one number, or one per token of its response."""
Credits = Sequence[Sequence[Credit] | None]
"""Credits of the turns of each finished rollout of a group; None excludes the rollout from
training."""


def reward_of(trajectory: Trajectory) -> float:
    """Return the reward of a scored rollout."""
    assert trajectory.reward is not None, f"trajectory of task {trajectory.task.id} has no reward"
    return trajectory.reward


def are_equal(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal; NaN equals nothing."""
    return all(reward == rewards[0] for reward in rewards)


def normalise(rewards: Sequence[float]) -> list[float]:
    """Compute (R - mean) / (std + 1e-6) with the population std; [] of none, 0 of equals."""
    if are_equal(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    std = pstdev(rewards)
    return [(reward - mean) / (std + EPS) for reward in rewards]


def trained_calls(trajectory: Trajectory, policy: PolicyName) -> list[tuple[int, Call]]:
    """Return the calls of a policy that have tokens, with the numbers of their turns."""
    calls = enumerate(turn.calls.get(policy) for turn in trajectory.turns)
    return [(turn, call) for turn, call in calls if call is not None and call.response_ids]


def make_batch(
    groups: Sequence[Group],
    credit: Callable[[Group], Credits],
    *,
    average: Average,
    drops_equals: bool,
    num_minibatches: int = 1,
    num_groups: int | None = None,
    policy: PolicyName = "planner",
    most_tokens: int = 1,
    leaves_out: Callable[[Trajectory], bool] = lambda trajectory: False,
) -> TrainBatch:
    """Return scored groups as a batch of samples with advantages and loss weights.

    Args:
        groups: this rank's groups; every trajectory that did not fail has a reward.
        credit: gives the advantages of a group.
        average: what the objective is a mean over.
        drops_equals: drop groups without a signal (equal rewards of all rollouts and turns, or all
            advantages 0), so that they do not affect the size of a step.
        num_minibatches: optimizer steps per batch. The index of a group alone decides its
            mini-batch, so the assignment does not depend on the number of ranks.
        num_groups: groups in the batch over all ranks; by default `len(groups)`.
        policy: the policy to train, with at most one call per turn.
        most_tokens: C, which average "constant" divides by.
        leaves_out: returns whether a finished rollout is excluded from training but still counts in
            the statistics of its group.

    A non-finite reward makes all advantages of its group non-finite. The weights are not divided by
    the size of the batch, because the trainer divides by their sum over all ranks, or by the sum of
    `Sample.divisor`.
    """
    num_groups = len(groups) if num_groups is None else num_groups
    samples: list[Sample] = []
    counts, tokens, num_dropped = Counter[FilterReason](), Counter[FilterReason](), 0
    for group in groups:
        rewards = [reward_of(trajectory) for trajectory in group.finished]
        if not rewards:  # which no `credit` is asked about
            num_dropped += 1
            continue
        is_finite = all(map(math.isfinite, rewards))
        credits = credit(group) if is_finite else broadcast(group, [math.nan] * len(rewards))
        if drops_equals and is_finite and not _has_signal(group, credits):
            num_dropped += 1
            continue
        minibatch = min(group.index * num_minibatches // num_groups, num_minibatches - 1)
        finished = [(n, t) for n, t in enumerate(group.trajectories) if not t.error]
        for (member, trajectory), turn_credits in zip(finished, credits, strict=True):
            if turn_credits is None:
                continue
            calls = trained_calls(trajectory, policy)
            num_calls = sum(turn.calls.get(policy) is not None for turn in trajectory.turns)
            counts[FilterReason.EMPTY] += num_calls - len(calls)
            if leaves_out(trajectory):
                counts[FilterReason.OVERLONG] += len(calls)
                tokens[FilterReason.OVERLONG] += trajectory.num_tokens(policy)
                continue
            for turn, call in calls:
                sizes = len(finished), len(calls), len(call.response_ids), most_tokens
                weight, divisor = _weight(average, *sizes)
                sample_id = SampleId(group.index, member, turn)
                sample = Sample.of(call, turn_credits[turn], weight, minibatch, sample_id, divisor)
                samples.append(sample)
    return TrainBatch(tuple(samples), num_dropped, counts, tokens)


def broadcast(group: Group, advantages: Sequence[float]) -> list[list[Credit]]:
    """Give every turn of a rollout its advantage."""
    return [
        [advantage] * len(trajectory.turns)
        for trajectory, advantage in zip(group.finished, advantages, strict=True)
    ]


def rewards_to_go(
    group: Group, credit: Callable[[Sequence[float]], Sequence[float]]
) -> list[list[Credit]]:
    """Give each turn `credit` of the reward less what earlier turns earned, among the rollouts of
    the group that have a turn of this number.
    """
    to_go = [_to_go(trajectory) for trajectory in group.finished]
    credits: list[list[Credit]] = [[] for _ in to_go]
    for turn in range(max(map(len, to_go))):
        members = [member for member, rewards in enumerate(to_go) if turn < len(rewards)]
        turn_advantages = credit([to_go[member][turn] for member in members])
        for member, advantage in zip(members, turn_advantages, strict=True):
            credits[member].append(advantage)
    return credits


def _to_go(trajectory: Trajectory) -> list[float]:
    earned = trajectory.turn_rewards or (0.0,) * len(trajectory.turns)
    earned_before = [0.0, *accumulate(earned)]
    return [reward_of(trajectory) - earned_before[turn] for turn in range(len(trajectory.turns))]


def whitened(batch: TrainBatch, world: World) -> TrainBatch:
    """Compute (A - mean) / (std + 1e-6) of all tokens of a batch, over all ranks; collective."""
    values = [a for sample in batch.samples for a in sample.advantages]
    num, total = world.sum([len(values), math.fsum(values)])
    mean = total / max(num, 1)
    # A second exchange, because the squares are around the mean of all ranks.
    (squares,) = world.sum([math.fsum((a - mean) ** 2 for a in values)])
    std = math.sqrt(squares / max(num, 1))
    samples = [
        replace(sample, advantages=tuple((a - mean) / (std + EPS) for a in sample.advantages))
        for sample in batch.samples
    ]
    return replace(batch, samples=tuple(samples))


def _weight(
    average: Average, num_rollouts: int, num_calls: int, num_tokens: int, most_tokens: int
) -> tuple[float, float | None]:
    """Return a token's loss weight, and what its sample adds to the divisor: None, its weights."""
    if average == "rollout":
        # What a rollout without any token would have weighed falls to the others.
        return 1.0 / (num_rollouts * num_calls) / num_tokens, None
    if average == "token":
        return 1.0, None
    return 1.0 / most_tokens, 1.0 / num_calls


def _has_signal(group: Group, credits: Credits) -> bool:
    """Return whether the rewards of rollouts or turns differ and any advantage is not 0."""
    if len({(rollout.reward, rollout.turn_rewards) for rollout in group.finished}) < 2:
        return False
    all_credits = [credit for turn_credits in credits for credit in turn_credits or ()]
    return any(credit if isinstance(credit, int | float) else any(credit) for credit in all_credits)
