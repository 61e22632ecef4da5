"""APPO's future-aware factor over whole rollouts, and without the tokens that the dual clip takes
out of the mean: against autograd of the objective written out over the mini-batch, however turns
are packed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from batches import random_samples
from flowkernels import FutureRatio, LossSpec, future_aware, future_factor
from gradients import TOLERANCE, distance, gradient_of, reference_of
from torch import Tensor

from flowtrain.records import Sample, SampleId
from flowtrain.trainer.loss import forward_rows
from flowtrain.trainer.minibatch_factor import MinibatchFactor
from flowtrain.trainer.packing import pack_row, pack_rows
from flowtrain.trainer.trainer import Trainer

MakeTrainer = Callable[..., Trainer]

SPEC = LossSpec(clip_high=0.28, dual_clip=3.0, kl_coef=0.5)
FUTURE = FutureRatio(coef=0.7, half_life=5.0, low=0.4, high=3.0)


def rollouts(trainer: Trainer, samples: Sequence[Sample], turns: int) -> list[Sample]:
    """Samples as turns of rollouts, two rollouts in a group, at times far from the sampler; the
    rollouts' advantages differ from token to token, and the weights too.
    """
    rng = torch.Generator().manual_seed(5)
    scores = trainer.score(trainer.model, [pack_row([sample]) for sample in samples])
    made = []
    for number, (sample, score) in enumerate(zip(samples, scores, strict=True)):
        size = len(sample.response_ids)
        old = score.logprob_T - 0.8 * torch.randn(size, generator=rng) - 0.1
        rollout, turn = divmod(number, turns)
        sign = 1 if rollout % 3 == 0 else -1
        made.append(
            replace(
                sample,
                logprobs=tuple(old.tolist()),
                advantages=tuple((sign * (0.5 + torch.rand(size, generator=rng))).tolist()),
                loss_weights=tuple((0.5 + torch.rand(size, generator=rng)).tolist()),
                sample_id=SampleId(rollout // 2, rollout % 2, turn),
            )
        )
    return made


def logprobs_of(trainer: Trainer, sample: Sample, model: object = None) -> Tensor:
    row = pack_row([sample])
    logits = forward_rows(model or trainer.model, row)
    return logits.log_softmax(-1).gather(1, row.target_ids_T[:, None])[:, 0].double()


def truth(
    trainer: Trainer, samples: Sequence[Sample], joins_turns: bool, drops: bool
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The gradient of [mean of the policy term over tokens that take part] + 0.5 [mean of k3 over
    all], and what the case has of each kind.
    """
    terms, part_weight, weight, kls = [], 0.0, 0.0, []
    seen = {"dropped": 0, "split": 0, "between": 0, "bound": 0}
    width = 2 if joins_turns else 3
    in_order = sorted(samples, key=lambda s: s.sample_id or SampleId(0, 0, 0))
    for _, each in groupby(in_order, key=lambda s: (s.sample_id or SampleId(0, 0, 0))[:width]):
        turns = list(each)
        logp = torch.cat([logprobs_of(trainer, turn) for turn in turns])
        with trainer.reference() as reference:
            ref = torch.cat([logprobs_of(trainer, turn, reference) for turn in turns])
        old, a, w = (
            torch.tensor([x for turn in turns for x in getattr(turn, name)]).double()
            for name in ("logprobs", "advantages", "loss_weights")
        )
        d = (logp - old).detach().tolist()
        bounded = [a[t] < 0 and d[t] > math.log(3) for t in range(len(d))]
        u = ref.detach() - logp
        kls.append((w * (u.exp() - 1 - u)).sum())
        weight += float(w.sum())
        if sum(bounded) > 1:
            seen["dropped"] += 1
            sizes = [len(turn.response_ids) for turn in turns]
            ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
            seen["split"] += sum(
                sum(bounded[end - size : end]) < 2 for end, size in zip(ends, sizes, strict=True)
            )
            part_weight += 0.0 if drops else float(w.sum())
            continue
        part_weight += float(w.sum())
        factors = []
        for t in range(len(d)):
            later = [2 ** (-(k - t) / 5) * d[k] for k in range(t, len(d)) if d[k] <= math.log(3)]
            future = min(max(math.exp(sum(later)), 0.4), 3.0)
            seen["between"] += 0.4 < future < 3.0
            seen["bound"] += bounded[t]
            future = min(max(future, 0.8), 1.0) if a[t] < 0 and d[t] > math.log(6) else future
            factors.append(1 + 0.7 * future)
        scaled, ratio = a * torch.tensor(factors).double(), (logp - old).exp()
        lost = -torch.minimum(ratio * scaled, ratio.clamp(0.8, 1.28) * scaled)
        lost = torch.where(a < 0, torch.minimum(lost, -3 * scaled), lost)
        terms.append((w * lost).sum())
    loss = sum(terms) / max(part_weight, 1e-9) + 0.5 * sum(kls) / weight
    trainer.optimizer.zero_grad()
    loss.backward()
    grads = {
        name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None
    }
    trainer.optimizer.zero_grad()
    return grads, seen


