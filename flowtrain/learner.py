"""The half of a run that trains, on the ranks that do: the sharded policy and its optimizer, its versions in the store, its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flowtrain.config import Config
from flowtrain.job import Job, saving
from flowtrain.recipe import loss_spec, optim_spec
from flowtrain.training import checkpoint
from flowtrain.training.model import named_weights
from flowtrain.training.trainer import Trainer
from flowtrain.training.tree import Row
from flowtrain.training.world import World
from flowtrain.weights import Publisher, WeightStore


@dataclass(frozen=True, slots=True)
class Learner:
    """All of its methods are collective over `ranks`."""

    job: Job
    ranks: World
    store: WeightStore
    trainer: Trainer
    publisher: Publisher

    @classmethod
    def make(cls, job: Job, ranks: World, store: WeightStore) -> Learner:
        """Shards the model of `job`."""
        trainer = job.make_trainer(loss_spec(job.config), optim_spec(job.config), ranks)
        return cls(job, ranks, store, trainer, job.make_publisher(store, ranks))

    def train(self, step: int, minibatches: Sequence[Sequence[Row]]) -> dict[str, float]:
        """One optimizer step per mini-batch. Returns statistics of all ranks."""
        stats = self.trainer.step(minibatches, step)
        if self.job.config.vllm.sleep:
            torch.cuda.empty_cache()  # or vLLM would wake up to a GPU that torch keeps for itself
        return stats

    def publish(self, version: int) -> dict[str, float | str]:
        """Put the policy's weights into the store. Returns what that was, for the log."""
        with saving(self.store.root):
            published = self.publisher.publish(named_weights(self.job.model), version)
            if self.ranks.is_main:
                self.store.collect_garbage(num_kept(self.job.config))
        return published.metrics()

    def republish(self, version: int) -> dict[str, float | str]:
        """Have the store at `version`, where the run starts or goes on: what was published later will be trained anew."""
        self._roll_back(version)
        if self.publisher.resume(named_weights(self.job.model), version):
            return {}
        self._roll_back(version - 1)
        return self.publish(version)

    def _roll_back(self, version: int) -> None:
        if self.ranks.is_main:
            self.store.rollback(version)
        self.ranks.barrier()

    def restore(self, place: Path) -> None:
        """From a checkpoint of any number of ranks."""
        checkpoint.restore(place, self.job.model, self.trainer.optimizer)

    def save(self, place: Path, step: int, state: dict[str, int | str]) -> None:
        """Write the checkpoint of `step`."""
        keep = self.job.config.checkpoint.keep
        with saving(place):
            checkpoint.save(place, step, self.job.model, self.job.tokenizer, self.trainer.optimizer, state, self.ranks, keep)


def num_kept(config: Config) -> int:
    """Versions that stay in the store: with nodes, all that one may still sample with."""
    return max(config.weights.keep, config.dataflow.max_staleness + 1) if config.dataflow.url else config.weights.keep
