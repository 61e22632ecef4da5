"""A policy learns its teacher's distributions on trees: values and gradients, walks, and hints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from flowkernels import DIVERGENCES, LossSpec
from gradients import distance, gradient_of, reference_of
from torch import Tensor
from transformers import PreTrainedModel

from flowtrain.records import Sample
from flowtrain.trainer.distillation import DistillSpec
from flowtrain.trainer.loss import equip
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import pack_row
from tests.trainer.test_tree_gradient import GROUPS, make_samples

TEMPERATURE = 0.7


def taught(samples: list[Sample], *, is_hinted: bool) -> list[Sample]:
    """Samples without advantages; the teacher reads more before some of them."""
    quiet = [replace(s, advantages=(0.0,) * len(s.advantages)) for s in samples]
    if not is_hinted:
        return quiet
    hint = (30, 31, 32)
    return [
        replace(s, teacher_prompt_ids=hint + s.prompt_ids if n % 3 else ())
        for n, s in enumerate(quiet)
    ]


def log_probs(model: PreTrainedModel, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
    """Of the whole vocabulary at each token of the response, by transformers."""
    ids = torch.tensor([*prompt, *response[:-1]])[None]
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 :]
    return (logits / TEMPERATURE).log_softmax(-1)


def truth(
    model: PreTrainedModel, teacher: PreTrainedModel, samples: list[Sample], spec: DistillSpec
) -> dict[str, Tensor]:
    """The gradient of the mean over weighted tokens, sample by sample."""
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for sample in samples:
        log_p = log_probs(model, sample.prompt_ids, sample.response_ids)
        with torch.no_grad():
            prompt = sample.teacher_prompt_ids or sample.prompt_ids
            log_q = log_probs(teacher, prompt, sample.response_ids)
        p, q = log_p.exp(), log_q.exp()
        if spec.divergence == "reverse_kl":
            found = (p * (log_p - log_q)).sum(1)
        elif spec.divergence == "forward_kl":
            found = (q * (log_q - log_p)).sum(1)
        else:
            log_m = (spec.mix * q + (1 - spec.mix) * p).log()
            found = spec.mix * (q * (log_q - log_m)).sum(1)
            found = found + (1 - spec.mix) * (p * (log_p - log_m)).sum(1)
        weights = torch.tensor(sample.loss_weights, dtype=torch.float64)
        total, weight = total + (weights * found).sum(), weight + float(weights.sum())
    (total / weight).backward()
    gradient = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradient


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize("is_hinted", [False, True])
def test_the_gradient_is_that_of_samples_one_by_one(
    tiny_path: str, make_trainer: Any, divergence: Any, budget: int | None, is_hinted: bool
) -> None:
    """On a tree, and walked; the teacher's prompts make a tree of their own."""
    spec, teacher = DistillSpec(divergence, 0.3, teacher="reference"), reference_of(tiny_path)
    equip(teacher)
    samples = taught(make_samples(GROUPS["turns that extend each other"]), is_hinted=is_hinted)
    trainer = make_trainer(
        LossSpec(), TEMPERATURE, teacher, grad_clip=0.0, token_budget=budget, distill=spec
    )
    plain = [models.load_model(tiny_path, torch.float64, attn="sdpa") for _ in range(2)]
    plain[1].load_state_dict(teacher.state_dict())
    wanted = truth(*plain, samples, spec)
    found = gradient_of(trainer, [pack_row(samples[:2]), pack_row(samples[2:])])
    assert distance(found, wanted) < 1e-6, "norms are fp32 in transformers"
    assert trainer.step([[pack_row(samples)]])["divergence"] > 1e-3


def test_a_policy_that_knows_less_learns_from_itself(make_trainer: Any) -> None:
    """Without a hint it has nothing to learn."""
    samples = make_samples(GROUPS["turns that extend each other"])
    spec = DistillSpec("reverse_kl", 0.5, teacher="policy")
    norms = []
    for is_hinted in (False, True):
        trainer = make_trainer(distill=spec)
        norms.append(trainer.step([[pack_row(taught(samples, is_hinted=is_hinted))]])["grad_norm"])
    assert norms[0] < 1e-12 < 1e-3 < norms[1]


def test_steps_bring_the_policy_to_its_teacher(tiny_path: str, make_trainer: Any) -> None:
    teacher = reference_of(tiny_path)
    equip(teacher)
    spec = DistillSpec("forward_kl", 0.5, teacher="reference")
    trainer = make_trainer(LossSpec(), 1.0, teacher, lr=3e-3, distill=spec)
    row = pack_row(taught(make_samples(GROUPS["branches within a response"]), is_hinted=False))
    divergences = [trainer.step([[row]])["divergence"] for _ in range(30)]
    assert divergences[-1] < 0.1 * divergences[0]
