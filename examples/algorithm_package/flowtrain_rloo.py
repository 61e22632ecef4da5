"""RLOO (arXiv 2402.14740) as an algorithm of another package: a rollout's baseline is the mean
reward of the others of its group.
"""

from collections.abc import Sequence

from flowtrain.algorithms import Algorithm
from flowtrain.algorithms.advantages import broadcast, reward_of
from flowtrain.config import Section
from flowtrain.types import Group, Sample, TrainBatch


class Options(Section):
    max_advantage: float = 10.0
    """advantages are clipped to this size"""


class Rloo(Algorithm):
    options_type = Options  # algorithm.options = {max_advantage = 1.0}

    def advantages(self, groups: Sequence[Group]) -> TrainBatch:
        train, num_groups = self.config.train, self.config.rollout.num_questions
        samples: list[Sample] = []
        for group in groups:
            found, _ = broadcast(
                group,
                self.baselined([reward_of(each) for each in group.finished]),
                mode="released",
                minibatch=group.index * train.num_minibatches // num_groups,
                policy=train.policy,
            )
            samples += found
        return TrainBatch(tuple(samples))

    def baselined(self, rewards: Sequence[float]) -> list[float]:
        most, num_others = self.options.max_advantage, max(len(rewards) - 1, 1)
        advantages = [reward - (sum(rewards) - reward) / num_others for reward in rewards]
        return [max(-most, min(most, advantage)) for advantage in advantages]
