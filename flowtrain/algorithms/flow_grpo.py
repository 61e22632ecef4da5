"""Flow-GRPO (AgentFlow, arXiv 2510.05592, section 3.2): one final reward, broadcast to every turn.

Two modes. "paper": the advantage is normalised over the G trajectories (population std) and the
objective averages over trajectories, then turns, then tokens. "released": what AgentFlow's code
does: statistics over all turn samples of the question (std with N - 1), and a mean over all tokens
of the mini-batch, so long answers and many-turn rollouts weigh more.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from flowtrain.algorithms.advantages import (
    EPS,
    Average,
    Credit,
    EqualGroups,
    Mode,
    broadcast,
    make_batch,
    normalise,
    reward_of,
    trained_calls,
)
from flowtrain.algorithms.base import Algorithm
from flowtrain.types import Group, PolicyName, TrainBatch, UserError


class FlowGrpo(Algorithm):
    """Flow-GRPO: the defaults of every algorithm, and its advantages."""

    def check(self) -> None:
        super().check()
        if self.config.rollout.group_size == 1 and self.config.algorithm.mode == "paper":
            raise UserError(
                "rollout.group_size=1 compares a rollout with itself, so that every advantage is "
                "0; it must be at least 2"
            )

    @property
    def average(self) -> Average:
        return _AVERAGES[self.config.algorithm.mode]

    def credit(self, rewards: Sequence[float]) -> list[float]:
        return normalise(rewards)

    def token_credit(self, group: Group) -> Sequence[Sequence[Credit]]:
        if self.config.algorithm.mode == "paper":
            return super().token_credit(group)
        return broadcast(group, _over_turns(group, self.config.train.policy))


_AVERAGES: dict[Mode, Average] = {"paper": "rollout", "released": "token"}


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
        groups, num_minibatches, num_groups, policy: as for `make_batch`.
        mode: "paper" or "released".
        equal_groups: "drop" or "keep" groups of one reward; by default "drop" in mode "paper".

    The weights sum to the number of kept groups in mode "paper", and to that of tokens in mode
    "released".
    """

    def credit(group: Group) -> list[list[Credit]]:
        if mode == "released":
            return broadcast(group, _over_turns(group, policy))
        return broadcast(group, normalise([reward_of(each) for each in group.finished]))

    return make_batch(
        groups,
        credit,
        average=_AVERAGES[mode],
        drops_equals=(equal_groups or ("drop" if mode == "paper" else "keep")) == "drop",
        num_minibatches=num_minibatches,
        num_groups=num_groups,
        policy=policy,
    )


def _over_turns(group: Group, policy: PolicyName) -> list[float]:
    """Compute (R - mean) / (std + 1e-6) of each trajectory, statistics over turn samples."""
    rewards = [reward_of(trajectory) for trajectory in group.finished]
    per_turn = [
        reward
        for trajectory, reward in zip(group.finished, rewards, strict=True)
        for _ in trained_calls(trajectory, policy)
    ]
    # A single sample has no spread: the released code then keeps the reward itself.
    mean, std = (fmean(per_turn), stdev(per_turn)) if len(per_turn) > 1 else (0.0, 1.0)
    return [(reward - mean) / (std + EPS) for reward in rewards]
