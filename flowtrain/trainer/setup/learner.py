"""The half of a run that learns: the sharded policy with its optimizer, the versions that it
publishes, and its checkpoints. A replay has this half alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flowkernels import LossSpec, TokenLossFn

from flowtrain.algorithms import filter_samples
from flowtrain.algorithms.advantages import whitened
from flowtrain.config import Config
from flowtrain.records import Rollouts, TrainBatch, UserError
from flowtrain.trainer import checkpoint
from flowtrain.trainer.balance import balance
from flowtrain.trainer.checkpoint import Checkpoints
from flowtrain.trainer.cost import ForwardCost
from flowtrain.trainer.distributed import World
from flowtrain.trainer.lr_schedule import warmed_up
from flowtrain.trainer.minibatch_factor import MinibatchFactor
from flowtrain.trainer.minibatches import complete
from flowtrain.trainer.model import experts
from flowtrain.trainer.model.loading import published_weights
from flowtrain.trainer.model.lora import has_adapter
from flowtrain.trainer.optimizers import KINDS
from flowtrain.trainer.packing import PackedRow, pack
from flowtrain.trainer.setup.components import LearnerComponents
from flowtrain.trainer.setup.placement import Placement
from flowtrain.trainer.sharding import (
    ShardSpec,
    named_tensors,
    shard,
    skeleton,
)
from flowtrain.trainer.trainer import OptimSpec, Trainer
from flowtrain.weights import Publisher, PublishOptions, WeightStore
from flowtrain.weights.format.files import writing_tensors
from flowtrain.weights.ranks import Alone, Ranks, together

Rows = Sequence[Sequence[PackedRow]]
"""Rows of a step, by mini-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """The parts that learn. Methods are collective over all ranks."""

    components: LearnerComponents
    placement: Placement
    store: WeightStore
    trainer: Trainer | None
    """The trainer of the policy; None, as the two below, on a rank that only samples."""
    publisher: Publisher | None
    checkpoints: Checkpoints | None

    @classmethod
    def make(
        cls, components: LearnerComponents, placement: Placement, store: WeightStore, folder: Path
    ) -> Learner:
        """Shard the model of `components` over the ranks that train; checkpoints go to `folder`."""
        trainer = publisher = checkpoints = None
        ranks = placement.trainers
        if ranks.is_member:
            algorithm, keep = components.algorithm, components.config.checkpoint.keep
            trainer = make_trainer(
                components,
                ranks,
                loss=algorithm.loss_spec(),
                optim=optim_spec(components),
                needs_reference=algorithm.needs_reference,
                token_loss=algorithm.token_loss,
                factor=algorithm.minibatch_factor(),
            )
            publisher = make_publisher(components, store, ranks)
            checkpoints = Checkpoints(folder, ranks, keep=keep)
        else:
            components.model.to("meta")  # its memory is not needed here
            experts.equip(components.model)
        return cls(
            components=components,
            placement=placement,
            store=store,
            trainer=trainer,
            publisher=publisher,
            checkpoints=checkpoints,
        )

    @property
    def config(self) -> Config:
        return self.components.config

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors of a version, as shards; only on ranks that train, and collective there."""
        return published_weights(self.components.model, self.config.lora.sync)

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and free what the publisher holds."""
        if self.checkpoints is not None:
            self.checkpoints.close()
        if self.publisher is not None:
            self.publisher.close()

    # ---- the verbs of a step

    def advantages(self, rollouts: Rollouts) -> TrainBatch:
        """Turn this rank's rollouts into what is trained of them; what cannot be is counted."""
        shape = self.components.model.config
        policy = self.components.config.train.policy
        groups = [group.of_policy(policy) for group in rollouts.groups]
        batch = self.components.algorithm.advantages(groups)
        routers = experts.sizes_of(self.components.model)
        batch = filter_samples(batch, shape.max_position_embeddings, shape.vocab_size, routers)
        if self.components.algorithm.whitens:
            batch = whitened(batch, self.placement.world)
        sizes = self.config.train.num_minibatches, self.config.train.minibatch_size
        return complete(batch, *sizes, rollouts.logprobs, self.placement.world)

    def pack(self, batch: TrainBatch) -> Rows:
        """Lay the samples of this rank out in token trees."""
        budget = self.config.train.row_budget
        return pack(batch.samples, batch.num_minibatches, budget)

    def balance(self, minibatches: Rows) -> Rows:
        """Return the rows that this rank trains, given those that it sampled."""
        cost = ForwardCost.of(self.components.model).flops
        takers = self.placement.trainers.size
        return balance(minibatches, cost, self.placement.world, num_takers=takers)

    def old_logprobs(self, rows: Rows) -> Rows:
        """Have the policy score the rows before its first step, with `train.rescore`."""
        return rows if self.trainer is None else self.trainer.old_logprobs(rows)

    def ref_logprobs(self, rows: Rows) -> Rows:
        """Have the reference policy score the rows, where the loss has a KL term."""
        return rows if self.trainer is None else self.trainer.ref_logprobs(rows)

    def train(self, step: int, rows: Rows) -> Mapping[str, float]:
        """Take one optimizer step per mini-batch of rows.

        Returns statistics of all ranks that train; nothing on the others.
        """
        metrics: Mapping[str, float] = {}
        if self.trainer is not None:
            t = self.config.train
            self.trainer.set_lr(warmed_up(t.lr, step, t.warmup_steps))
            # Nodes may sample with older weights; here all tokens are of one version.
            version = None if self.config.samples_here else step - 1
            metrics = self.trainer.optimize(rows, step, version)
            if self.config.vllm.sleep:
                torch.cuda.empty_cache()  # or vLLM would wake up to a GPU that torch keeps
        return metrics

    def publish(self, version: int) -> dict[str, float | str]:
        """Publish the policy's weights; done on every rank when it returns the metrics."""
        metrics: dict[str, float | str] = {}
        if self.publisher is not None:
            ranks, keep = self.placement.trainers, versions_kept(self.config)
            with writing_tensors(self.store.root):
                metrics = self.publisher.publish(self.weights, version).metrics()
                together(
                    ranks,
                    lambda: self.store.collect_garbage(*keep) if ranks.is_main else None,
                    other_failed=OSError,
                )
        self.placement.wait()
        return metrics

    # ---- the beginning and the end

    def resume(self, path: Path) -> None:
        """Load model and optimizer from a checkpoint of any number of ranks."""
        if self.trainer is not None:
            model, optimizer = self.components.model, self.trainer.optimizer
            checkpoint.restore(path, model, optimizer, self.placement.trainers)

    def republish(self, version: int) -> None:
        """Bring the store to `version`, where the run starts or resumes; later versions go."""
        is_there = False
        if self.publisher is not None:
            self._roll_back(version)
            is_there = self.publisher.resume(self.weights, version)
            if not is_there:
                self._roll_back(version - 1)
        if self.publisher is not None and not is_there:
            self.publish(version)
        else:
            self.placement.wait()

    def _roll_back(self, version: int) -> None:
        ranks = self.placement.trainers
        with writing_tensors(self.store.root):
            together(
                ranks,
                lambda: self.store.rollback(version) if ranks.is_main else None,
                other_failed=OSError,
            )

    def save(
        self,
        step: int,
        state: Mapping[str, int | str],
        on_saved: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the checkpoint of `step` with the `state` of the run, beside what comes next.

        `on_saved` is called by a thread of each rank that trains, once it is on the disk.
        """
        self.wait_for_checkpoint()
        if self.checkpoints is not None and self.trainer is not None:
            components = self.components
            self.checkpoints.save(
                step,
                components.model,
                components.tokenizer,
                self.trainer.optimizer,
                state,
                dtype=getattr(torch, components.config.model.dtype),
                on_saved=on_saved,
            )

    def wait_for_checkpoint(self) -> None:
        """Wait until the newest checkpoint is on the disk, and raise what was raised there."""
        checkpoints = self.checkpoints
        wait = (lambda: None) if checkpoints is None else checkpoints.wait
        together(self.placement.world, wait, other_failed=UserError)


def optim_spec(components: LearnerComponents) -> OptimSpec:
    """Describe the optimizer as `[train]` and the algorithm ask for it."""
    train, algorithm = components.config.train, components.algorithm
    return OptimSpec(
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        weight_decay=train.weight_decay,
        decay_all=train.decay_all,
        grad_clip=train.grad_clip,
        rescore=train.rescore and not algorithm.has_old_logprobs,
        m2po=components.config.algorithm.m2po,
        has_ref=algorithm.has_ref_logprobs,
    )


def make_trainer(
    components: LearnerComponents,
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
        # An error of 1e-5 and not 0.01 nats, for an eighth more of the head's time there.
        fp32_logits=ranks.device.type == "cuda",
        fused=train.fused_layers,
    )
    reference = None
    if needs_reference and not has_adapter(components.model):
        frozen = skeleton(components.model).requires_grad_(False).eval()
        # In the dtype of its passes, which read nothing more exact of it.
        offload = train.offload != "none"
        of_reference = replace(spec, recompute=False, weight_dtype=dtype, offload=offload)
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


def make_publisher(components: LearnerComponents, store: WeightStore, ranks: Ranks) -> Publisher:
    """Build the publisher of the ranks that train; it casts to the engines' dtype."""
    config = components.config
    dtype = getattr(torch, config.model.dtype)
    num_threads = torch.get_num_threads()
    weights = config.weights
    on_host = config.train.offload != "none"
    options = PublishOptions(dtype, weights.level, num_threads, on_host)
    return Publisher(store, options, ranks)


def publish_start(components: LearnerComponents, store: WeightStore) -> None:
    """Publish the policy as it was loaded, as version 0: the main rank does; collective."""
    world = components.world

    def publish() -> None:
        if world.is_main:
            publisher = make_publisher(components, store, Alone())
            publisher.publish(published_weights(components.model, components.config.lora.sync), 0)
            publisher.close()

    with writing_tensors(store.root):
        together(world, publish)


def versions_kept(config: Config) -> tuple[int, float]:
    """Return how many versions stay in the store, with nodes all that they may sample with, and for
    how many seconds a replaced snapshot does, which a node may be loading.
    """
    if not config.dataflow.url:
        return config.weights.keep, 0.0
    return max(config.weights.keep, config.dataflow.max_staleness + 1), config.dataflow.wait_s
