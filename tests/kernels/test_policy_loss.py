"""The fused loss against autograd of a plain fp64 formula, and the statistics and log-probs against direct computation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from flowkernels import LossSpec, logprobs, policy_loss
from torch import Tensor

SPECS = {
    "clip": LossSpec(),
    "clip-higher": LossSpec(clip_low=0.2, clip_high=0.3),
    "dual": LossSpec(clip_low=0.2, clip_high=0.3, dual_clip=2.0),
    "nll": LossSpec("nll"),
    "k1": LossSpec(kl="k1", kl_coef=0.4),
    "k2": LossSpec(kl="k2", kl_coef=0.4),
    "k3": LossSpec(kl="k3", kl_coef=0.4),
    "entropy": LossSpec(entropy_coef=0.3),
    "released": LossSpec(clip_low=0.2, clip_high=0.3, dual_clip=3.0, kl_coef=0.001),
    "all": LossSpec(clip_low=0.1, clip_high=0.4, dual_clip=2.0, kl="k2", kl_coef=0.2, entropy_coef=0.1),
    "nll-all": LossSpec("nll", kl="k1", kl_coef=0.2, entropy_coef=-0.1),
}
NUM_STATS = 8


def random_batch(num_tokens: int = 60, vocab: int = 17, temperature: float = 1.0, spread: float = 0.5) -> dict[str, Tensor]:
    """Logits and tokens whose ratios lie on both sides of every clip; some weights are 0, some negative."""
    rng = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(num_tokens, vocab, generator=rng)
    targets = torch.randint(vocab, (num_tokens,), generator=rng)
    logp = (logits / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    noise = torch.randn(4, num_tokens, generator=rng)
    weight = noise[3].clone()
    weight[::5] = 0
    return {
        "logits_TV": logits,
        "target_ids_T": targets,
        "advantage_T": noise[0],
        "old_logprob_T": logp + spread * noise[1],
        "ref_logprob_T": logp + spread * noise[2],
        "weight_T": weight,
    }


def plain_loss(spec: LossSpec, logits: Tensor, temperature: float, batch: dict[str, Tensor]) -> Tensor:
    """sum_T w L, token by token, in the dtype of the logits for the softmax and in fp64 for the rest. Rows of weight 0 are left out."""
    rows = batch["weight_T"] != 0
    targets = batch["target_ids_T"][rows]
    advantage, old, ref, weight = (batch[k][rows].double() for k in ("advantage_T", "old_logprob_T", "ref_logprob_T", "weight_T"))
    logp_all = torch.log_softmax(logits[rows] / temperature, dim=-1)
    entropy = -(logp_all.exp() * logp_all).sum(-1).double()
    logp = logp_all[torch.arange(len(targets)), targets].double()
    if spec.policy == "nll":
        loss = -advantage * logp
    else:
        ratio = torch.exp(logp - old)
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high) * advantage)
        if spec.dual_clip is not None:
            loss = torch.where(advantage < 0, torch.minimum(loss, -spec.dual_clip * advantage), loss)
    u = ref - logp
    kl = {"k1": -u, "k2": u**2 / 2, "k3": torch.exp(u) - 1 - u}[spec.kl]
    return (weight * (loss + spec.kl_coef * kl - spec.entropy_coef * entropy)).sum()


def truth(spec: LossSpec, batch: dict[str, Tensor], temperature: float = 1.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the plain formula; fp64 is the truth, bf16 what a plain torch path would give."""
    logits = batch["logits_TV"].detach().to(dtype, copy=True).requires_grad_()
    loss = plain_loss(spec, logits, temperature, batch)
    loss.backward()
    return loss.detach(), logits.grad.double()


def ours(spec: LossSpec, batch: dict[str, Tensor], temperature: float = 1.0, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    logits = batch["logits_TV"].clone().requires_grad_()
    out = policy_loss(**{**batch, "logits_TV": logits}, spec=spec, temperature=temperature)
    (out.loss * scale).backward()
    assert out.loss.dtype == torch.float32 and logits.grad.dtype == logits.dtype
    return out.loss.detach(), logits.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("name", SPECS)
def test_loss_and_gradient_match_fp64_autograd(name: str, temperature: float) -> None:
    batch = random_batch(temperature=temperature)
    loss, gradient = ours(SPECS[name], batch, temperature)
    true_loss, true_gradient = truth(SPECS[name], batch, temperature)
    assert loss.item() == pytest.approx(true_loss.item(), rel=1e-5, abs=1e-5)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-4, atol=2e-6)


