"""`policy_loss` against the loss that TRL releases, by the logits: what `test_rival_parity.py` does
not compare, which is accumulation, metrics, and ratios to the old policy and the sampler.

TRL's `GRPOTrainer._compute_loss` is called as it is, on an object that holds the attributes it
reads and whose log-probs come from a plain log-softmax of a leaf tensor, so that autograd through
TRL's own code is the reference. Ours sees the packed completion tokens only. L: longest completion,
S: sequences, T: completion tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import rival_losses
import torch
from flowkernels import policy_loss, token_weights
from kernel_truth import on_device
from rival_losses import AVERAGINGS, TEMPERATURE, TIS, Batch, Setting
from torch import Tensor

pytest.importorskip("trl")

LOSSES = {
    name: rival_losses.LOSSES[name]
    for name in ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "gspo", "gspo-luspo")
}
CHANGES = {name: rival_losses.CHANGES[name] for name in ("plain", "asymmetric", "kl", "all")}


def logits_of(batch: Batch) -> Tensor:
    logits_SLV: Tensor = batch.hidden_SLD @ batch.weight_VD.T + batch.bias_V
    return logits_SLV


def trl_loss(
    setting: Setting,
    batch: Batch,
    sampler_ratio: Tensor | None = None,
    num_items: int | None = None,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(loss, gradient by the packed tokens' logits, metrics) of TRL."""
    if sampler_ratio is None:
        sampler_ratio = (
            sequence_ratio(batch) if setting.is_sequence else token_ratio(batch)
        ).clamp(max=TIS)
    logits = logits_of(batch).requires_grad_()
    loss, metrics = rival_losses.trl_loss(setting, batch, logits, sampler_ratio, num_items)
    loss.backward()
    assert logits.grad is not None and (logits.grad[~batch.trained_SL] == 0).all()
    return loss.detach(), logits.grad[batch.mask_SL], metrics


def token_ratio(batch: Batch) -> Tensor:
    """pi_old / pi_sampler [S, L], the ratio of vllm_importance_sampling_mode="token_*"."""
    return (batch.old_SL - batch.sampler_SL).exp()


def sequence_ratio(batch: Batch) -> Tensor:
    """Ratio by sequence [S, 1], as "sequence_*" has it."""
    return ((batch.old_SL - batch.sampler_SL) * batch.trained_SL).sum(-1, keepdim=True).exp()


def arguments(setting: Setting, batch: Batch) -> dict[str, Any]:
    """Arguments of `policy_loss` but `spec`; for GSPO every token has its sequence's ratio."""
    averaging, length = AVERAGINGS[setting.loss_type]
    bounds = batch.bounds()
    sampler_SL = (
        batch.old_SL - sequence_ratio(batch).log() if setting.is_sequence else batch.sampler_SL
    )
    weight_T = token_weights(
        bounds, int(bounds[-1]), averaging, mask_T=batch.packed(batch.trained_SL), length=length
    )
    return {
        "logits_TV": batch.packed(logits_of(batch)),
        "target_ids_T": batch.packed(batch.ids_SL),
        "advantage_T": batch.packed(batch.advantage_S[:, None].expand_as(batch.ids_SL)),
        "weight_T": weight_T,
        "old_logprob_T": batch.packed(batch.old_SL),
        "ref_logprob_T": batch.packed(batch.ref_SL),
        "sampler_logprob_T": batch.packed(sampler_SL),
        "cu_seqlens_S1": bounds,
        "temperature": TEMPERATURE,
    }


