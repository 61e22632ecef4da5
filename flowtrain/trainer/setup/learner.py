"""The learning half of a run: sharded policy, optimizer, published versions and checkpoints. A
replay has only this half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flowkernels import LossSpec, TokenLossFn
from transformers import PreTrainedModel

from flowtrain.algorithms import Branches, filter_samples
from flowtrain.algorithms.advantages import whitened
from flowtrain.config import Config
from flowtrain.inference.factory import ModelSpec
from flowtrain.records import Group, Rollouts, TrainBatch, UserError
from flowtrain.trainer import checkpoint
from flowtrain.trainer.balance import balance
from flowtrain.trainer.checkpoint import Checkpoints
from flowtrain.trainer.cost import ForwardCost
from flowtrain.trainer.distillation import check_teacher
from flowtrain.trainer.lr_schedule import warmed_up
from flowtrain.trainer.minibatch_factor import MinibatchFactor
from flowtrain.trainer.minibatches import complete
from flowtrain.trainer.model import experts
from flowtrain.trainer.model.loading import load_model, published_weights
from flowtrain.trainer.model.lora import has_adapter
from flowtrain.trainer.optimizers import KINDS
from flowtrain.trainer.packing import PackedRow, pack
from flowtrain.trainer.setup.components import LearnerComponents
from flowtrain.trainer.sharding import ShardSpec, named_tensors, shard, skeleton
from flowtrain.trainer.trainer import OptimSpec, Trainer
from flowtrain.weights import Publisher, PublishOptions, WeightStore
from flowtrain.weights.format.files import writing_tensors
from flowtrain.weights.ranks import Ranks, SingleRank, on_all_ranks

Rows = Sequence[Sequence[PackedRow]]
"""Rows of a step, by mini-batch."""
State = Mapping[str, int | str]
"""The state for resuming, besides weights and moments."""

_OBSERVED = "observed"
"""Key of a checkpoint's state: what the algorithm has observed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """The learning half on a rank that only samples: prepares its samples, and waits while other
    ranks train. Methods are collective over all ranks.
    """

    components: LearnerComponents
    store: WeightStore

    @property
    def config(self) -> Config:
        return self.components.config

    def close(self) -> None:
        """Wait for a checkpoint in progress, and release the publisher."""

    # ---- the verbs of a step

    def branch(self, step: int, groups: Sequence[Group]) -> Branches:
        """Return the branch points of a step's rollouts."""
        return self.components.algorithm.branch(step, groups, None, self.components.tokenizer)

    def advantages(self, rollouts: Rollouts) -> TrainBatch:
        """Return the training samples of this rank's rollouts, with counts of excluded ones."""
        shape = self.components.model.config
        policy = self.components.config.train.policy
        groups = [group.of_policy(policy) for group in rollouts.groups]
        batch = self.components.algorithm.advantages(groups)
        routers = experts.sizes_of(self.components.model)
        # Before whitening, so that no sample that is left out moves the mean.
        batch = filter_samples(batch, shape.max_position_embeddings, shape.vocab_size, routers)
        batch = self.components.algorithm.for_teacher(batch, groups, self.components.tokenizer)
        if self.components.algorithm.whitens:
            batch = whitened(batch, self.components.world)
        self.components.algorithm.observe(groups, self.components.world)
        minibatch_options = self.config.train.num_minibatches, self.config.train.minibatch_size
        return complete(batch, *minibatch_options, rollouts.logprobs, self.components.world)

    def pack(self, batch: TrainBatch) -> Rows:
        """Return this rank's samples packed into token trees."""
        takers = self.components.placement.trainers.size
        return pack(batch.samples, batch.num_minibatches, takers)

    def balance(self, minibatches: Rows) -> Rows:
        """Return the rows that this rank trains, given the rows that it sampled."""
        cost = ForwardCost.of(self.components.model).flops
        num_trainers = self.components.placement.trainers.size
        return balance(minibatches, cost, self.components.world, num_takers=num_trainers)

    def old_logprobs(self, rows: Rows) -> Rows:
        """Return the rows with log-probs of the policy before its first step, with
        `train.rescore`.
        """
        return rows

    def ref_logprobs(self, rows: Rows) -> Rows:
        """Return the rows with the reference policy's log-probs, if the loss has a KL term."""
        return rows

    def train(self, step: int, rows: Rows) -> Mapping[str, float]:
        """Take one optimizer step per mini-batch of rows.

        Returns statistics over all training ranks; {} on other ranks.
        """
        return {}

    def publish(self, version: int) -> dict[str, float | str]:
        """Publish the policy's weights; done on every rank when it returns the metrics."""
        self.components.placement.wait()
        return {}

    # ---- the beginning and the end

    def resume(self, path: Path) -> None:
        """Load model and optimizer from a checkpoint of any number of ranks, and what the algorithm
        has observed.
        """
        if state := checkpoint.load_state(path).get(_OBSERVED):
            self.components.algorithm.restore(str(state))

    def republish(self, version: int) -> None:
        """Bring the store to `version`, where the run starts or resumes; later versions go."""
        self.components.placement.wait()

    def save(self, step: int, state: State, on_saved: Callable[[], None]) -> None:
        """Write the checkpoint of `step` with the `state` of the run, beside what comes next.

        `on_saved` is called by a thread of each rank that trains, once it is on the disk.
        """
        self.wait_for_checkpoint()

    def wait_for_checkpoint(self) -> None:
        """Wait until the newest checkpoint is on the disk, and raise what was raised there."""
        on_all_ranks(self.components.world, lambda: None, other_failed=UserError)

    def oldest_step(self) -> int:
        """Return the step of the oldest checkpoint, for the main rank to report; not collective."""
        return 0

    def has_failed(self) -> bool:
        """Return whether the newest checkpoint could not be written; not collective."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner(Follower):
    """The half that learns on a rank that trains."""

    trainer: Trainer
    publisher: Publisher
    checkpoints: Checkpoints

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors of a version, as shards; collective over the ranks that train."""
        return published_weights(self.components.model, self.config.lora.sync)

    def close(self) -> None:
        self.checkpoints.close()
        self.publisher.close()

    def branch(self, step: int, groups: Sequence[Group]) -> Branches:
        components = self.components
        found = components.algorithm.branch(step, groups, self.trainer, components.tokenizer)
        self._make_room()
        return found

    def old_logprobs(self, rows: Rows) -> Rows:
        return self.trainer.old_logprobs(rows)

    def ref_logprobs(self, rows: Rows) -> Rows:
        return self.trainer.ref_logprobs(rows)

    def train(self, step: int, rows: Rows) -> Mapping[str, float]:
        train = self.config.train
        self.trainer.set_lr(warmed_up(train.lr, step, train.warmup_steps))
        # Nodes may sample with older weights; here all tokens are of one version.
        version = None if self.config.samples_here else step - 1
        return self.trainer.optimize(rows, step, version)

    def publish(self, version: int) -> dict[str, float | str]:
        keep, replaced_s = self.config.weights.keep, 0.0
        if self.config.dataflow.url:  # whose nodes sample with older versions, and load snapshots
            dataflow = self.config.dataflow
            keep, replaced_s = max(keep, dataflow.max_staleness + 1), dataflow.wait_s
        with writing_tensors(self.store.root):
            metrics = self.publisher.publish(self.weights, version).metrics()
            self._on_main(lambda: self.store.collect_garbage(keep, replaced_s))
        self._make_room()
        self.components.placement.wait()
        return metrics

    def _make_room(self) -> None:
        """Give back what torch keeps of a GPU, which a vLLM that sleeps would else wake up to."""
        if self.config.vllm.sleep:
            torch.cuda.empty_cache()

    def resume(self, path: Path) -> None:
        Follower.resume(self, path)
        model, optimizer = self.components.model, self.trainer.optimizer
        checkpoint.restore(path, model, optimizer, self.components.placement.trainers)

    def republish(self, version: int) -> None:
        self._roll_back(version)
        if self.publisher.resume(self.weights, version):
            self.components.placement.wait()
        else:
            # The store has no such version, or other tensors under its number.
            self._roll_back(version - 1)
            self.publish(version)

    def _roll_back(self, version: int) -> None:
        with writing_tensors(self.store.root):
            self._on_main(lambda: self.store.rollback(version))

    def _on_main(self, action: Callable[[], object]) -> None:
        ranks = self.components.placement.trainers
        on_all_ranks(ranks, lambda: action() if ranks.is_main else None, other_failed=OSError)

    def save(self, step: int, state: State, on_saved: Callable[[], None]) -> None:
        self.wait_for_checkpoint()  # the one before; raises what that failed with
        if observed := self.components.algorithm.state():
            state = {**state, _OBSERVED: observed}
        self.checkpoints.save(
            step,
            self.components.model,
            self.components.tokenizer,
            self.trainer.optimizer,
            state,
            dtype=getattr(torch, self.config.model.dtype),
            on_saved=on_saved,
        )

    def wait_for_checkpoint(self) -> None:
        on_all_ranks(self.components.world, self.checkpoints.wait, other_failed=UserError)

    def oldest_step(self) -> int:
        return self.checkpoints.oldest_step

    def has_failed(self) -> bool:
        return self.checkpoints.has_failed


