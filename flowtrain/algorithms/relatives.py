"""Relatives of GRPO, which differ in `credit` and in the mean.

A_i is the advantage of rollout i of G of a question, R_i its reward. All have PPO's clip; none has
a KL term unless `algorithm.kl_coef` asks for one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from flowtrain.algorithms.advantages import Average, Credits, broadcast, reward_of
from flowtrain.algorithms.base import Algorithm, Values
from flowtrain.algorithms.flow_grpo import FlowGrpo
from flowtrain.config import Algorithm as Options
from flowtrain.config import Config
from flowtrain.records import Group, Task, UserError

if TYPE_CHECKING:
    from flowtrain.trainer.distributed import World


class _Relative(Algorithm):
    average: Average = "token"

    def check(self) -> None:
        super().check()
        options = self.config.algorithm
        if options.mode == "released":
            raise UserError(
                "algorithm.mode='released' stands for AgentFlow's averages, but "
                f"algorithm.name={options.name!r} defines its own"
            )

    def defaults(self, chosen: Options) -> Values:
        return super().defaults(chosen) | {"kl_coef": 0.0}


class DrGrpo(_Relative):
    """Dr.GRPO (arXiv 2503.20783, section 3.2): A_i = R_i - mean(R), and a mean over rollouts of the
    sum over tokens, divided by a constant. Neither hard questions nor short answers get a larger
    weight.
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


class Spo(_Relative):
    """SPO (arXiv 2509.13232): A_i = R_i - v, where v is a running mean of the question's rewards,
    then (A - mean) / std over all tokens of the batch. A single rollout per question suffices.

    v is a weighted mean of the question's earlier rewards, each weighing DECAY times its successor,
    and of the mean reward of all questions, which counts as one more reward.
    """

    DECAY = 0.9
    whitens = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._seen: dict[str, tuple[float, float]] = {}
        """Sum and number of the rewards of each question, decayed."""
        self._mean = 0.0
        """Of all of them."""

    def check(self) -> None:
        super().check()
        if self.config.algorithm.equal_groups == "drop":
            raise UserError(
                "algorithm.equal_groups='drop' would drop every question with a single rollout; "
                "algorithm.name='spo' requires 'keep'"
            )

    def value(self, task: Task) -> float:
        """Return the expected reward v of a question."""
        total, num = self._seen.get(task.id, (0.0, 0.0))
        return (total + self._mean) / (num + 1.0)

    def token_credit(self, group: Group) -> Credits:
        advantages = [reward_of(rollout) - self.value(rollout.task) for rollout in group.finished]
        return broadcast(group, advantages)

    def observe(self, groups: Sequence[Group], world: World) -> None:
        own = [(t.task.id, reward_of(t)) for group in groups for t in group.finished]
        for text in world.gather_text(json.dumps(own)):
            for task_id, reward in json.loads(text):
                total, num = self._seen.get(task_id, (0.0, 0.0))
                self._seen[task_id] = (self.DECAY * total + reward, self.DECAY * num + 1.0)
        self._set_mean()

    def state(self) -> str:
        return json.dumps(self._seen)

    def restore(self, state: str) -> None:
        self._seen = {name: (total, num) for name, (total, num) in json.loads(state).items()}
        self._set_mean()

    def _set_mean(self) -> None:
        num = sum(num for _, num in self._seen.values())
        self._mean = sum(total for total, _ in self._seen.values()) / num if num else 0.0


class ReinforcePlusPlus(_Relative):
    """REINFORCE++ (arXiv 2501.03262) with its baseline of several rollouts: A_i = R_i - mean(R),
    then (A - mean) / std over all tokens of the batch. With one rollout of a question there is no
    baseline.
    """

    whitens = True

    def credit(self, rewards: Sequence[float]) -> list[float]:
        mean = fmean(rewards) if len(rewards) > 1 else 0.0
        return [reward - mean for reward in rewards]