def test_the_gradient_is_scaled_by_what_follows_the_loss() -> None:
    batch = random_batch()
    _, gradient = ours(SPECS["all"], batch, scale=-0.37)
    torch.testing.assert_close(gradient.double(), -0.37 * truth(SPECS["all"], batch)[1], rtol=1e-4, atol=2e-6)


def test_the_gradient_sums_to_zero_over_the_vocabulary() -> None:
    """Adding a constant to all logits changes nothing, whatever the loss."""
    _, gradient = ours(SPECS["all"], random_batch())
    assert gradient.abs().sum() > 1
    assert gradient.sum(-1).abs().max() < 1e-6


@pytest.mark.parametrize("name", SPECS)
def test_rows_of_weight_0_change_nothing(name: str) -> None:
    """Whatever an ignored row holds, its gradient is 0 and loss and statistics are those of the other rows alone."""
    batch = random_batch()
    rows = batch["weight_T"] != 0
    assert 0 < rows.sum() < len(rows)
    alone = policy_loss(**{name: value[rows] for name, value in batch.items()}, spec=SPECS[name])
    ignored = (~rows).nonzero()[:, 0]
    for index, value in zip(ignored, [math.nan, math.inf, -math.inf, 1e30] * 3, strict=True):
        for key in ("old_logprob_T", "ref_logprob_T", "advantage_T"):
            batch[key][index] = value
    batch["logits_TV"].requires_grad_()
    out = policy_loss(**batch, spec=SPECS[name])
    out.loss.backward()
    assert out.loss.item() == pytest.approx(alone.loss.item(), rel=1e-6)
    assert (batch["logits_TV"].grad[~rows] == 0).all()
    torch.testing.assert_close(batch["logits_TV"].grad.double(), truth(SPECS[name], batch)[1], rtol=1e-4, atol=2e-6)
    for stat, value in out.stats.items():
        assert value.item() == pytest.approx(alone.stats[stat].item(), rel=1e-5), stat


@pytest.mark.parametrize("name", ["clip", "nll", "all"])
def test_no_tokens_give_a_zero_loss(name: str) -> None:
    batch = {key: value[:0] for key, value in random_batch().items()}
    loss, gradient = ours(SPECS[name], batch)
    assert loss.item() == 0 and gradient.shape == (0, 17)
    stats = policy_loss(**batch, spec=SPECS[name]).stats
    assert all(value.item() == 0 for key, value in stats.items() if key.endswith("_sum"))
    assert not any(value.isnan() for value in stats.values())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", SPECS)
def test_bf16_logits_lose_less_than_plain_torch_does(name: str, temperature: float) -> None:
    """Largest error of the gradient at most that of the plain bf16 path plus the rounding of the result (2^-9 of its largest entry)."""
    batch = random_batch(300, temperature=temperature)
    batch["logits_TV"] = batch["logits_TV"].bfloat16()
    true_loss, true_gradient = truth(SPECS[name], batch, temperature)
    plain_loss_, plain_gradient = truth(SPECS[name], batch, temperature, torch.bfloat16)
    loss, gradient = ours(SPECS[name], batch, temperature)
    assert (loss - true_loss).abs() <= (plain_loss_ - true_loss).abs() + 1e-5 * true_loss.abs() + 1e-4
    floor = 2**-9 * true_gradient.abs().max()
    assert (gradient - true_gradient).abs().max() <= (plain_gradient - true_gradient).abs().max() + floor
    # All arithmetic is fp32: what is lost is the rounding of the result to bf16 (half an ulp, 2^-9) and nothing else.
    assert ((gradient - true_gradient).abs() <= 2**-8 * true_gradient.abs() + 1e-5).all()


