"""The statistics of a policy loss against direct computation, for every kind of loss."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from flowkernels import LossSpec, token_loss
from kernel_truth import IMPLS, Batch, counted, counted_tokens, random_batch
from rows import FORMS, batch_of, ours, squared, truth

CLIP = LossSpec(clip_low=0.2, clip_high=0.3, dual_clip=2.0, kl="k2")
SPECS = {
    "clip": CLIP,
    "kl": replace(CLIP, kl_coef=0.1),
    "cispo": LossSpec("cispo", clip_high=0.1),
    "gspo": LossSpec("gspo", clip_low=0.02, clip_high=0.02),
}
WAYS = ("fused", "two-pass", "chunks")
"""By the kernel of the loss, by a function of tokens, and over the chunks of a head."""
impls = pytest.mark.parametrize("impl", IMPLS)
ways = pytest.mark.parametrize("way", WAYS[:2])


def statistics_of(spec: LossSpec, batch: Batch, impl: str, way: str) -> dict[str, float]:
    """On the host. A function as the spec takes the two-pass way."""
    given = partial(token_loss, spec) if way == "two-pass" else spec
    options = FORMS["chunks"] if way == "chunks" else {}
    stats = ours(given, batch, impl, **options)[0].stats
    assert all(value.dtype == torch.float32 for value in stats.values())
    return {name: value.item() for name, value in stats.items()}


CASES = [
    *(("torch", name, way, has_ref) for name in SPECS for way in WAYS for has_ref in (True, False)),
    *(
        ("triton", name, way, name == "clip")
        for name in ("clip", "cispo", "gspo")
        for way in WAYS[:2]
    ),
]


@pytest.mark.parametrize(("impl", "name", "way", "has_ref"), CASES)
def test_statistics_match_direct_computation(impl: str, name: str, way: str, has_ref: bool) -> None:
    """Without a reference the KL is that to the old policy, k3 whatever the spec says."""
    spec, batch = SPECS[name], batch_of("head" if way == "chunks" else "logits", 40)
    if not has_ref:
        batch["ref_logprob_T"], spec = None, replace(spec, kl_coef=0.0)
    stats, (logp, entropy, _) = statistics_of(spec, batch, impl, way), truth(spec, batch)[2]
    tokens = counted_tokens(batch)
    old, advantage = tokens["old_logprob_T"].double(), tokens["advantage_T"]
    log_ratio, u = logp - old, tokens.get("ref_logprob_T", old) - logp
    if name == "gspo":
        is_alike = (tokens["sequence_T"][:, None] == tokens["sequence_T"]).double()
        log_ratio = is_alike @ log_ratio / is_alike.sum(1)
        assert len(log_ratio.unique()) >= 3
    ratio = log_ratio.exp()
    low = (advantage < 0) & (ratio < 1 - spec.clip_low)
    high = (advantage > 0) & (ratio > 1 + spec.clip_high)
    high |= (advantage < 0) & (ratio > (spec.dual_clip or math.inf))
    if name == "cispo":  # bounded, whatever the advantage
        low, high = low & False, ratio > 1.1
    expected = {
        "num_tokens_sum": torch.tensor(len(logp)),
        "weight_sum": tokens["weight_T"].sum(),
        "entropy_sum": entropy.sum(),
        "kl_sum": (u**2 / 2 if has_ref and spec.kl == "k2" else u.exp() - 1 - u).sum(),
        "ratio_sum": ratio.sum(),
        "ratio_max": ratio.max(),
        "ratio_min": ratio.min(),
        "clipped_low_sum": low.sum(),
        "clipped_high_sum": high.sum(),
        "mismatch_sum": log_ratio.abs().sum(),
    }
    assert stats == pytest.approx({key: x.item() for key, x in expected.items()}, rel=1e-4)
    assert high.sum() > 2 and (name == "cispo" or low.sum() > 2)


@impls
def test_a_loss_of_ones_own_says_what_it_clips_and_its_kl(impl: str) -> None:
    batch = random_batch()
    stats = ours(squared, batch, impl)[0].stats
    difference = truth(squared, batch)[2][0] - counted_tokens(batch)["old_logprob_T"]
    assert stats["clipped_high_sum"].item() == (difference > 0.5).sum() > 0
    assert stats["kl_sum"].item() == pytest.approx((difference**2).sum().item() / 2, rel=1e-4)


@ways
@impls
def test_small_policy_changes_have_a_kl_that_is_not_rounding(impl: str, way: str) -> None:
    """k3 of 4e-4 is 8e-8, about what exp(u) - 1 rounds by."""
    batch = random_batch(20)
    rows, u = counted(batch), torch.linspace(3e-4, 6e-4, 20)
    batch |= {"logits_TV": torch.zeros(20, 17), "target_ids_T": torch.where(rows, 0, -1)}
    batch |= {"old_logprob_T": u - math.log(17), "ref_logprob_T": None}
    exact = u[rows].double()
    stats = statistics_of(LossSpec(), batch, impl, way)
    assert stats["kl_sum"] == pytest.approx((exact.expm1() - exact).sum().item(), rel=5e-3)


@ways
@impls
def test_a_ratio_that_is_no_number_shows_up_in_the_sums(impl: str, way: str) -> None:
    batch = random_batch(20)
    is_first = torch.arange(20) < 4
    batch |= {"weight_T": is_first.float(), "target_ids_T": batch["target_ids_T"].clamp(min=0)}
    batch["old_logprob_T"][:4] = torch.tensor([-60.0, 70.0, math.nan, -80.0])
    stats = statistics_of(LossSpec(), batch, impl, way)
    assert stats["num_tokens_sum"] == 4
    for name in ("ratio_sum", "ratio_max", "ratio_min", "mismatch_sum"):
        assert math.isnan(stats[name])


@ways
@impls
def test_where_no_token_counts_sums_are_zero(impl: str, way: str) -> None:
    for nothing in ({"weight_T": torch.zeros(6)}, {"target_ids_T": torch.full((6,), -1)}):
        stats = statistics_of(LossSpec(), random_batch(6) | nothing, impl, way)
        assert (stats.pop("ratio_max"), stats.pop("ratio_min")) == (-math.inf, math.inf)
        assert set(stats.values()) == {0.0}


@impls
def test_tokens_that_mis_drops_count_in_no_statistic(impl: str) -> None:
    batch = random_batch(20)
    behind = (batch["old_logprob_T"] - batch["sampler_logprob_T"]).exp()
    dropped = counted(batch) & ((behind < 0.8) | (behind > 1.2))
    assert 2 < dropped.sum() < counted(batch).sum() - 2
    masked = statistics_of(LossSpec(mis=(0.8, 1.2)), batch, impl, "fused")
    batch["weight_T"] = torch.where(dropped, 0.0, batch["weight_T"])
    assert masked == statistics_of(LossSpec(), batch, impl, "fused")
