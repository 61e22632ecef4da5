"""The gradient that a trainer's optimizer sees, and that of plain transformers and autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from flowkernels import LossSpec
from torch import Tensor
from transformers import AutoModelForCausalLM

from flowtrain.records import Sample
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import PackedRow
from flowtrain.trainer.trainer import Trainer

FULL_LOSS = LossSpec(clip_low=0.2, clip_high=0.3, dual_clip=3.0, kl_coef=0.1, entropy_coef=0.05)
TOLERANCE = 2e-6
"""Relative, of the whole gradient: models run in fp64 but for norms and rotations, the loss in
fp32."""


def gradient_of(trainer: Trainer, minibatch: Sequence[PackedRow]) -> dict[str, Tensor]:
    """Compute the gradient that the optimizer sees in one step; the weights stay."""
    grads: dict[str, Tensor] = {}

    def keep() -> None:
        grads.update(
            {
                name: p.grad.detach().clone()
                for name, p in trainer.model.named_parameters()
                if p.grad is not None
            }
        )

    real_step, trainer.optimizer.step = trainer.optimizer.step, keep
    trainer.step([minibatch])
    trainer.optimizer.step = real_step
    return grads


def distance(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Relative, over all parameters at once."""
    assert set(ours) == set(truth)
    difference = sum(float((ours[name] - truth[name]).square().sum()) for name in truth)
    return math.sqrt(difference / sum(float(value.square().sum()) for value in truth.values()))


def reference_of(path: str, noise: float = 0.05) -> Any:
    """A policy a little away from the tiny model, frozen."""
    model = models.load_model(path, torch.float64).requires_grad_(False)
    rng = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.add_(noise * torch.randn(parameter.shape, generator=rng))
    return model


def among(logits: Tensor, sample: Sample) -> Tensor:
    """Log-probs [response, V] among what was sampled from, as a dense mask."""
    if sample.sampling_mask is not None:
        mask = torch.full_like(logits, -torch.inf)
        at = torch.repeat_interleave(
            torch.arange(len(logits)), torch.tensor(sample.sampling_mask.counts)
        )
        mask[at, torch.tensor(sample.sampling_mask.ids, dtype=torch.int64)] = 0.0
        logits = logits + mask
    return logits.log_softmax(-1)


class Plain:
    """The same by transformers and autograd alone: padded batches or one sample at a time."""

    def __init__(
        self, path: str, spec: LossSpec, temperature: float, reference: Any = None
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, attn_implementation="sdpa"
        )
        self.reference = None
        if reference is not None:
            self.reference = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float64, attn_implementation="sdpa"
            )
            self.reference.load_state_dict(reference.state_dict())
        self.spec, self.temperature = spec, temperature

    def logits(self, model: Any, samples: Sequence[Sample]) -> list[Tensor]:
        """[response, V] per sample, from one batch padded on the right."""
        sequences = [s.prompt_ids + s.response_ids for s in samples]
        longest = max(map(len, sequences))
        ids = torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences])
        mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in sequences])
        logits = model(input_ids=ids, attention_mask=mask).logits / self.temperature
        return [
            each[len(s.prompt_ids) - 1 : len(seq) - 1]
            for each, s, seq in zip(logits, samples, sequences, strict=True)
        ]

    def token_losses(self, sample: Sample, logits: Tensor, ref_logits: Tensor | None) -> Tensor:
        spec, targets = self.spec, torch.tensor(sample.response_ids)[:, None]
        logp_all = logits.log_softmax(-1)
        logp = among(logits, sample).gather(1, targets)[:, 0]
        ratio = torch.exp(logp - torch.tensor(sample.logprobs).double())
        a = torch.tensor(sample.advantages).double()
        least = torch.where(a > 0, 0.0, 1 - spec.clip_low)
        most = torch.where(a > 0, 1 + spec.clip_high, spec.dual_clip or math.inf)
        loss = -a * ratio.clamp(least, most) + spec.entropy_coef * (logp_all.exp() * logp_all).sum(
            -1
        )
        if ref_logits is not None:
            u = among(ref_logits, sample).gather(1, targets)[:, 0] - logp
            loss = loss + spec.kl_coef * (u.exp() - 1 - u)
        return loss

    def gradient(self, batches: Sequence[Sequence[Sample]]) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradient of the weighted mean over all samples of all batches."""
        normaliser, total = sum(sum(s.loss_weights) for batch in batches for s in batch), 0.0
        for batch in batches:
            logits = self.logits(self.model, batch)
            refs = (
                [None] * len(batch)
                if self.reference is None
                else self.logits(self.reference, batch)
            )
            losses = [
                self.token_losses(s, z, ref) for s, z, ref in zip(batch, logits, refs, strict=True)
            ]
            weighted = [
                (each * torch.tensor(s.loss_weights).double()).sum()
                for each, s in zip(losses, batch, strict=True)
            ]
            loss = torch.stack(weighted).sum() / normaliser
            loss.backward()
            total += loss.item()
        return total, {name: p.grad for name, p in self.model.named_parameters()}
