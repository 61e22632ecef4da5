"""The statistics of a policy loss against direct computation, for every kind of loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from flowkernels import LossSpec, policy_loss, token_loss
from kernel_truth import Batch, counted, counted_tokens, on_device, plain_rows, random_batch

WAYS = [("torch", False), ("triton", False), ("torch", True), ("triton", True)]
WAY_IDS = ["fused-torch", "fused-triton", "two-pass-torch", "two-pass-triton"]
NAMES = {
    *(
        "num_tokens_sum",
        "weight_sum",
        "entropy_sum",
        "kl_sum",
        "ratio_sum",
        "ratio_max",
        "ratio_min",
    ),
    *("clipped_low_sum", "clipped_high_sum", "mismatch_sum"),
}


def statistics_of(spec: LossSpec, batch: Batch, impl: str, two_pass: bool) -> dict[str, Any]:
    """Statistics on the host. A function as the spec takes the two-pass way."""
    some_spec = (lambda tokens: token_loss(spec, tokens)) if two_pass else spec
    moved = on_device(batch, impl)
    moved["logits_TV"] = moved["logits_TV"].clone().requires_grad_()
    stats = policy_loss(**moved, spec=some_spec, impl=impl).stats
    assert all(value.dtype == torch.float32 for value in stats.values())
    return {name: value.tolist() for name, value in stats.items()}


@pytest.mark.parametrize(("impl", "two_pass"), WAYS, ids=WAY_IDS)
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_statistics_match_direct_computation(kl_coef: float, impl: str, two_pass: bool) -> None:
    spec = LossSpec(clip_low=0.2, clip_high=0.3, dual_clip=2.0, kl="k2", kl_coef=kl_coef)
    batch = random_batch(140, spread=0.4)
    stats = statistics_of(spec, batch, impl, two_pass)
    tokens = counted_tokens(batch)
    logp, entropy, _ = plain_rows(
        batch["logits_TV"][counted(batch)].double(), tokens["target_ids_T"]
    )
    old, ref, advantage = (
        tokens[key].double() for key in ("old_logprob_T", "ref_logprob_T", "advantage_T")
    )
    ratio = (logp - old).exp()
    low = (advantage < 0) & (ratio < 0.8)
    high = ((advantage > 0) & (ratio > 1.3)) | ((advantage < 0) & (ratio > 2.0))
    expected = {
        "num_tokens_sum": len(logp),
        "weight_sum": tokens["weight_T"].double().sum().item(),
        "entropy_sum": entropy.sum().item(),
        "kl_sum": ((ref - logp) ** 2 / 2).sum().item(),
        "ratio_sum": ratio.sum().item(),
        "ratio_max": ratio.max().item(),
        "ratio_min": ratio.min().item(),
        "clipped_low_sum": low.sum().item(),
        "clipped_high_sum": high.sum().item(),
        "mismatch_sum": (logp - old).abs().sum().item(),
    }
    assert set(stats) == NAMES
    assert stats == pytest.approx(expected, rel=1e-4)
    assert 5 < expected["clipped_low_sum"] < 50 and 5 < expected["clipped_high_sum"] < 50
    assert expected["ratio_max"] > 2.0 and expected["ratio_min"] < 0.5


@pytest.mark.parametrize(("impl", "two_pass"), WAYS, ids=WAY_IDS)
def test_cispo_counts_bounded_ratios_as_clipped(impl: str, two_pass: bool) -> None:
    batch = random_batch(40)
    stats = statistics_of(LossSpec("cispo", clip_high=0.1), batch, impl, two_pass)
    tokens = counted_tokens(batch)
    logp, _, _ = plain_rows(batch["logits_TV"][counted(batch)].double(), tokens["target_ids_T"])
    bounded = (logp - tokens["old_logprob_T"]).exp() > 1.1
    assert stats["clipped_high_sum"] == bounded.sum() > 3 and stats["clipped_low_sum"] == 0


def test_gspo_counts_the_ratio_of_the_sequence(impl: str) -> None:
    batch = random_batch(40)
    stats = statistics_of(LossSpec("gspo"), batch, impl, two_pass=False)
    tokens = counted_tokens(batch)
    logp, _, _ = plain_rows(batch["logits_TV"][counted(batch)].double(), tokens["target_ids_T"])
    log_ratio = logp - tokens["old_logprob_T"]
    sequence = tokens["sequence_T"]
    mean = torch.stack([log_ratio[sequence == s].mean() for s in sequence.tolist()])
    assert stats["mismatch_sum"] == pytest.approx(mean.abs().sum().item(), rel=1e-4)
    assert (
        stats["ratio_max"] == pytest.approx(mean.max().exp().item(), rel=1e-5)
        and len(mean.unique()) == 3
    )


@pytest.mark.parametrize(("impl", "two_pass"), WAYS, ids=WAY_IDS)
def test_the_kl_statistic_without_a_reference_is_that_to_the_old_policy(
    impl: str, two_pass: bool
) -> None:
    batch = random_batch()
    stats = statistics_of(LossSpec(kl="k2"), {**batch, "ref_logprob_T": None}, impl, two_pass)
    tokens = counted_tokens(batch)
    logp, _, _ = plain_rows(batch["logits_TV"][counted(batch)].double(), tokens["target_ids_T"])
    u = tokens["old_logprob_T"] - logp
    assert stats["kl_sum"] == pytest.approx((u.exp() - 1 - u).sum().item(), rel=1e-4)


@pytest.mark.parametrize(("impl", "two_pass"), WAYS, ids=WAY_IDS)
def test_small_policy_changes_have_a_kl_that_is_not_rounding(impl: str, two_pass: bool) -> None:
    """k3 of a log-ratio of 4e-4 is 8e-8, about what exp(u) - 1 rounds by. (The log-ratio itself is
    known to 3e-7.)
    """
    batch = random_batch(20)
    rows, u = counted(batch), torch.linspace(3e-4, 6e-4, 20)
    batch |= {"logits_TV": torch.zeros(20, 17), "target_ids_T": torch.where(rows, 0, -1)}
    batch |= {"old_logprob_T": u - math.log(17), "ref_logprob_T": None}
    stats = statistics_of(LossSpec(), batch, impl, two_pass)
    exact = u[rows].double()
    assert stats["kl_sum"] == pytest.approx((exact.expm1() - exact).sum().item(), rel=5e-3)


@pytest.mark.parametrize(("impl", "two_pass"), WAYS, ids=WAY_IDS)
def test_a_ratio_that_is_no_number_shows_up_in_the_sums(impl: str, two_pass: bool) -> None:
    batch = random_batch(20)
    is_first = torch.arange(20) < 4
    batch |= {"weight_T": is_first.float(), "target_ids_T": batch["target_ids_T"].clamp(min=0)}
    batch["old_logprob_T"][:4] = torch.tensor([-60.0, 70.0, math.nan, -80.0])
    stats = statistics_of(LossSpec(), batch, impl, two_pass)
    assert stats["num_tokens_sum"] == 4
    assert all(
        math.isnan(stats[name]) for name in ("ratio_sum", "ratio_max", "ratio_min", "mismatch_sum")
    )


@pytest.mark.parametrize(("impl", "two_pass"), WAYS, ids=WAY_IDS)
def test_where_no_token_counts_sums_are_zero(impl: str, two_pass: bool) -> None:
    batch = random_batch(6)
    for nothing in ({"weight_T": torch.zeros(6)}, {"target_ids_T": torch.full((6,), -1)}):
        stats = statistics_of(LossSpec(), {**batch, **nothing}, impl, two_pass)
        assert (stats.pop("ratio_max"), stats.pop("ratio_min")) == (-math.inf, math.inf)
        assert set(stats.values()) == {0.0}


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_tokens_that_mis_drops_count_in_no_statistic(impl: str) -> None:
    batch = random_batch(20)
    behind = (batch["old_logprob_T"] - batch["sampler_logprob_T"]).exp()
    dropped = counted(batch) & ((behind < 0.8) | (behind > 1.2))
    assert 2 < dropped.sum() < counted(batch).sum() - 2
    masked = statistics_of(LossSpec(mis=(0.8, 1.2)), batch, impl, two_pass=False)
    batch["weight_T"] = torch.where(dropped, 0.0, batch["weight_T"])
    assert masked == statistics_of(LossSpec(), batch, impl, two_pass=False)
