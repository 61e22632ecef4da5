"""The half of a run that trains, on the ranks that do: the sharded policy and its optimizer, its
versions in the store, its checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flowtrain.config import Config
from flowtrain.run.components import RunComponents, saving
from flowtrain.run.recipe import loss_spec, optim_spec
from flowtrain.training import checkpoint
from flowtrain.training.lr_schedule import learning_rate
from flowtrain.training.model import named_weights
from flowtrain.training.trainer import Trainer
from flowtrain.training.tree import PackedRow
from flowtrain.training.world import World
from flowtrain.weights import Publisher, WeightStore


@dataclass(frozen=True, slots=True)
class PolicyTrainer:
    """All of its methods are collective over `ranks`."""

    components: RunComponents
    ranks: World
    store: WeightStore
    trainer: Trainer
    publisher: Publisher

    @classmethod
    def make(cls, components: RunComponents, ranks: World, store: WeightStore) -> PolicyTrainer:
        """Shards the model of `components`."""
        trainer = components.make_trainer(
            loss_spec(components.config), optim_spec(components.config), ranks
        )
        return cls(components, ranks, store, trainer, components.make_publisher(store, ranks))

    def train(self, step: int, minibatches: Sequence[Sequence[PackedRow]]) -> dict[str, float]:
        """One optimizer step per mini-batch. Returns statistics of all ranks."""
        t = self.components.config.train
        self.trainer.set_lr(learning_rate(t.lr, step, t.num_steps, t.warmup_steps, t.lr_schedule))
        stats = self.trainer.step(minibatches, step)
        if self.components.config.vllm.sleep:
            torch.cuda.empty_cache()  # or vLLM would wake up to a GPU that torch keeps for itself
        return stats

    def publish(self, version: int) -> dict[str, float | str]:
        """Put the policy's weights into the store. Returns what that was, for the log."""
        with saving(self.store.root):
            published = self.publisher.publish(named_weights(self.components.model), version)
            if self.ranks.is_main:
                self.store.collect_garbage(num_kept(self.components.config))
        return published.metrics()

    def republish(self, version: int) -> dict[str, float | str]:
        """Have the store at `version`, where the run starts or goes on: what was published later
        will be trained anew.
        """
        self._roll_back(version)
        if self.publisher.resume(named_weights(self.components.model), version):
            return {}
        self._roll_back(version - 1)
        return self.publish(version)

    def _roll_back(self, version: int) -> None:
        if self.ranks.is_main:
            self.store.rollback(version)
        self.ranks.barrier()

    def restore(self, place: Path) -> None:
        """From a checkpoint of any number of ranks."""
        checkpoint.restore(place, self.components.model, self.trainer.optimizer)

    def save(self, place: Path, step: int, state: dict[str, int | str]) -> None:
        """Write the checkpoint of `step`."""
        keep = self.components.config.checkpoint.keep
        with saving(place):
            checkpoint.save(
                place,
                step,
                self.components.model,
                self.components.tokenizer,
                self.trainer.optimizer,
                state,
                self.ranks,
                keep,
            )


def num_kept(config: Config) -> int:
    """Versions that stay in the store: with nodes, all that one may still sample with."""
    return (
        max(config.weights.keep, config.dataflow.max_staleness + 1)
        if config.dataflow.url
        else config.weights.keep
    )
