"""The log-sum-exp with its gradient and the z-loss made of it, against autograd in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from flowkernels import LossSpec, linear_logprobs, linear_policy_loss, logprobs, policy_loss
from kernel_truth import IMPLS, Batch, counted, mask_of, on_device, plain_rows, random_batch, truth
from torch import Tensor

VOCAB, SUBSETS = 17, [[0, 3, 5], [], [16], [], [2, 1, 7, 9]]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 1.5, "temperature": 0.7},
    "mask": {"mask": True, "temperature": 1.3},
    "all": {"mask": True, "softcap": 1.5, "temperature": 0.7, "entropy_coef": 0.1},
}
SPECS = {
    "clip": LossSpec(clip_high=0.3, kl_coef=0.2),
    "gspo": LossSpec("gspo", kl_coef=0.2),
    "nll": LossSpec("nll"),
}


def case(name: str) -> tuple[Batch, dict[str, Any], LossSpec, Any]:
    """(batch, options of the loss, what it adds to the spec, ids of the masks)."""
    options = dict(CASES[name])
    batch = random_batch(20, VOCAB, temperature=options.get("temperature", 1.0))
    subsets = [SUBSETS[i % len(SUBSETS)] for i in range(20)] if options.pop("mask", False) else None
    if subsets is not None:
        batch["sampling_mask"] = mask_of(subsets)
    return batch, options, LossSpec(entropy_coef=options.pop("entropy_coef", 0.0)), subsets


def true_z_loss(batch: Batch, options: dict[str, Any], coef: float) -> tuple[Tensor, Tensor]:
    """(sum of weight coef lse^2, its gradient by the logits) over the rows that count."""
    logits = batch["logits_TV"].double().requires_grad_()
    rows = counted(batch)
    targets = batch["target_ids_T"][rows]
    lse = plain_rows(
        logits[rows], targets, options.get("temperature", 1.0), options.get("softcap")
    )[2]
    loss = (coef * batch["weight_T"].double()[rows] * lse.square()).sum()
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("spec_name", SPECS)
@pytest.mark.parametrize("name", CASES)
def test_z_loss_adds_its_value_and_gradient(
    name: str, spec_name: str, impl: str, inplace: bool
) -> None:
    batch, options, with_entropy, subsets = case(name)
    spec = replace(SPECS[spec_name], entropy_coef=with_entropy.entropy_coef, z_loss_coef=0.03)
    arguments = on_device(batch, impl)
    logits = arguments.pop("logits_TV").clone().requires_grad_()
    out = policy_loss(1.0 * logits, **arguments, **options, spec=spec, impl=impl, inplace=inplace)
    (gradient,) = torch.autograd.grad(out.loss, logits)
    loss, expected = truth(
        replace(spec, z_loss_coef=0.0), batch, options.get("temperature", 1.0),
        softcap=options.get("softcap"), subsets=subsets,
    )  # fmt: skip
    z_loss, z_gradient = true_z_loss(batch, options, 0.03)
    assert z_gradient.abs().max() > 0.01
    assert out.loss.item() == pytest.approx((loss + z_loss).item(), rel=1e-5)
    torch.testing.assert_close(gradient.cpu().double(), expected + z_gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compact", ["call", "chunks", False])
@pytest.mark.parametrize("impl", IMPLS)
def test_z_loss_from_hidden_states_is_that_of_logits(impl: str, compact: Any) -> None:
    """In chunks of 16 rows, of weights of which some are 0."""
    batch, options, _, _ = case("all")
    rng = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(20, 4, generator=rng), torch.randn(VOCAB, 4, generator=rng)
    spec = LossSpec(clip_high=0.3, z_loss_coef=0.03)
    batch = on_device(batch, impl)
    tokens = {name: value for name, value in batch.items() if name != "logits_TV"}
    device = tokens["weight_T"].device
    leaves = [x.to(device).requires_grad_() for x in (hidden, weight)]
    theirs = policy_loss(leaves[0] @ leaves[1].t(), **tokens, **options, spec=spec, impl="torch")
    expected = torch.autograd.grad(theirs.loss, leaves)
    ours = linear_policy_loss(
        *leaves, **tokens, **options, spec=spec, impl=impl, compact=compact,
        memory_budget=16 * VOCAB * 4,
    )  # fmt: skip
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
    for mine, true in zip(torch.autograd.grad(ours.loss, leaves), expected, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("impl", IMPLS)
def test_the_log_sum_exp_carries_a_gradient(impl: str, name: str) -> None:
    batch, options, _, _ = case(name)
    arguments = on_device(batch, impl)
    logits = arguments["logits_TV"].clone().requires_grad_()
    given = {
        key: value
        for key, value in {**arguments, **options}.items()
        if key in ("target_ids_T", "sampling_mask", "temperature", "softcap")
    }
    upstream = torch.linspace(-1, 2, 20, device=logits.device)
    out = logprobs(logits, **given, differentiable=True, impl=impl)
    (gradient,) = torch.autograd.grad((upstream * out.lse_T).sum(), logits)
    rows = batch["target_ids_T"] >= 0
    plain = batch["logits_TV"].double().requires_grad_()
    lse = plain_rows(
        plain[rows], batch["target_ids_T"][rows], options.get("temperature", 1.0),
        options.get("softcap"),
    )[2]  # fmt: skip
    expected = torch.autograd.grad((upstream.cpu().double()[rows] * lse).sum(), plain)[0]
    torch.testing.assert_close(gradient.cpu().double(), expected, rtol=1e-4, atol=1e-5)
    eye = torch.eye(VOCAB, device=logits.device)
    hidden = arguments["logits_TV"].clone().requires_grad_()
    linear = linear_logprobs(hidden, eye, **given, differentiable=True, impl=impl)
    (of_hidden,) = torch.autograd.grad((upstream * linear.lse_T).sum(), hidden)
    torch.testing.assert_close(of_hidden.cpu().double(), expected, rtol=1e-4, atol=1e-5)
