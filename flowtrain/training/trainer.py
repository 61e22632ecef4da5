"""The optimizer step: packed rows in, new weights and statistics out.

One global normaliser per mini-batch (the sum of all token weights over all ranks and micro-batches) makes the gradient independent of how
samples are spread over rows and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from flowkernels import (
    FutureRatio,
    LogProbs,
    LossSpec,
    PolicyLoss,
    TokenLossFn,
    correct_for_sampler,
    future_aware,
    leaving,
    linear_logprobs,
    linear_policy_loss,
    logprobs,
    policy_loss,
    within_second_moment,
)
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from flowtrain.training.balance import balance, give_back
from flowtrain.training.cost import ForwardCost
from flowtrain.training.head import forward, run_head, task_head
from flowtrain.training.model import is_sharded_by_layer
from flowtrain.training.scores import Origin, TokenScores
from flowtrain.training.tree import Row, empty_row, pack_rows, packing_order
from flowtrain.training.world import World
from flowtrain.types import Sample


@dataclass(frozen=True, slots=True)
class OptimSpec:
    """AdamW and how often it steps."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    """Upper bound of the global gradient norm; 0 turns clipping off."""
    rescore: bool = False
    """Take ratios against log-probs that this trainer computes before the first step of a batch, not against the sampler's."""
    m2po: float | None = None
    """Largest mean square of the log-ratios that lead away from the old policy, over a mini-batch; None: the clip of the loss alone."""


@dataclass(frozen=True, slots=True)
class ResponseScores:
    """fp32 [T] each: what the policy says of generated tokens."""

    logprob_T: Tensor
    entropy_T: Tensor
    old_logprob_T: Tensor
    """Of the sampler, or of the reference policy."""


