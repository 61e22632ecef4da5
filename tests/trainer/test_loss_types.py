"""Losses that see whole samples, or the sampler's log-probs, mean the same in packed rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from batches import random_samples
from flowkernels import LossSpec
from torch import Tensor

from flowtrain.records import Sample
from flowtrain.trainer.loss import forward_rows
from flowtrain.trainer.packing import PackedRow, pack_row, pack_rows
from flowtrain.trainer.step_metrics import StepMetrics
from flowtrain.trainer.trainer import Trainer

MakeTrainer = Callable[..., Trainer]


def gradient_of(trainer: Trainer, rows: list[PackedRow]) -> Tensor:
    """Compute the gradient of one batch, over all parameters; prepared as `step` does."""
    (scored,) = trainer.ref_logprobs(trainer.old_logprobs([rows]))
    prepared = trainer._prepare(scored)
    trainer.forward_backward(
        prepared, sum(float(row.loss_weight_T.sum()) for row in prepared), StepMetrics()
    )
    gradient = torch.cat(
        [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    )
    trainer.optimizer.zero_grad()
    return gradient


def near(trainer: Trainer, samples: list[Sample], spread: float) -> list[Sample]:
    """The samples as if a policy not far from this one had sampled them."""
    rng = torch.Generator().manual_seed(5)
    scores = trainer.score(trainer.model, [pack_row([s]) for s in samples])
    noisy = [
        (each.logprob_T + spread * torch.randn(each.logprob_T.shape, generator=rng)).tolist()
        for each in scores
    ]
    return [replace(s, logprobs=tuple(each)) for s, each in zip(samples, noisy, strict=True)]


def test_bounds_of_samples_within_the_targets() -> None:
    samples = random_samples(5)
    row = pack_row(samples)
    assert row.cu_targets_S1.diff().tolist() == [len(s.response_ids) for s in samples]
    assert row.cu_targets_S1[-1] == len(row.target_ids_T)


def test_gspo_through_packed_rows_is_the_sequence_loss(make_trainer: MakeTrainer) -> None:
    """Autograd of -min(s A, clip(s) A) with s = exp(mean log-ratio)."""
    trainer = make_trainer(LossSpec("gspo", clip_low=0.1, clip_high=0.1), grad_clip=0.0)
    samples = near(trainer, random_samples(9), 0.3)
    samples = [
        replace(s, loss_weights=(1 / len(s.response_ids),) * len(s.response_ids)) for s in samples
    ]
    losses, num_clipped = [], 0
    for sample in samples:
        row = pack_row([sample])
        logp = (
            forward_rows(trainer.model, row)
            .log_softmax(-1)
            .gather(1, row.target_ids_T[:, None])[:, 0]
        )
        ratio = (logp - row.old_logprob_T).mean().exp()
        surrogate = torch.minimum(
            ratio * sample.advantages[0], ratio.clamp(0.9, 1.1) * sample.advantages[0]
        )
        num_clipped += int(surrogate < ratio * sample.advantages[0])
        losses.append(-surrogate)
    assert 0 < num_clipped < len(samples), "the case is to have clipped and free samples"
    (torch.stack(losses).sum() / len(samples)).backward()
    truth = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    trainer.optimizer.zero_grad()
    for num_rows in (1, 4, 99):
        torch.testing.assert_close(
            gradient_of(trainer, pack_rows(samples, num_rows)), truth, rtol=1e-4, atol=1e-7
        )


@pytest.mark.parametrize("num_rows", [1, 4])
def test_masked_tokens_leave_the_normaliser(make_trainer: MakeTrainer, num_rows: int) -> None:
    """Dropping tokens by their ratio is the same as giving them no weight to begin with."""
    low, high = 0.9, 1.1
    masked = make_trainer(LossSpec(mis=(low, high)), rescore=True, grad_clip=0.0)
    plain = make_trainer(LossSpec(), rescore=True, grad_clip=0.0)
    samples = near(plain, random_samples(9), 0.2)
    by_hand = []
    for sample, score in zip(
        samples, plain.score(plain.model, [pack_row([s]) for s in samples]), strict=True
    ):
        ratio_T = (score.logprob_T - torch.tensor(sample.logprobs)).exp()
        keep_T = (ratio_T >= low) & (ratio_T <= high)
        by_hand.append(
            replace(
                sample, loss_weights=tuple((torch.tensor(sample.loss_weights) * keep_T).tolist())
            )
        )
    num_kept, num_all = (
        sum(w != 0 for s in group for w in s.loss_weights) for group in (by_hand, samples)
    )
    assert 0.2 < num_kept / num_all < 0.8, "the case is to have dropped and kept tokens"
    expected = gradient_of(plain, pack_rows(by_hand, num_rows))
    torch.testing.assert_close(
        gradient_of(masked, pack_rows(samples, num_rows)), expected, rtol=1e-6, atol=1e-9
    )


def test_truncated_importance_sampling_weighs_the_policy_term(make_trainer: MakeTrainer) -> None:
    """With one token per sample, the weight is a factor of the sample's advantage."""
    corrected = make_trainer(LossSpec(tis=1.1), rescore=True, grad_clip=0.0)
    plain = make_trainer(LossSpec(), rescore=True, grad_clip=0.0)
    samples = [
        replace(
            s,
            response_ids=s.response_ids[:1],
            logprobs=s.logprobs[:1],
            advantages=s.advantages[:1],
            loss_weights=s.loss_weights[:1],
        )
        for s in random_samples(9)
    ]
    samples = near(plain, samples, 0.3)
    scores = plain.score(plain.model, [pack_row([s]) for s in samples])
    factors = [
        min(float((score.logprob_T - torch.tensor(s.logprobs)).exp()), 1.1)
        for s, score in zip(samples, scores, strict=True)
    ]
    assert 1.1 in factors and min(factors) < 0.95
    by_hand = [
        replace(s, advantages=(s.advantages[0] * factor,))
        for s, factor in zip(samples, factors, strict=True)
    ]
    expected = gradient_of(plain, pack_rows(by_hand, 1))
    torch.testing.assert_close(
        gradient_of(corrected, pack_rows(samples, 1)), expected, rtol=1e-5, atol=1e-7
    )