def test_fp16_logits_get_an_fp16_gradient() -> None:
    batch = random_batch()
    batch["logits_TV"] = batch["logits_TV"].half()
    _, gradient = ours(SPECS["all"], batch)
    assert gradient.dtype == torch.float16
    torch.testing.assert_close(gradient.double(), truth(SPECS["all"], batch)[1], rtol=2**-10, atol=1e-5)


@pytest.mark.parametrize("size", [30.0, 1e4, 1e30])
@pytest.mark.parametrize("name", ["clip", "nll", "entropy", "all"])
def test_extreme_logits(name: str, size: float) -> None:
    """One-hot distributions, hit or missed by the target: everything stays finite and right."""
    logits = torch.zeros(4, 6)
    logits[0, 2], logits[1, 2], logits[2], logits[3, :3] = size, size, -size, size
    targets = torch.tensor([2, 3, 0, 1])
    logp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    advantage, weight, old = torch.tensor([1.0, -1.0, 2.0, 1.0]), torch.ones(4), logp + 0.05
    tokens = {"advantage_T": advantage, "weight_T": weight, "old_logprob_T": old, "ref_logprob_T": old}
    batch = {"logits_TV": logits, "target_ids_T": targets, **tokens}
    spec = replace(SPECS[name], kl="k3")
    loss, gradient = ours(spec, batch)
    assert loss.isfinite() and gradient.isfinite().all()
    if size < 1e5:  # beyond, old + 0.05 is no longer a number of its own
        true_loss, true_gradient = truth(spec, batch)
        assert loss.item() == pytest.approx(true_loss.item(), rel=1e-3)
        torch.testing.assert_close(gradient.double(), true_gradient, rtol=2e-3, atol=1e-6)
    out = logprobs(logits, targets)
    # The hit, the miss, the uniform row, and the row of three equal peaks.
    torch.testing.assert_close(out.logprob_T, torch.tensor([0.0, -size, -math.log(6), -math.log(3)]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.entropy_T, torch.tensor([0.0, 0.0, math.log(6), math.log(3)]), rtol=1e-6, atol=1e-6)


def test_statistics_match_direct_computation() -> None:
    spec, batch = LossSpec(clip_low=0.2, clip_high=0.3, dual_clip=2.0, kl="k3", kl_coef=0.1), random_batch(400)
    stats = {name: value.item() for name, value in policy_loss(**batch, spec=spec).stats.items()}
    rows = batch["weight_T"] != 0
    z, targets = batch["logits_TV"].double()[rows], batch["target_ids_T"][rows]
    old, ref, advantage = (batch[key][rows].double() for key in ("old_logprob_T", "ref_logprob_T", "advantage_T"))
    logp_all = z.log_softmax(-1)
    logp = logp_all[torch.arange(len(z)), targets]
    ratio, u = (logp - old).exp(), ref - logp
    too_good, too_bad, bounded = ratio > 1.3, ratio < 0.8, ratio > 2.0
    clipped = int(((advantage > 0) & too_good).sum() + ((advantage < 0) & (too_bad | bounded)).sum())
    expected = {
        "num_tokens_sum": int(rows.sum()),
        "entropy_sum": torch.distributions.Categorical(logits=z).entropy().sum().item(),
        "kl_sum": (u.exp() - 1 - u).sum().item(),
        "ratio_sum": ratio.sum().item(),
        "ratio_max": ratio.max().item(),
        "ratio_min": ratio.min().item(),
        "clipped_sum": clipped,
        "mismatch_sum": (logp - old).abs().sum().item(),
    }
    assert stats == pytest.approx(expected, rel=1e-4)
    assert 50 < clipped < 250 and expected["ratio_max"] > 2.0 and expected["ratio_min"] < 0.5
    assert len(stats) == NUM_STATS


def test_the_kl_statistic_without_a_reference_is_that_to_the_old_policy() -> None:
    batch = random_batch()
    batch["ref_logprob_T"] = None
    out = policy_loss(**batch, spec=LossSpec(kl="k2"))
    u = (batch["old_logprob_T"] - out.logprob_T)[batch["weight_T"] != 0]
    assert out.stats["kl_sum"].item() == pytest.approx((u.exp() - 1 - u).sum().item(), rel=1e-4)


def test_only_the_loss_carries_a_gradient() -> None:
    batch = random_batch()
    batch["logits_TV"].requires_grad_()
    out = policy_loss(**batch, spec=SPECS["all"])
    assert out.loss.requires_grad and out.loss.shape == ()
    assert not any(x.requires_grad for x in (out.logprob_T, out.entropy_T, *out.stats.values()))
    scores = logprobs(batch["logits_TV"], batch["target_ids_T"])
    assert not any(x.requires_grad for x in (scores.logprob_T, scores.entropy_T, scores.lse_T))


@pytest.mark.parametrize("temperature", [1.0, 0.3, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_match_fp64(temperature: float, dtype: torch.dtype) -> None:
    logits, targets = random_batch()["logits_TV"].to(dtype), random_batch()["target_ids_T"]
    z = logits.double() / temperature
    out = logprobs(logits, targets, temperature=temperature)
    both = policy_loss(**{**random_batch(), "logits_TV": logits}, spec=SPECS["nll"], temperature=temperature)
    logp = z.log_softmax(-1)[torch.arange(len(z)), targets]
    entropy = torch.distributions.Categorical(logits=z).entropy()
    for ours_T, true_T in [(out.logprob_T, logp), (out.entropy_T, entropy), (out.lse_T, z.logsumexp(-1))]:
        assert ours_T.dtype == torch.float32
        torch.testing.assert_close(ours_T.double(), true_T, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(both.logprob_T.double(), logp, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(both.entropy_T.double(), entropy, rtol=1e-6, atol=4e-6)


def test_the_inputs_are_left_as_they_are() -> None:
    batch = random_batch()
    before = {name: value.clone() for name, value in batch.items()}
    logprobs(batch["logits_TV"], batch["target_ids_T"])
    ours(SPECS["all"], batch)
    policy_loss(**batch, spec=SPECS["all"])
    assert all(torch.equal(before[name], batch[name]) for name in before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"impl": "cuda"}, "impl='cuda'"),
        ({"logits_TV": torch.zeros(60)}, r"logits_TV .*\(60,\)"),
        ({"logits_TV": torch.zeros(60, 17, dtype=torch.int64)}, r"logits_TV .*int64"),
        ({"target_ids_T": torch.zeros(59, dtype=torch.int64)}, r"target_ids_T .*\[60\].*\(59,\)"),
        ({"target_ids_T": torch.zeros(60, dtype=torch.int32)}, r"target_ids_T .*int32"),
        ({"temperature": 0.0}, r"temperature=0\.0"),
        ({"temperature": -1.0}, r"temperature=-1\.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"advantage_T": torch.zeros(1)}, r"advantage_T .*\[60\].*\(1,\)"),
        ({"advantage_T": torch.zeros(60, dtype=torch.float64)}, r"advantage_T .*float32.*float64"),
        ({"weight_T": torch.zeros(60, 1)}, r"weight_T .*\(60, 1\)"),
        ({"old_logprob_T": torch.zeros(61)}, "old_logprob_T"),
        ({"ref_logprob_T": torch.zeros(())}, "ref_logprob_T"),
        ({"old_logprob_T": None}, "needs old_logprob_T"),
        ({"ref_logprob_T": None}, "needs ref_logprob_T"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(**{**random_batch(), "spec": SPECS["all"], **changes})
    if not set(changes) - {"impl", "logits_TV", "target_ids_T", "temperature"}:
        few = {name: value for name, value in random_batch().items() if name in ("logits_TV", "target_ids_T")}
        with pytest.raises(ValueError, match=message):
            logprobs(**{**few, **changes})


def test_a_masked_row_of_nan_logits_gets_a_zero_gradient() -> None:
    logits = torch.randn(3, 5)
    logits[1] = math.nan
    logits.requires_grad_()
    weight = torch.tensor([1.0, 0.0, 1.0])
    out = policy_loss(logits, torch.tensor([0, 1, 2]), spec=LossSpec("nll", entropy_coef=0.1), advantage_T=torch.ones(3), weight_T=weight)
    out.loss.backward()
    assert logits.grad is not None and out.loss.isfinite()
    assert (logits.grad[1] == 0).all() and (logits.grad[[0, 2]] != 0).all()