def factor_of(joins_turns: bool, drops: bool) -> MinibatchFactor:
    of = functools.partial(
        future_factor, future=FUTURE, dual_clip=SPEC.dual_clip, leaves_mean=drops
    )
    return MinibatchFactor(of, joins_turns)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("joins_turns", [False, True])
def test_the_gradient_is_that_of_the_objective_written_out(
    tiny_path: str,
    make_trainer: MakeTrainer,
    joins_turns: bool,
    drops: bool,
) -> None:
    """Turns of a rollout are in one row, in different rows, and in other orders than time's."""
    trainer = make_trainer(
        SPEC, reference=reference_of(tiny_path), factor=factor_of(joins_turns, drops), grad_clip=0.0
    )
    samples = rollouts(trainer, random_samples(36), turns=3)
    wanted, seen = truth(trainer, samples, joins_turns, drops)
    assert seen["dropped"] and seen["between"] > 20 and seen["bound"], seen
    assert seen["split"] or not joins_turns, "turns that alone would stay go with their rollout"
    every = samples[::-1]
    for rows in (pack_rows(every, 1), pack_rows(every, 4), [pack_row([s]) for s in every]):
        assert distance(gradient_of(trainer, rows), wanted) < TOLERANCE, len(rows)
    other, _ = truth(trainer, samples, joins_turns, not drops)
    assert distance(other, wanted) > 0.05, "what is dropped matters"


@pytest.mark.parametrize("m2po", [None, 0.2])
def test_over_turns_it_is_the_loss_that_looks_at_rows(
    make_trainer: MakeTrainer, m2po: float | None
) -> None:
    """M2PO finds its clip by the advantages as they were before."""
    spec = replace(SPEC, kl_coef=0.0)
    factor = factor_of(joins_turns=False, drops=False)
    scaled = make_trainer(spec, factor=factor, m2po=m2po, grad_clip=0.0)
    within = make_trainer(spec, m2po=m2po, grad_clip=0.0)
    within._token_loss_of = functools.partial(future_aware, future=FUTURE)
    within._token_loss = future_aware(spec, FUTURE)
    samples = rollouts(scaled, random_samples(18), turns=3)
    rows = pack_rows(samples, 4)
    assert distance(gradient_of(scaled, rows), gradient_of(within, rows)) < TOLERANCE


def test_where_all_are_dropped_nothing_is_left_of_the_policy_term() -> None:
    log_ratio_T, bounds_S1 = torch.full((4,), 1.5), torch.tensor([0, 2, 4])
    ones_T = torch.ones(4)
    factor = functools.partial(future_factor, future=FUTURE, dual_clip=3.0, leaves_mean=True)
    assert factor(log_ratio_T, -ones_T, ones_T, bounds_S1).tolist() == [0.0] * 4
    half_T = factor(log_ratio_T, torch.tensor([-1.0, -1, 1, 1]), ones_T, bounds_S1)
    assert half_T.tolist() == pytest.approx([0, 0, 3.4, 3.4]), "2 (1 + 0.7), no ratio joins"
