"""Flow-GRPO (AgentFlow, arXiv 2510.05592, section 3.2): one final reward, broadcast to every turn.

Two modes. "paper": the advantage is normalised over the G trajectories (population std) and the
objective averages over trajectories, then turns, then tokens. "released" follows AgentFlow's code:
statistics over all turn samples of the question (std with N - 1), and a mean over all tokens of the
mini-batch, so long answers and many-turn rollouts weigh more.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from flowtrain.algorithms.advantages import (
    EPS,
    Average,
    Credits,
    Mode,
    broadcast,
    normalise,
    reward_of,
    trained_calls,
)
from flowtrain.algorithms.base import Algorithm
from flowtrain.records import Group, PolicyName, UserError


class FlowGrpo(Algorithm):
    """Flow-GRPO: the defaults of every algorithm, and its advantages."""

    def check(self) -> None:
        super().check()
        options = self.config.algorithm
        if self.config.rollout.group_size == 1 and options.mode == "paper":
            raise UserError(
                "rollout.group_size=1 makes every advantage 0, because a rollout is compared only "
                "with itself; set at least 2"
            )
        if options.mode == "released" and options.turn_credit == "to_go":
            raise UserError(
                "algorithm.turn_credit='to_go' cannot be combined with algorithm.mode='released', "
                "whose statistics assume one reward for all turns"
            )

    @property
    def average(self) -> Average:
        return _AVERAGES[self.config.algorithm.mode]

    def credit(self, rewards: Sequence[float]) -> list[float]:
        return normalise(rewards)

    def token_credit(self, group: Group) -> Credits:
        if self.config.algorithm.mode == "paper":
            return super().token_credit(group)
        return broadcast(group, _over_turns(group, self.config.train.policy))


_AVERAGES: dict[Mode, Average] = {"paper": "rollout", "released": "token"}


def _over_turns(group: Group, policy: PolicyName) -> list[float]:
    """Compute (R - mean) / (std + 1e-6) of each trajectory, statistics over turn samples."""
    rewards = [reward_of(trajectory) for trajectory in group.finished]
    turn_rewards = [reward_of(t) for t in group.finished for _ in trained_calls(t, policy)]
    # A single sample has no spread: the released code then keeps the reward itself.
    mean, std = (fmean(turn_rewards), stdev(turn_rewards)) if len(turn_rewards) > 1 else (0.0, 1.0)
    return [(reward - mean) / (std + EPS) for reward in rewards]