def our_loss(*, impl: str = "torch", **kwargs: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss, gradient by the logits, statistics) where `impl` runs, brought back to the CPU."""
    moved = on_device(kwargs, impl)
    logits_TV = moved["logits_TV"].detach().requires_grad_()
    out = policy_loss(**{**moved, "logits_TV": logits_TV}, impl=impl)
    out.loss.backward()
    stats = {name: value.cpu() for name, value in out.stats.items()}
    return out.loss.detach().cpu(), logits_TV.grad.cpu(), stats


def check_same(ours: tuple[Tensor, Tensor, Any], theirs: tuple[Tensor, Tensor, Any]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(
        ours[1], theirs[1], rtol=1e-5, atol=1e-6 * theirs[1].abs().max().item()
    )


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_accumulation_is_a_factor_of_the_weights(name: str) -> None:
    """One micro-batch of four, generated at once and spent on two optimizer steps."""
    setting = replace(LOSSES[name], **CHANGES["all"], accumulation=2, steps_per_generation=4)
    batch, num_items = Batch.make(), 90
    theirs = trl_loss(setting, batch, num_items=num_items)
    kwargs = arguments(setting, batch)
    if setting.loss_type in ("dapo", "cispo"):
        kwargs["weight_T"] = batch.packed(batch.trained_SL) / (
            num_items * setting.accumulation / setting.steps_per_generation
        )
    else:
        kwargs["weight_T"] /= setting.accumulation
    check_same(our_loss(**kwargs, spec=setting.spec()), theirs)


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_statistics_are_the_metrics_that_trl_logs(name: str) -> None:
    """Settings without `delta`: TRL counts tokens that the region of the ratio clips, ours also
    those of the dual clip.
    """
    setting, batch = replace(LOSSES[name], **CHANGES["asymmetric"], beta=0.3), Batch.make()
    theirs = trl_loss(setting, batch)[2]
    ours = our_loss(**arguments(setting, batch), spec=setting.spec())[2]
    names = {
        "entropy": "entropy_sum",
        "kl": "kl_sum",
        "clip_ratio/low_mean": "clipped_low_sum",
        "clip_ratio/high_mean": "clipped_high_sum",
    }
    assert ours["num_tokens_sum"] == batch.trained_SL.sum()
    for trl_name, our_name in names.items():
        assert theirs[trl_name] > 0
        found = (ours[our_name] / ours["num_tokens_sum"]).item()
        assert found == pytest.approx(theirs[trl_name], rel=1e-5), trl_name


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "bnpo", "cispo"])
def test_masked_importance_sampling_is_that_of_trl(name: str) -> None:
    """vllm_importance_sampling_mode="token_mask" is `mis` together with `tis`, but for the KL term,
    which TRL keeps where it masks.
    """
    setting, batch = replace(LOSSES[name], tis=True), Batch.make()
    ratio = token_ratio(batch)
    is_out = (ratio < 0.8) | (ratio > TIS)
    assert (is_out & batch.trained_SL).any() and (~is_out & batch.trained_SL).any()
    theirs = trl_loss(setting, batch, ratio.masked_fill(is_out, 0.0))
    check_same(
        our_loss(**arguments(setting, batch), spec=replace(setting.spec(), mis=(0.8, TIS))), theirs
    )


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("name", ["gspo", "gspo-luspo"])
def test_gspo_with_a_ratio_by_token_is_that_of_trl(name: str, impl: str) -> None:
    """vllm_importance_sampling_mode="token_truncate": factors that differ within a sequence."""
    setting, batch = (
        replace(LOSSES[name], tis=True, beta=0.3, bias_correction_kl=True),
        Batch.make(),
    )
    theirs = trl_loss(setting, batch, token_ratio(batch).clamp(max=TIS))
    kwargs = {**arguments(setting, batch), "sampler_logprob_T": batch.packed(batch.sampler_SL)}
    check_same(our_loss(**kwargs, spec=setting.spec(), impl=impl), theirs)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("change", ["plain", "asymmetric", "kl"])
@pytest.mark.parametrize("name", LOSSES)
def test_without_old_log_probs_the_loss_is_that_of_trl(name: str, change: str, impl: str) -> None:
    """TRL keeps none where the policy that sampled is the current one."""
    setting, batch = replace(LOSSES[name], **CHANGES[change]), Batch.make()
    kwargs = {**arguments(setting, batch), "old_logprob_T": None}
    check_same(
        our_loss(**kwargs, spec=setting.spec(), impl=impl),
        trl_loss(setting, replace(batch, old_SL=None), sampler_ratio=torch.ones(())),
    )
