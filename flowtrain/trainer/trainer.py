"""The optimizer step: packed rows in, new weights and statistics out.

One global normaliser per mini-batch (the sum of all token weights over all ranks and micro-batches)
makes the gradient independent of how samples are spread over rows and ranks. A step whose loss or
gradient is not finite is skipped, by all ranks alike.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from flowkernels import (
    LogProbs,
    LossSpec,
    TokenLoss,
    TokenLossFn,
    correct_for_sampler,
    divergent_log_ratios,
    m2po_clip,
)
from torch import Tensor
from transformers import PreTrainedModel

from flowtrain.records import UserError
from flowtrain.trainer.cost import ForwardCost
from flowtrain.trainer.distillation import DistillSpec, Lesson, lessons
from flowtrain.trainer.distributed import World
from flowtrain.trainer.loss import (
    looks_at_sequences,
    loss_of_scores,
    part_of,
    read_row,
    row_loss,
)
from flowtrain.trainer.minibatch_factor import MinibatchFactor
from flowtrain.trainer.model.experts import RouteMetrics, replaying, routers
from flowtrain.trainer.model.lora import adapter_off
from flowtrain.trainer.optimizers import ShardOptimizer
from flowtrain.trainer.packing import PackedRow
from flowtrain.trainer.reading import RowReader
from flowtrain.trainer.sharding import disable_dropout, is_sharded_by_layer
from flowtrain.trainer.step_metrics import StepMetrics
from flowtrain.trainer.walk import Kind, OpenPath, Pass, schedule

_log = logging.getLogger(__name__)

MOST_SKIPPED = 3
"""Optimizer steps in a row that are skipped before the run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSpec:
    """AdamW and how often it steps."""

    lr: float
    kind: str = "adamw"
    """One of `optimizers.KINDS`."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    decay_all: bool = False
    """Norms and biases decay, too."""
    grad_clip: float = 1.0
    """Upper bound of the global gradient norm; 0 turns clipping off."""
    rescore: bool = False
    """Take ratios against log-probs that this trainer computes before the first step of a batch,
    not against the sampler's."""
    m2po: float | None = None
    """Largest mean square of the log-ratios that lead away from the old policy, over a mini-batch;
    None: the clip of the loss alone."""
    has_ref: bool = False
    """Samples come with the reference policy's log-probs, which spares the pass that a KL term asks
    for."""
    replays_routes: bool = True
    """Rows that have routes are read along them, by the policy and by the reference."""
    distill: DistillSpec | None = None
    """How the policy learns from a teacher's distributions; None: from none."""