class Trainer:
    """Owns the policy's master weights and optimizer; holds the frozen reference policy when the loss has a KL term."""

    def __init__(
        self,
        model: PreTrainedModel,
        world: World,
        loss: LossSpec,
        optim: OptimSpec,
        temperature: float = 1.0,
        reference: PreTrainedModel | None = None,
        future: FutureRatio | None = None,
    ) -> None:
        assert (loss.kl_coef > 0) <= (reference is not None), "a KL term needs a reference policy"
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True)
        self._world, self._loss, self._optim = world, loss, optim
        self._temperature = temperature
        self._reference = reference
        self._scores, self._origins = TokenScores(), list[Origin]()
        self._cost = ForwardCost.of(model)
        # Gradients that wait for the last row wait unsharded: 4 bytes per parameter on every rank.
        self._reduces_every_row = is_sharded_by_layer(model)
        self._future = future
        self._token_loss = self._aware_of_future(loss)

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self, minibatches: Sequence[Sequence[Row]]) -> dict[str, float]:
        """One optimizer step per mini-batch; collective. Each rank gives its rows, trains a share of all and gets statistics of all."""
        totals, self._scores = Totals(), TokenScores()
        self._origins = [origin for rows in minibatches for row in rows for origin in row.origins if origin is not None]
        totals.num_flops = self._needed_flops(minibatches)
        prepared = [self._prepare(balance(rows, self._cost.flops, self._world)) for rows in minibatches]
        for rows in prepared:
            (normaliser,), (num_rows,) = self._world.reduce([sum(float(row.weight_T.sum()) for row in rows)], [len(rows)])
            if normaliser == 0:  # no rank has a sample: an optimizer step would only move momentum
                continue
            if self._optim.m2po is not None:
                trusted = self._within_region(rows, self._optim.m2po)
                totals.ratio_bounds.append(1 + trusted.clip_high)
                self._token_loss = self._aware_of_future(trusted)
            self.forward_backward(rows, normaliser, totals, int(num_rows))
            totals.grad_norms.append(self.optim_step())
        return totals.reduce(self._world, self.optimizer.param_groups[0]["lr"])

    def own_scores(self) -> dict[Origin, tuple[float, ...]]:
        """The log-probs of the last step's tokens, of the turns that this rank gave; collective, and waits for the device."""
        return give_back(self._scores.by_origin(), self._origins, self._world)

    def forward_backward(self, rows: Sequence[Row], normaliser: float, totals: Totals, num_rows: int | None = None) -> None:
        """Accumulate the gradient of all rows; every rank runs `num_rows`, the most that any has, because each is a collective."""
        num_rows = len(rows) if num_rows is None else num_rows
        # FSDP averages gradients over ranks where we want their sum.
        scale = self._world.size / normaliser
        for index in range(num_rows):
            if self._world.size > 1:
                self.model.set_requires_gradient_sync(self._reduces_every_row or index == num_rows - 1)
            row = rows[index] if index < len(rows) else empty_row().to(self._world.device)
            out = row_loss(self.model, row, self._token_loss, scale, self._temperature)
            out.loss.backward()
            self._scores.add(row, out.logprob_T)
            totals.add(out.stats, out.loss.detach() / self._world.size, _mismatch(out.logprob_T, row), row)

    def optim_step(self) -> float:
        """Clip, step, clear. Returns the gradient norm before clipping."""
        limit = self._optim.grad_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @torch.no_grad()
    def score(self, model: PreTrainedModel, rows: Sequence[Row]) -> list[LogProbs]:
        """Of every row's targets under `model`; collective, rows may differ in number."""
        num_rows = int(self._world.max([len(rows)])[0])
        padded = [*rows, *[empty_row().to(self._world.device)] * (num_rows - len(rows))]
        scores = [score_row(model, row, self._temperature) for row in padded]
        return scores[: len(rows)]

    def score_samples(self, samples: Sequence[Sample], token_budget: int, against_reference: bool) -> ResponseScores:
        """The policy's view of all response tokens, in the order of the samples; collective."""
        rows = [row.to(self._world.device) for row in pack_rows(samples, token_budget)]
        scores = self.score(self.model, rows)
        old = [row.sampler_logprob_T for row in rows]
        if against_reference:
            assert self._reference is not None, "there is no reference policy"
            old = [score.logprob_T for score in self.score(self._reference, rows)]

        def in_order(parts: list[Tensor]) -> Tensor:
            if not parts:
                return torch.zeros(0, device=self._world.device)
            order = packing_order(samples)
            of_samples = torch.cat(parts).split([len(samples[index].response_ids) for index in order])
            return torch.cat([part for _, part in sorted(zip(order, of_samples, strict=True), key=lambda pair: pair[0])])

        return ResponseScores(in_order([s.logprob_T for s in scores]), in_order([s.entropy_T for s in scores]), in_order(old))

    def _aware_of_future(self, spec: LossSpec) -> LossSpec | TokenLossFn:
        return spec if self._future is None else future_aware(spec, self._future)

    def _within_region(self, rows: Sequence[Row], threshold: float) -> LossSpec:
        """The loss with M2PO's clip, which hangs on all tokens of the mini-batch under the weights of now; collective."""
        scores = self.score(self.model, rows)
        found = [leaving(s.logprob_T - r.old_logprob_T, r.advantage_T, r.weight_T) for s, r in zip(scores, rows, strict=True)]
        mine = torch.cat([torch.zeros(0, device=self._world.device), *found]).cpu().numpy().tobytes()
        every = np.frombuffer(b"".join(self._world.gather_bytes(mine)), np.float32)
        return within_second_moment(self._loss, torch.from_numpy(every.copy()), threshold)

    def _needed_flops(self, minibatches: Sequence[Sequence[Row]]) -> float:
        """Of forward and backward pass and of the scores that the loss asks for; what is computed anew to spare memory is not needed."""
        num_passes = 3 + self._optim.rescore + (self._loss.kl_coef > 0) + (self._optim.m2po is not None)
        return num_passes * sum(self._cost.flops(row) for rows in minibatches for row in rows)

    def _prepare(self, rows: Sequence[Row]) -> list[Row]:
        """The rows on the device, with the log-probs of other policies that the loss asks for."""
        rows = [row.to(self._world.device) for row in rows]
        if self._optim.rescore:
            rows = [replace(row, old_logprob_T=old.logprob_T) for row, old in zip(rows, self.score(self.model, rows), strict=True)]
        if self._loss.kl_coef > 0:
            assert self._reference is not None
            rows = [replace(row, ref_logprob_T=ref.logprob_T) for row, ref in zip(rows, self.score(self._reference, rows), strict=True)]
        return [replace(row, weight_T=self._kept_weights(row)) for row in rows]

    def _kept_weights(self, row: Row) -> Tensor:
        """Tokens that masked importance sampling drops leave the normaliser too."""
        return correct_for_sampler(self._loss, row.advantage_T, row.weight_T, row.old_logprob_T, row.sampler_logprob_T)[1]


def forward_rows(model: PreTrainedModel, row: Row) -> Tensor:
    """Logits [T, V] of the row's targets; the head runs on the target rows alone."""
    return forward(model, row).squeeze(0)  # a view whose backward pass, unlike that of [0], copies nothing