def test_rescored_truncated_importance_sampling_is_decoupled_ppo(make_trainer: MakeTrainer) -> None:
    """-min(pi_prox / pi_behave, c) min(r A, clip(r) A) with r = pi / pi_prox (arXiv 2110.00641, eq.
    6; capped as in 2505.24298).

    The proximal policy is the trainer's before the batch, the behaviour policy the sampler's, and
    pi has moved on from both.
    """
    cap, clip = 1.2, 0.1
    trainer = make_trainer(
        LossSpec(clip_low=clip, clip_high=clip, tis=cap), rescore=True, grad_clip=0.0
    )
    samples = near(trainer, random_samples(9), 0.3)
    (scored,) = trainer.old_logprobs([pack_rows(samples, 4)])
    rows = trainer._prepare(scored)
    normaliser = sum(float(row.loss_weight_T.sum()) for row in rows)
    with torch.no_grad():
        rng = torch.Generator().manual_seed(3)
        for parameter in trainer.model.parameters():
            parameter.add_(0.02 * parameter.std() * torch.randn(parameter.shape, generator=rng))
    losses, num_capped, num_clipped = [], 0, 0
    for row in rows:
        logp = (
            forward_rows(trainer.model, row)
            .log_softmax(-1)
            .gather(1, row.target_ids_T[:, None])[:, 0]
        )
        behave = (row.old_logprob_T - row.sampler_logprob_T).exp()
        ratio = (logp - row.old_logprob_T).exp()
        surrogate = torch.minimum(
            ratio * row.advantage_T, ratio.clamp(1 - clip, 1 + clip) * row.advantage_T
        )
        losses.append(-(behave.clamp(max=cap) * surrogate * row.loss_weight_T).sum())
        num_capped = num_capped + int((behave > cap).sum())
        num_clipped = num_clipped + int((surrogate < ratio * row.advantage_T).sum())
    assert num_capped > 3 and num_clipped > 3, "the case is to have both"
    (sum(losses) / normaliser).backward()
    truth = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    trainer.optimizer.zero_grad()
    trainer.forward_backward(rows, normaliser, StepMetrics())
    ours = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("num_rows", [1, 4, 99])
def test_m2po_looks_at_the_whole_mini_batch(make_trainer: MakeTrainer, num_rows: int) -> None:
    """The largest log-ratios of all samples go first."""
    threshold = 0.05
    trainer = make_trainer(
        LossSpec(clip_low=0.95, clip_high=20.0), m2po=threshold, grad_clip=0.0, lr=0.0
    )
    samples = near(trainer, random_samples(9), 0.5)
    rows = [pack_row([sample]) for sample in samples]
    logps = [
        forward_rows(trainer.model, row).log_softmax(-1).gather(1, row.target_ids_T[:, None])[:, 0]
        for row in rows
    ]
    log_ratio_T = torch.cat(
        [logp - row.old_logprob_T for logp, row in zip(logps, rows, strict=True)]
    )
    advantage_T, weight_T = (
        torch.cat([getattr(row, name) for row in rows]) for name in ("advantage_T", "loss_weight_T")
    )
    size_T = log_ratio_T.detach().abs()
    away = ((weight_T != 0) & (advantage_T * log_ratio_T.detach() > 0)).nonzero()[:, 0].tolist()
    stays = sorted(away, key=size_T.tolist().__getitem__)
    while float(size_T[stays].square().mean()) > threshold:
        stays.pop()
    assert 3 < len(stays) < len(away) - 2, "the case is to have some of both"
    mask_T = torch.ones_like(size_T)
    mask_T[[index for index in away if index not in stays]] = 0
    (-(mask_T * weight_T * log_ratio_T.exp() * advantage_T).sum() / weight_T.sum()).backward()
    truth = math.sqrt(
        sum(float(p.grad.square().sum()) for p in trainer.model.parameters() if p.grad is not None)
    )
    trainer.optimizer.zero_grad()
    stats = trainer.step([pack_rows(samples, num_rows)])
    assert stats["clip_fraction"] == pytest.approx((len(away) - len(stays)) / len(size_T))
    assert stats["grad_norm"] == pytest.approx(truth, rel=1e-4)
    assert stats["ratio_bound"] > math.exp(float(size_T[stays].max()))
