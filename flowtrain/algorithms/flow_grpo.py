"""Flow-GRPO (AgentFlow, arXiv 2510.05592, section 3.2): one final reward, broadcast to every turn.

Two modes. "paper": the advantage is normalised over the G trajectories (population std) and the
objective averages over trajectories, then turns, then tokens. "released": what AgentFlow's code
does: statistics over all turn samples of the question (std with N - 1), and a mean over all tokens
of the mini-batch, so long answers and many-turn rollouts weigh more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev, stdev
from typing import Literal

from flowtrain.types import (
    Call,
    FilterReason,
    Group,
    PolicyName,
    Sample,
    SampleId,
    TrainBatch,
    Trajectory,
)

_EPS = 1e-6


def flow_grpo(
    groups: Sequence[Group],
    mode: Literal["paper", "released"] = "paper",
    num_minibatches: int = 1,
    num_groups: int | None = None,
    policy: PolicyName = "planner",
) -> TrainBatch:
    """TrainBatch and token weights of scored groups.

    Args:
        groups: this rank's groups, every trajectory with a reward but those that failed: a group is
            what has finished of it.
        mode: "paper" or "released".
        num_minibatches: optimizer steps per batch; a group belongs to one, decided by its index
            alone, so it is the same for any number of ranks.
        num_groups: groups in the batch over all ranks; by default `len(groups)`.
        policy: whose calls are trained, one per turn.

    The weights are not divided by the size of the batch: the trainer divides by their sum over all
    ranks, which is the number of kept groups in mode "paper" and of tokens in mode "released".
    Turns without tokens (the deadline struck first) are counted and not trained; what a trajectory
    without any would have weighed falls to the others. A reward that is not finite spoils the
    advantages of its group.
    """
    num_groups = len(groups) if num_groups is None else num_groups
    samples: list[Sample] = []
    num_dropped = num_empty = 0
    for group in groups:
        rewards = [_reward(trajectory) for trajectory in group.finished]
        if not rewards or (mode == "paper" and min(rewards) == max(rewards)):
            num_dropped += 1
            continue
        minibatch = group.index * num_minibatches // num_groups
        members = [
            member for member, trajectory in enumerate(group.trajectories) if not trajectory.error
        ]
        for member, trajectory, advantage in zip(
            members, group.finished, _advantages(group, rewards, mode, policy), strict=True
        ):
            calls = _trained_calls(trajectory, policy)
            num_empty += len(trajectory.turns) - len(calls)
            scale = 1.0 if mode == "released" else 1.0 / (len(rewards) * max(len(calls), 1))
            samples += [
                replace(
                    _sample(call, advantage, scale, mode, minibatch),
                    sample_id=SampleId(group.index, member, turn),
                )
                for turn, call in calls
            ]
    return TrainBatch(tuple(samples), num_dropped, {FilterReason.EMPTY: num_empty})


def _advantages(
    group: Group, rewards: Sequence[float], mode: str, policy: PolicyName
) -> list[float]:
    """One per trajectory: (R - mean) / (std + 1e-6), over trajectories or over turn samples."""
    if not all(map(math.isfinite, rewards)):
        return [math.nan] * len(rewards)
    if mode == "paper":
        mean, std = fmean(rewards), pstdev(rewards)
    else:
        per_turn = [
            r
            for t, r in zip(group.finished, rewards, strict=True)
            for _ in _trained_calls(t, policy)
        ]
        # A single sample has no spread: the released code then keeps the reward itself.
        mean, std = (fmean(per_turn), stdev(per_turn)) if len(per_turn) > 1 else (0.0, 1.0)
    return [(reward - mean) / (std + _EPS) for reward in rewards]


def _sample(call: Call, advantage: float, scale: float, mode: str, minibatch: int) -> Sample:
    num_tokens = len(call.response_ids)
    weight = scale if mode == "released" else scale / num_tokens
    advantages, weights = (advantage,) * num_tokens, (weight,) * num_tokens
    return Sample(
        call.prompt_ids,
        call.response_ids,
        call.logprobs,
        advantages,
        weights,
        minibatch,
        sampling_mask=call.sampling_mask,
    )


def _trained_calls(trajectory: Trajectory, policy: PolicyName) -> list[tuple[int, Call]]:
    """With the numbers of their turns."""
    calls = enumerate(turn.calls.get(policy) for turn in trajectory.turns)
    return [(turn, call) for turn, call in calls if call is not None and call.response_ids]


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None, f"trajectory of task {trajectory.task.id} has no reward"
    return trajectory.reward
