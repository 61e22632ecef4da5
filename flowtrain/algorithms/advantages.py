"""Parts that algorithms share: from rewards to advantages, from calls to samples."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Literal

from flowtrain.types import Call, Group, PolicyName, Sample, SampleId, Trajectory

EPS = 1e-6
"""Added to a standard deviation before it divides."""
Mode = Literal["paper", "released"]
"""How AgentFlow's objective averages: as the paper says, or as its code does."""
EqualGroups = Literal["drop", "keep"]
"""Whether groups of one reward are trained: their advantages are 0."""


def reward_of(trajectory: Trajectory) -> float:
    """Return the reward of a scored rollout."""
    assert trajectory.reward is not None, f"trajectory of task {trajectory.task.id} has no reward"
    return trajectory.reward


def are_equal(rewards: Sequence[float]) -> bool:
    """Tell whether there is no other reward than the first; NaN equals nothing."""
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


def make_sample(
    call: Call,
    sample_id: SampleId,
    *,
    advantages: tuple[float, ...],
    loss_weights: tuple[float, ...],
    minibatch: int = 0,
) -> Sample:
    """Make a sample of a call; `advantages` and `loss_weights` have one number per token."""
    return Sample(
        prompt_ids=call.prompt_ids,
        response_ids=call.response_ids,
        logprobs=call.logprobs,
        advantages=advantages,
        loss_weights=loss_weights,
        minibatch=minibatch,
        sample_id=sample_id,
        sampling_mask=call.sampling_mask,
    )


def broadcast(
    group: Group,
    advantages: Sequence[float],
    *,
    mode: Mode,
    minibatch: int,
    policy: PolicyName,
) -> tuple[list[Sample], int]:
    """Give every token of a rollout its advantage, and weigh it as `mode` averages.

    Mode "paper" averages over the rollouts of a group, then turns, then tokens; "released" over all
    tokens.

    Args:
        advantages: one per finished rollout of the group.
        minibatch: which optimizer step of the batch trains the group.
        policy: whose calls are trained, one per turn at most.

    Returns the samples, and the number of calls without tokens (the deadline struck first). What a
    rollout without any token would have weighed falls to the others.
    """
    samples = []
    num_empty = 0
    finished = [(n, each) for n, each in enumerate(group.trajectories) if not each.error]
    for (member, trajectory), advantage in zip(finished, advantages, strict=True):
        calls = trained_calls(trajectory, policy)
        made = [turn.calls.get(policy) for turn in trajectory.turns]
        num_empty += sum(call is not None for call in made) - len(calls)
        scale = 1.0 if mode == "released" else 1.0 / (len(finished) * max(len(calls), 1))
        for turn, call in calls:
            num_tokens = len(call.response_ids)
            weight = scale if mode == "released" else scale / num_tokens
            samples.append(
                make_sample(
                    call,
                    SampleId(group.index, member, turn),
                    advantages=(advantage,) * num_tokens,
                    loss_weights=(weight,) * num_tokens,
                    minibatch=minibatch,
                )
            )
    return samples, num_empty
