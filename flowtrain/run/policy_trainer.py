"""The half of a run that trains: the sharded policy with its optimizer, the versions that it
publishes, and its checkpoints. It lives on the ranks that train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flowkernels import LossSpec, TokenLossFn

from flowtrain.config import Config
from flowtrain.run.components import RunComponents
from flowtrain.training import checkpoint
from flowtrain.training.lora import has_adapter
from flowtrain.training.lr_schedule import learning_rate
from flowtrain.training.minibatch_factor import MinibatchFactor
from flowtrain.training.model import published_weights
from flowtrain.training.optimizers import KINDS
from flowtrain.training.sharding import ShardSpec, named_tensors, shard, skeleton
from flowtrain.training.token_scores import TokenScores
from flowtrain.training.trainer import OptimSpec, Trainer
from flowtrain.training.tree import PackedRow
from flowtrain.training.world import World
from flowtrain.utils.seeds import derive_seed
from flowtrain.weights import Publisher, PublishOptions, WeightStore
from flowtrain.weights.files import writing_tensors
from flowtrain.weights.ranks import Alone, Ranks, together


@dataclass(frozen=True, slots=True)
class PolicyTrainer:
    """The policy in training; all methods are collective over `ranks`."""

    components: RunComponents
    ranks: World
    store: WeightStore
    trainer: Trainer
    publisher: Publisher

    @classmethod
    def make(cls, components: RunComponents, ranks: World, store: WeightStore) -> PolicyTrainer:
        """Shard the model of `components` over the ranks that train."""
        algorithm = components.algorithm
        trainer = make_trainer(
            components,
            ranks,
            loss=algorithm.loss_spec(),
            optim=optim_spec(components),
            needs_reference=algorithm.needs_reference,
            token_loss=algorithm.token_loss,
            factor=algorithm.minibatch_factor(),
        )
        return cls(components, ranks, store, trainer, make_publisher(components, store, ranks))

    def train(
        self, step: int, minibatches: Sequence[Sequence[PackedRow]], scores: TokenScores
    ) -> dict[str, float]:
        """Take one optimizer step per mini-batch and return statistics of all ranks.

        `scores` collects the log-probs of the trained tokens.
        """
        t = self.components.config.train
        self.trainer.set_lr(learning_rate(t.lr, step, t.num_steps, t.warmup_steps, t.lr_schedule))
        if self.components.config.lora.dropout:  # a resumed run drops what it would have dropped
            seed = self.components.config.run.seed
            torch.manual_seed(derive_seed(seed, "dropout", step, self.ranks.rank))
        stats = self.trainer.step(minibatches, step, scores)
        if self.components.config.vllm.sleep:
            torch.cuda.empty_cache()  # or vLLM would wake up to a GPU that torch keeps for itself
        return stats

    def publish(self, version: int) -> dict[str, float | str]:
        """Publish the policy's weights and return the publish metrics."""
        with writing_tensors(self.store.root):
            published = self.publisher.publish(self._weights(), version)
            num_kept = num_versions_kept(self.components.config)
            together(
                self.ranks,
                lambda: self.store.collect_garbage(num_kept) if self.ranks.is_main else None,
                other_failed=OSError,
            )
        return published.metrics()

    def republish(self, version: int) -> dict[str, float | str]:
        """Bring the store to `version`, where the run starts or resumes; later versions go."""
        self._roll_back(version)
        if self.publisher.resume(self._weights(), version):
            return {}
        self._roll_back(version - 1)
        return self.publish(version)

    def _weights(self) -> dict[str, torch.Tensor]:
        return published_weights(self.components.model, self.components.config.lora.sync)

    def _roll_back(self, version: int) -> None:
        with writing_tensors(self.store.root):
            together(
                self.ranks,
                lambda: self.store.rollback(version) if self.ranks.is_main else None,
                other_failed=OSError,
            )

    def restore(self, path: Path) -> None:
        """Load model and optimizer from a checkpoint of any number of ranks."""
        checkpoint.restore(path, self.components.model, self.trainer.optimizer)

    def save(self, folder: Path, step: int, state: dict[str, int | str]) -> None:
        """Write the checkpoint of `step` with the `state` of the run."""
        with writing_tensors(folder):
            checkpoint.save(
                folder,
                step,
                self.components.model,
                tokenizer=self.components.tokenizer,
                optimizer=self.trainer.optimizer,
                state=state,
                world=self.ranks,
                keep=self.components.config.checkpoint.keep,
            )


def optim_spec(components: RunComponents) -> OptimSpec:
    """Describe the optimizer as `[train]` and the algorithm ask for it."""
    train, algorithm = components.config.train, components.algorithm
    return OptimSpec(
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        weight_decay=train.weight_decay,
        grad_clip=train.grad_clip,
        rescore=train.rescore and not algorithm.has_old_logprobs,
        m2po=components.config.algorithm.m2po,
        has_ref=algorithm.has_ref_logprobs,
    )


def make_trainer(
    components: RunComponents,
    ranks: World,
    *,
    loss: LossSpec,
    optim: OptimSpec,
    needs_reference: bool = False,
    token_loss: Callable[[LossSpec], LossSpec | TokenLossFn] = lambda spec: spec,
    factor: MinibatchFactor | None = None,
) -> Trainer:
    """Shard the model over the ranks that train.

    The reference policy is a frozen copy, or the model itself with its adapter off.
    """
    config = components.config
    train = config.train
    dtype = getattr(torch, config.model.dtype)
    optim = replace(optim, kind=train.optimizer)
    spec = ShardSpec(
        dtype,
        recompute=train.recompute,
        compile=train.compile,
        reshard=train.reshard,
        offload=train.offload == "all",
        attention=train.attention,
        weight_dtype=KINDS[optim.kind].weight_dtype,
        exact=train.exact,
    )
    reference = None
    if needs_reference and not has_adapter(components.model):
        frozen = skeleton(components.model).requires_grad_(False).eval()
        # In the dtype of its passes, which read nothing more exact of it.
        of_reference = replace(spec, recompute=False, weight_dtype=dtype, exact=False)
        if train.offload_reference:
            of_reference = replace(of_reference, offload=True)
        reference = shard(frozen, ranks, of_reference, dict(named_tensors(components.model)))
    model = shard(components.model, ranks, spec)
    if needs_reference and reference is None:
        reference = model
    _, temperature = config.sampling_of(train.policy)
    return Trainer(
        model,
        ranks,
        loss,
        optim=optim,
        temperature=temperature,
        reference=reference,
        token_loss=token_loss,
        factor=factor,
    )


def make_publisher(components: RunComponents, store: WeightStore, ranks: Ranks) -> Publisher:
    """Build the publisher of the ranks that train; it casts to the engines' dtype."""
    config = components.config
    dtype = getattr(torch, config.model.dtype)
    num_threads = torch.get_num_threads()
    weights = config.weights
    options = PublishOptions(dtype, weights.level, num_threads, weights.baseline == "cpu")
    return Publisher(store, options, ranks)


def publish_start(components: RunComponents, store: WeightStore) -> None:
    """Publish the policy as it was loaded, as version 0: the main rank does; collective."""
    world = components.world

    def publish() -> None:
        if world.is_main:
            publisher = make_publisher(components, store, Alone())
            publisher.publish(published_weights(components.model, components.config.lora.sync), 0)
            publisher.close()

    with writing_tensors(store.root):
        together(world, publish)


def num_versions_kept(config: Config) -> int:
    """Count the versions that stay in the store: with nodes, all that they may sample with."""
    if not config.dataflow.url:
        return config.weights.keep
    return max(config.weights.keep, config.dataflow.max_staleness + 1)