def make_learner(components: LearnerComponents, store: WeightStore, folder: Path) -> Follower:
    """Shard the model of `components` over the ranks that train; checkpoints go to `folder`."""
    ranks, algorithm = components.placement.trainers, components.algorithm
    if not ranks.is_member:
        components.model.to("meta")  # its memory is not needed here
        experts.equip(components.model)
        return Follower(components=components, store=store)
    trainer = make_trainer(
        components,
        loss=algorithm.loss_spec(),
        optim=optim_spec(components),
        needs_reference=algorithm.needs_reference,
        token_loss=algorithm.token_loss,
        factor=algorithm.minibatch_factor(),
    )
    return Learner(
        components=components,
        store=store,
        trainer=trainer,
        publisher=make_publisher(components, store, ranks),
        checkpoints=Checkpoints(folder, ranks, keep=components.config.checkpoint.keep),
    )


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
        distill=algorithm.distill_spec(),
    )


def make_trainer(
    components: LearnerComponents,
    *,
    loss: LossSpec,
    optim: OptimSpec,
    needs_reference: bool = False,
    token_loss: Callable[[LossSpec], LossSpec | TokenLossFn] = lambda spec: spec,
    factor: MinibatchFactor | None = None,
) -> Trainer:
    """Shard the model over the ranks that train.

    The reference policy is a frozen copy or another model, or the model itself with its adapter
    off.
    """
    config, ranks = components.config, components.placement.trainers
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
    other = _other_reference(components, dtype) if needs_reference else None
    if needs_reference and (other or not has_adapter(components.model)):
        source = other or components.model
        frozen = skeleton(source).requires_grad_(False).eval()
        # In the dtype of its passes, which read nothing more exact of it.
        offload = train.offload != "none"
        reference_spec = replace(spec, recompute=False, weight_dtype=dtype, offload=offload)
        # Before the policy is sharded, which gives its own weights away one by one.
        reference = shard(frozen, ranks, reference_spec, dict(named_tensors(source)))
    model = shard(components.model, ranks, spec)
    if needs_reference and reference is None:
        reference = model
    if optim.distill is not None:
        check_teacher(model, reference or model)
    temperature = config.sampling_of(train.policy).temperature
    return Trainer(
        model,
        ranks,
        loss,
        optim=optim,
        temperature=temperature,
        reference=reference,
        token_loss=token_loss,
        factor=factor,
        token_budget=train.row_budget,
    )