class Trainer:
    """Owns the policy's master weights and optimizer; lends the frozen reference policy when the
    loss has a KL term.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        world: World,
        loss: LossSpec,
        optim: OptimSpec,
        *,
        temperature: float = 1.0,
        reference: PreTrainedModel | None = None,
        token_loss: Callable[[LossSpec], LossSpec | TokenLossFn] = lambda spec: spec,
        factor: MinibatchFactor | None = None,
        token_budget: int | None = None,
    ) -> None:
        """
        Args:
            reference: a frozen copy; the `model` itself: it is the reference with its adapter off.
            token_budget: a row of more tokens is walked, in passes of at most so many; None: every
                row is computed at once.
        """
        assert (loss.kl_coef > 0) <= (reference is not None), "a KL term needs a reference policy"
        teacher = optim.distill.teacher if optim.distill else ""
        assert teacher != "reference" or reference is not None, "it is the teacher"
        disable_dropout(model)
        self.model = model.train()
        self.optimizer = ShardOptimizer(
            model,
            world,
            kind=optim.kind,
            lr=optim.lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            decay_all=optim.decay_all,
        )
        self._world, self._loss, self._optim = world, loss, optim
        self._temperature = temperature
        self._reader = RowReader(world, token_budget, temperature, optim.replays_routes)
        self._reference = reference
        self._scores_reference = loss.kl_coef > 0 and not optim.has_ref
        self._num_skipped = 0
        self._wants_routes = optim.replays_routes and bool(routers(model))
        self._cost = ForwardCost.of(model)
        # Gradients that wait for the last row do so unsharded: 4 bytes per parameter on every rank.
        self._reduces_every_row = is_sharded_by_layer(model)
        self._token_loss_of = token_loss
        self._token_loss = token_loss(loss)
        self._factor = factor
        self._scores_minibatch = optim.m2po is not None or factor is not None

    @property
    def device(self) -> torch.device:
        return self._world.device

    @contextmanager
    def reference(self) -> Iterator[PreTrainedModel]:
        """Lend the reference policy for a block, in which the policy itself is not used."""
        assert self._reference is not None, "there is no reference policy"
        is_model = self._reference is self.model
        with adapter_off(self.model) if is_model else nullcontext():
            yield self._reference

    def set_lr(self, lr: float) -> None:
        self.optimizer.set_lr(lr)

    def old_logprobs(self, minibatches: Sequence[Sequence[PackedRow]]) -> list[list[PackedRow]]:
        """Score rows under the policy as it is, if ratios are taken against that and not against
        the sampler's log-probs; collective.
        """
        if not self._optim.rescore:
            return [list(rows) for rows in minibatches]
        return [
            [
                replace(row, old_logprob_T=old_T)
                for row, old_T in zip(rows, self._logprobs(self.model, rows), strict=True)
            ]
            for rows in minibatches
        ]

    def ref_logprobs(self, minibatches: Sequence[Sequence[PackedRow]]) -> list[list[PackedRow]]:
        """Score rows under the reference policy, if the loss has a KL term; collective."""
        if not self._scores_reference:
            return [list(rows) for rows in minibatches]
        with self.reference() as reference:
            return [
                [
                    replace(row, ref_logprob_T=ref_T)
                    for row, ref_T in zip(rows, self._logprobs(reference, rows), strict=True)
                ]
                for rows in minibatches
            ]

    def step(self, minibatches: Sequence[Sequence[PackedRow]], number: int = 0) -> dict[str, float]:
        """Score rows as the loss asks, and `optimize` on them; collective."""
        return self.optimize(self.ref_logprobs(self.old_logprobs(minibatches)), number)

    def optimize(
        self,
        minibatches: Sequence[Sequence[PackedRow]],
        number: int = 0,
        version: int | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step per mini-batch and return statistics of all ranks; collective.

        Args:
            minibatches: the rows that this rank trains, as `balance` returns them, with the
                log-probs of other policies that the loss asks for.
            number: of the training step, for messages.
            version: of the weights that the step begins with, if tokens of others are not compared
                with the sampler's.

        Raises UserError when MOST_SKIPPED optimizer steps in a row were skipped.
        """
        has_kl, routes = self._loss.kl_coef > 0, RouteMetrics(self.model)
        has_teacher = self._optim.distill is not None
        step_metrics = StepMetrics(has_kl, has_teacher, routes, version)
        num_scores = self._optim.rescore + self._scores_reference + self._scores_minibatch
        step_metrics.num_flops = self._cost.step_flops(minibatches, num_scores)
        has_stepped = False
        for rows in map(self._prepare, minibatches):
            (normaliser,) = self._world.sum([_weight(rows)])
            if normaliser == 0:  # no rank has a sample: an optimizer step would only move momentum
                continue
            token_loss = None
            found = self._scores_of(rows, has_stepped) if self._scores_minibatch else []
            has_stepped = True
            if self._optim.m2po is not None:
                trusted = self._within_region(rows, found, self._optim.m2po)
                step_metrics.ratio_bounds.append(1 + trusted.clip_high)
                token_loss = self._token_loss_of(trusted)
            if self._factor is not None:
                rows = self._factor.scale(rows, found, self._world)
            loss = self.forward_backward(rows, normaliser, step_metrics, token_loss=token_loss)
            step_metrics.close_step(self.optim_step(loss, number))
        return step_metrics.reduce(self._world, float(self.optimizer.param_groups[0]["lr"]))

    def forward_backward(
        self,
        rows: Sequence[PackedRow],
        normaliser: float,
        step_metrics: StepMetrics,
        *,
        token_loss: LossSpec | TokenLossFn | None = None,
    ) -> Tensor:
        """Accumulate the gradient of all rows and return this rank's part of the loss; collective.

        Each row is walked, and a pass is copied to the device when it is its turn; the passes of
        all ranks go side by side, because each is a collective.
        """
        # FSDP averages gradients over ranks where we want their sum.
        scale = self._world.size / normaliser
        walks = [self._reader.walk(row) for row in rows]
        steps = deque(step for walk in walks for step in walk)
        specs = deque(self._losses(rows, walks, token_loss or self._token_loss, scale))
        taught = deque(self._lessons(rows, walks))
        kinds, path, losses = schedule(steps, self._world), OpenPath(), []
        for index, learns in enumerate(kinds):
            if self._world.size > 1:
                reduces = self._reduces_every_row or index == len(kinds) - 1
                self.model.set_requires_gradient_sync(reduces)
            is_idle = not steps or steps[0].learns != learns
            step = self._reader.idle(learns) if is_idle else steps.popleft().to(self.device)
            of_step = OpenPath() if is_idle else path
            if not learns:
                trunk = step.trunk()
                of_step.begin(trunk)
                read_row(self.model, self._reader.followed(trunk.row), of_step)
                of_step.enter()
                continue
            left = of_step.leave() if step.kind is Kind.LEAVE else None
            of_step.begin(step)
            with replaying(self.model, self._reader.followed(step.row).routes_NLC):
                spec = (token_loss or self._token_loss) if is_idle else specs.popleft()
                lesson = None if is_idle else taught.popleft()
                how = scale, self._temperature, of_step, lesson
                out = row_loss(self.model, step.row, spec, *how)
                of_step.backward(out.loss, left)
            losses.append(out.loss.detach() / self._world.size)
            step_metrics.add(out.stats, losses[-1], out.logprob_T, None if is_idle else step.row)
            if step_metrics.routes is not None and not is_idle:
                step_metrics.routes.add(step.row, self._optim.replays_routes)
        return torch.stack(losses).sum()

    def _losses(
        self,
        rows: Sequence[PackedRow],
        walks: Sequence[Sequence[Pass]],
        spec: LossSpec | TokenLossFn,
        scale: float,
    ) -> list[LossSpec | TokenLossFn]:
        """Return the loss of each pass that learns; collective.

        One that looks at whole sequences is taken of a walked row's log-probs first, since its
        sequences may lie in several pieces.
        """
        whole: dict[int, TokenLoss] = {}
        walked = [index for index, walk in enumerate(walks) if len(walk) > 1]
        if looks_at_sequences(spec) and self._world.max([len(walked)])[0]:
            scores = self.score(self.model, [rows[index] for index in walked])
            for index, score in zip(walked, scores, strict=True):
                row = rows[index].to(self.device)
                whole[index] = loss_of_scores(row, score, spec, scale)
        return [
            part_of(whole[index], step.target_M) if index in whole else spec
            for index, walk in enumerate(walks)
            for step in walk
            if step.learns
        ]

    def _lessons(
        self, rows: Sequence[PackedRow], walks: Sequence[Sequence[Pass]]
    ) -> list[Lesson | None]:
        """Return what the teacher says of the targets of each pass that learns; collective."""
        spec = self._optim.distill
        if spec is None:
            return [None for walk in walks for step in walk if step.learns]
        own = self.model if spec.teacher == "policy" else None
        with self.reference() if spec.teacher == "reference" else nullcontext(own) as teacher:
            return lessons(spec, teacher, self._reader, rows, walks)

    def optim_step(self, loss: Tensor, number: int = 0) -> float | None:
        """Clip, step, clear. Returns the gradient norm before clipping.

        None where it is not finite, or the `loss` of any rank is not: then weights and moments stay
        as they are.
        """
        norm_0 = self.optimizer.grad_norm()
        # One wait for the device.
        own_loss, own_norm = torch.stack([loss.to(norm_0), norm_0]).tolist()
        whole_loss, square = self._world.sum([own_loss, own_norm**2])  # one decision on all ranks
        norm = math.sqrt(square)
        is_finite = math.isfinite(whole_loss) and math.isfinite(norm)
        if is_finite:
            self.optimizer.clip(norm, self._optim.grad_clip or math.inf)
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._num_skipped = 0 if is_finite else self._num_skipped + 1
        if not is_finite:
            self._report_skip(number, norm, whole_loss)
        return norm if is_finite else None

    def _report_skip(self, number: int, norm: float, loss: float) -> None:
        if self._num_skipped >= MOST_SKIPPED:
            raise UserError(
                f"step {number}: {self._num_skipped} optimizer steps in a row were skipped, the "
                f"last with a gradient norm of {norm} and "
                f"a loss of {loss}; weights are as before them. See how grad_norm, ratio_max and "
                "logprob_mismatch grew in metrics.jsonl; "
                f"a learning rate below {float(self.optimizer.param_groups[0]['lr']):g} may help, "
                "or model.dtype = 'float32'"
            )
        if self._world.is_main:
            _log.warning(
                "an optimizer step of step %d is skipped: its gradient norm is %s and its loss %s",
                number,
                norm,
                loss,
            )

    def score(self, model: PreTrainedModel, rows: Sequence[PackedRow]) -> list[LogProbs]:
        """Score every row's targets under `model`; collective, ranks may differ in rows."""
        return self._reader.score(model, rows)

    def _logprobs(self, model: PreTrainedModel, rows: Sequence[PackedRow]) -> list[Tensor]:
        """Return the log-probs [T] of rows under `model`, on the host as the rows; collective."""
        return [scores.logprob_T.cpu() for scores in self.score(model, rows)]

    def _scores_of(self, rows: Sequence[PackedRow], has_stepped: bool) -> list[Tensor]:
        """Return the log-probs [T] of rows under the current weights; collective."""
        if self._optim.rescore and not has_stepped:
            return [row.old_logprob_T for row in rows]  # they were scored with these weights
        return self._logprobs(self.model, rows)

    def _within_region(
        self, rows: Sequence[PackedRow], logprobs: Sequence[Tensor], threshold: float
    ) -> LossSpec:
        """The loss with M2PO's clip, which depends on all tokens of the mini-batch under the
        current weights, which the `logprobs` are of; collective.
        """
        ratios_of_rows = [
            divergent_log_ratios(logprob_T - r.old_logprob_T, r.advantage_T, r.loss_weight_T)
            for logprob_T, r in zip(logprobs, rows, strict=True)
        ]
        mine = torch.cat([torch.zeros(0), *ratios_of_rows]).double()
        every = b"".join(self._world.gather_bytes(mine.numpy().tobytes()))
        ratios = torch.from_numpy(np.frombuffer(every, np.float64).copy())
        return m2po_clip(self._loss, ratios, threshold)

    def _prepare(self, rows: Sequence[PackedRow]) -> list[PackedRow]:
        """Return the rows with the weights that their tokens have in the loss."""
        if self._wants_routes and any(row.routes_NLC is None for row in rows):
            self._wants_routes = False  # said once
            _log.warning("rows without routes of the sampler are routed by the policy itself")
        return [replace(row, loss_weight_T=self._kept_weights(row)) for row in rows]

    def _kept_weights(self, row: PackedRow) -> Tensor:
        """Tokens that masked importance sampling drops leave the normaliser too."""
        return correct_for_sampler(
            self._loss, row.advantage_T, row.loss_weight_T, row.old_logprob_T, row.sampler_logprob_T
        )[1]


def _weight(rows: Sequence[PackedRow]) -> float:
    """Sum what the loss of rows is divided by, in fp64."""
    parts = [row.loss_weight_T if row.divisor_S is None else row.divisor_S for row in rows]
    return sum(float(part.sum()) for part in parts)
