"""The half of a run that learns: from the rollouts of a step to new weights. It needs no engine, no
agent and no service, so a replay (`flowtrain.replay`) has this half alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowtrain.algorithms import Algorithm
from flowtrain.config import Config
from flowtrain.run.components import RunComponents
from flowtrain.run.placement import Placement
from flowtrain.run.policy_trainer import PolicyTrainer
from flowtrain.run.records import Trained
from flowtrain.training.balance import balance, return_logprobs
from flowtrain.training.cost import ForwardCost
from flowtrain.training.minibatches import split_by_size
from flowtrain.training.token_scores import TokenScores
from flowtrain.training.trainer import Trainer
from flowtrain.training.tree import PackedRow
from flowtrain.types import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """The parts that learn. Methods are collective over all ranks."""

    config: Config
    components: RunComponents
    algorithm: Algorithm
    placement: Placement
    policy_trainer: PolicyTrainer | None
    """None on a rank that only samples."""

    @property
    def trainer(self) -> Trainer | None:
        """The trainer of the policy; None on a rank that only samples."""
        return None if self.policy_trainer is None else self.policy_trainer.trainer

    @property
    def max_positions(self) -> int:
        """Tokens of a sample that the model has positions for."""
        return int(self.components.model.config.max_position_embeddings)

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return int(self.components.model.config.vocab_size)

    def minibatches(self, batch: TrainBatch) -> tuple[TrainBatch, int]:
        """Return the batch with every sample's optimizer step, and how many steps there are."""
        train = self.config.train
        if not train.minibatch_size:
            return batch, train.num_minibatches
        return split_by_size(batch, train.minibatch_size, self.placement.world)

    def train(self, step: int, minibatches: Sequence[Sequence[PackedRow]]) -> Trained:
        """Take one optimizer step per mini-batch."""
        world = self.placement.world
        cost = ForwardCost.of(self.components.model).flops
        rows = balance(minibatches, cost, world, num_takers=self.placement.trainers.size)
        metrics: dict[str, float] = {}
        scores = TokenScores()
        if self.policy_trainer is not None:
            metrics = self.policy_trainer.train(step, rows, scores)
        sample_ids = [each for part in minibatches for row in part for each in row.sample_ids]
        return Trained(metrics, return_logprobs(scores.by_sample(), sample_ids, world))