def _other_reference(components: LearnerComponents, dtype: torch.dtype) -> PreTrainedModel | None:
    """Load the model that the algorithm names as the reference: the main rank its weights;
    collective. Raises UserError where its tokens are not the policy's.
    """
    path, ranks = components.algorithm.reference_path, components.placement.trainers
    if not path:
        return None

    def load() -> PreTrainedModel:
        spec = ModelSpec.load("distill.teacher", path)
        if spec.tokenizer.get_vocab() != components.tokenizer.get_vocab():
            raise UserError(
                f"distill.teacher={path!r} has other tokens than "
                f"model.path={components.config.model.path!r}: both must have one vocabulary"
            )
        has_weights = ranks.is_main
        return load_model(path, dtype, key=spec.key) if has_weights else spec.without_weights()

    return on_all_ranks(ranks, load, other_failed=UserError)


def make_publisher(components: LearnerComponents, store: WeightStore, ranks: Ranks) -> Publisher:
    """Build the publisher of the ranks that train; it casts to the engines' dtype."""
    config = components.config
    options = PublishOptions(
        getattr(torch, config.model.dtype),
        config.weights.level,
        torch.get_num_threads(),
        config.train.offload != "none",
    )
    return Publisher(store, options, ranks)


def publish_start(components: LearnerComponents, store: WeightStore) -> None:
    """Publish the policy as it was loaded, as version 0: the main rank does; collective."""
    world = components.world

    def publish() -> None:
        if world.is_main:
            publisher = make_publisher(components, store, SingleRank())
            publisher.publish(published_weights(components.model, components.config.lora.sync), 0)
            publisher.close()

    with writing_tensors(store.root):
        on_all_ranks(world, publish)
