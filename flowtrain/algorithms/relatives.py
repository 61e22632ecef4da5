"""Relatives of GRPO: another `credit`, another mean.

A_i is the advantage of rollout i of G of a question, R_i its reward. All have PPO's clip; none has
a KL term unless `algorithm.kl_coef` asks for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from flowtrain.algorithms.advantages import Average
from flowtrain.algorithms.base import Algorithm, Values
from flowtrain.algorithms.flow_grpo import FlowGrpo
from flowtrain.config import Algorithm as Options
from flowtrain.records import UserError


class _Relative(Algorithm):
    average: Average = "token"

    def check(self) -> None:
        super().check()
        options = self.config.algorithm
        if options.mode == "released":
            raise UserError(
                "algorithm.mode='released' is AgentFlow's code, and algorithm.name="
                f"{options.name!r} has averages of its own"
            )

    def defaults(self, chosen: Options) -> Values:
        return super().defaults(chosen) | {"kl_coef": 0.0}


class DrGrpo(_Relative):
    """Dr.GRPO (arXiv 2503.20783, section 3.2): A_i = R_i - mean(R), and a mean over rollouts of the
    sum over tokens, divided by a constant. So neither hard questions nor short answers weigh more.
    """

    average = "constant"

    def credit(self, rewards: Sequence[float]) -> list[float]:
        mean = fmean(rewards)
        return [reward - mean for reward in rewards]


class Dapo(_Relative):
    """DAPO (arXiv 2503.14476, eqs. 8 to 12): GRPO's A_i, a mean over all tokens, a higher upper
    clip, and further questions in place of those whose rollouts all have one reward.
    """

    credit = FlowGrpo.credit

    def defaults(self, chosen: Options) -> Values:
        values = {"clip_high": 0.28, "equal_groups": "drop"}
        if not self.config.dataflow.url:  # which has a rule for it
            values["dynamic_sampling"] = 9
        return super().defaults(chosen) | values


class Rloo(_Relative):
    """RLOO (arXiv 2402.14740, eq. 8): A_i = R_i - the mean of the other rewards of the group."""

    def credit(self, rewards: Sequence[float]) -> list[float]:
        num_others = max(len(rewards) - 1, 1)
        return [reward - (sum(rewards) - reward) / num_others for reward in rewards]


class ReinforcePlusPlus(_Relative):
    """REINFORCE++ (arXiv 2501.03262) with its baseline of several rollouts: A_i = R_i - mean(R),
    then (A - mean) / std over all tokens of the batch. With one rollout of a question there is no
    baseline.
    """

    whitens = True

    def credit(self, rewards: Sequence[float]) -> list[float]:
        mean = fmean(rewards) if len(rewards) > 1 else 0.0
        return [reward - mean for reward in rewards]