def score_row(model: PreTrainedModel, row: Row, temperature: float) -> LogProbs:
    """Log-probs, entropies [T] of the row's targets, among what each was sampled from."""
    head = task_head(model)
    if head is None:
        return logprobs(forward_rows(model, row), row.target_ids_T, temperature=temperature, kept=row.kept)
    found: list[LogProbs] = []

    def task(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        found.append(linear_logprobs(hidden_TD, weight_VD, row.target_ids_T, bias_V=bias_V, temperature=temperature, kept=row.kept))
        return found[0].logprob_T

    # The log-probs as the model returns them: FSDP has put its hooks there.
    logprob_T = run_head(model, head, row, task)
    return replace(found[0], logprob_T=logprob_T)


def row_loss(model: PreTrainedModel, row: Row, spec: LossSpec | TokenLossFn, scale: float, temperature: float) -> PolicyLoss:
    """The loss of a row with its weights times `scale`; logits exist a chunk at a time where the model's head allows."""
    tokens: dict[str, Any] = {
        "spec": spec,
        "advantage_T": row.advantage_T,
        "weight_T": row.weight_T * scale,
        "old_logprob_T": row.old_logprob_T,
        "ref_logprob_T": row.ref_logprob_T,
        "sampler_logprob_T": row.sampler_logprob_T,
        "cu_seqlens_S1": row.cu_targets_S1,
        "temperature": temperature,
        "kept": row.kept,
    }
    head = task_head(model)
    if head is None:
        return policy_loss(forward_rows(model, row), row.target_ids_T, inplace=True, **tokens)
    found: list[PolicyLoss] = []

    def task(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        found.append(linear_policy_loss(hidden_TD, weight_VD, row.target_ids_T, bias_V=bias_V, **tokens))
        return found[0].loss

    # The loss as the model returns it: FSDP has put its hooks there.
    loss = run_head(model, head, row, task)
    return replace(found[0], loss=loss)


def _mismatch(logprob_T: Tensor, row: Row) -> Tensor:
    """Sum over trained tokens of |trainer - sampler|; before the first optimizer step of a batch it is the engines' disagreement."""
    return torch.where(row.weight_T != 0, (logprob_T - row.sampler_logprob_T).abs(), 0.0).sum()


class Totals:
    """Statistics of one batch, summed on the device and brought to the host once."""

    def __init__(self) -> None:
        self.grad_norms: list[float] = []
        self.ratio_bounds: list[float] = []
        self._stats: list[dict[str, Tensor]] = []
        self._num_packed = self._num_unshared = self._num_rows = 0
        self.num_flops = 0.0

    def add(self, stats: dict[str, Tensor], loss: Tensor, mismatch: Tensor, row: Row) -> None:
        is_first_step = not self.grad_norms
        first = {"first_tokens_sum": stats["num_tokens_sum"], "first_mismatch_sum": mismatch}
        zeros = {name: torch.zeros_like(value) for name, value in first.items()}
        self._stats.append({**stats, "loss_sum": loss, **(first if is_first_step else zeros)})
        self._num_packed += len(row.input_ids_N)
        self._num_unshared += row.num_unshared_tokens
        self._num_rows += 1

    def reduce(self, world: World, lr: float) -> dict[str, float]:
        sums, maxima = self._to_host()
        names = sorted(sums)
        counts = [self._num_packed, self._num_unshared, self._num_rows, self.num_flops]
        (num_packed, num_unshared, num_rows, num_flops, *summed), (ratio_max, negative_ratio_min) = world.reduce(
            [*counts, *(sums[n] for n in names)], maxima
        )
        totals = dict(zip(names, summed, strict=True))
        has_tokens = totals["num_tokens_sum"] > 0
        num_steps, num_tokens = max(len(self.grad_norms), 1), max(totals["num_tokens_sum"], 1)
        return {
            "num_tokens": totals["num_tokens_sum"],
            "num_packed_tokens": num_packed,
            "num_rows": num_rows,
            "train_tflop": num_flops / 1e12,
            "shared_token_share": 1 - num_packed / num_unshared if num_unshared else 0.0,
            "num_optim_steps": len(self.grad_norms),
            "loss": totals["loss_sum"] / num_steps,
            "grad_norm": sum(self.grad_norms) / num_steps,
            "lr": lr,
            "kl": totals["kl_sum"] / num_tokens,
            "entropy": totals["entropy_sum"] / num_tokens,
            "clip_fraction": (totals["clipped_low_sum"] + totals["clipped_high_sum"]) / num_tokens,
            "clip_fraction_low": totals["clipped_low_sum"] / num_tokens,
            "clip_fraction_high": totals["clipped_high_sum"] / num_tokens,
            "ratio_mean": totals["ratio_sum"] / num_tokens if has_tokens else 1.0,
            "ratio_max": ratio_max if has_tokens else 1.0,
            "ratio_min": -negative_ratio_min if has_tokens else 1.0,
            "logprob_mismatch": totals["first_mismatch_sum"] / max(totals["first_tokens_sum"], 1),
            **({"ratio_bound": sum(self.ratio_bounds) / len(self.ratio_bounds)} if self.ratio_bounds else {}),
        }

    def _to_host(self) -> tuple[dict[str, float], tuple[float, float]]:
        """Sums by name, and (maximum ratio, -minimum ratio); every rank has the same names, also without a row."""
        names = [*_SUMS, "ratio_max", "ratio_min"]
        if not self._stats:
            return dict.fromkeys(_SUMS, 0.0), (-math.inf, -math.inf)
        table = torch.stack([torch.stack([stats[name].double() for name in names]) for stats in self._stats]).cpu()
        sums = dict(zip(_SUMS, table[:, :-2].sum(0).tolist(), strict=True))
        return sums, (float(table[:, -2].max()), float((-table[:, -1]).max()))


_SUMS = (
    "num_tokens_sum",
    "entropy_sum",
    "kl_sum",
    "ratio_sum",
    "clipped_low_sum",
    "clipped_high_sum",
    "loss_sum",
    "first_tokens_sum",
    "first_mismatch_sum",
)
