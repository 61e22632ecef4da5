"""M2PO's bound and gradient, against numbers by hand and against masking token after token."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from flowkernels import LossSpec, divergent_log_ratios, m2po_clip, policy_loss, second_moment_bound
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

WIDE = LossSpec(clip_low=0.95, clip_high=20.0)


@pytest.mark.parametrize(
    ("threshold", "tau"),
    [
        (0.08, math.inf),  # the mean of all four squares is 0.075
        (0.05, 0.35),  # of three 0.0467
        (0.03, 0.25),  # of two 0.025
        (0.011, 0.15),  # of one 0.01
        (0.005, 0.05),  # none may stay
    ],
)
def test_bound_lies_between_the_largest_kept_and_the_smallest_dropped(
    threshold: float, tau: float
) -> None:
    assert second_moment_bound(torch.tensor([0.4, 0.1, 0.3, 0.2]), threshold) == pytest.approx(tau)


def test_nothing_to_bound() -> None:
    assert second_moment_bound(torch.zeros(0), 0.1) == math.inf
    assert m2po_clip(WIDE, torch.zeros(0), 0.1) == WIDE


def test_equal_ones_go_together() -> None:
    """One of the two would fit (0.05, with the other 0.063), but no clip can tell them apart."""
    assert second_moment_bound(torch.tensor([0.1, 0.3, 0.3]), 0.055) == pytest.approx(0.2)


def masked(size: list[float], threshold: float) -> list[float]:
    """The tokens left once the largest have gone, one after the other."""
    left = sorted(size)
    while left and sum(s * s for s in left) / len(left) > threshold:
        left.pop()
    return left


@given(st.lists(st.integers(1, 10**6), unique=True, max_size=30), st.integers(1, 2**20))
def test_kept_tokens_match_dropping_the_largest_one_by_one(
    sizes: list[int], threshold: int
) -> None:
    """Sizes are multiples of 2^-10, whose squares and sums are exact."""
    size = [s / 2**10 for s in sizes]
    tau = second_moment_bound(torch.tensor(size, dtype=torch.float64), threshold / 2**10)
    kept = [s for s in sorted(size) if s <= tau]
    exact = masked(size, threshold / 2**10)
    assert kept == exact or sum(s * s for s in kept) / max(len(kept), 1) == pytest.approx(
        threshold / 2**10
    ), "a tie of rounding"


def test_the_clip_is_never_wider_than_it_was() -> None:
    narrow = LossSpec(clip_low=0.1, clip_high=0.3)
    assert m2po_clip(narrow, torch.tensor([5.0, 6.0]), 1.0) == narrow
    bound = m2po_clip(WIDE, torch.tensor([0.1, 0.5]), 0.02)
    found = (1 - bound.clip_low, 1 + bound.clip_high)
    assert found == pytest.approx((math.exp(-0.3), math.exp(0.3)))
    assert m2po_clip(WIDE, torch.tensor([0.1, 1000.0]), 0.02).clip_high == 20.0, (
        "exp of the bound would not be a number"
    )


def test_divergent_log_ratios_are_those_of_counted_tokens_moving_away() -> None:
    log_ratio_T = torch.tensor([0.5, -0.5, 0.25, -0.25, 9.0, 0.0, 9.0])
    advantage_T = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0, 0.0])
    weight_T = torch.tensor([1.0, 1.0, 1.0, 0.1, 0.0, 1.0, 1.0])
    assert divergent_log_ratios(log_ratio_T, advantage_T, weight_T).tolist() == [0.5, 0.25]


@pytest.mark.parametrize("threshold", [1e-6, 0.02, 0.08, 100.0])
def test_the_gradient_is_that_of_the_ratio_without_the_tokens_that_go(threshold: float) -> None:
    """In fp64: sum weight mask r A, and nothing else."""
    rng = torch.Generator().manual_seed(7)
    logits_TV = torch.randn(40, 11, generator=rng, dtype=torch.float64, requires_grad=True)
    ids_T = torch.randint(11, (40,), generator=rng)
    logp_T = logits_TV.log_softmax(-1).gather(1, ids_T[:, None])[:, 0]
    old_T = (logp_T.detach() + 0.5 * torch.randn(40, generator=rng)).float()
    advantage_T = torch.randn(40, generator=rng)
    weight_T = torch.rand(40, generator=rng) * (torch.rand(40, generator=rng) > 0.2)
    log_ratio_T = logp_T - old_T
    away_T = (weight_T != 0) & (advantage_T * log_ratio_T.detach() > 0)
    left = masked(log_ratio_T.detach()[away_T].abs().tolist(), threshold)
    stays_T: Tensor = ~away_T | (log_ratio_T.detach().abs() <= (left[-1] if left else -1.0))
    (truth,) = torch.autograd.grad(
        -(weight_T * stays_T * log_ratio_T.exp() * advantage_T).sum(), logits_TV, retain_graph=True
    )
    assert (threshold < 1e-3) == (not left) and (threshold > 10) == bool(stays_T.all()), (
        "the cases are none, some and all"
    )

    tokens = {"advantage_T": advantage_T, "weight_T": weight_T, "old_logprob_T": old_T}
    spec = m2po_clip(
        WIDE, divergent_log_ratios(log_ratio_T.detach(), advantage_T, weight_T), threshold
    )
    out = policy_loss(logits_TV, ids_T, spec=spec, **tokens)
    (ours,) = torch.autograd.grad(out.loss, logits_TV)
    torch.testing.assert_close(ours, truth, rtol=1e-6, atol=1e-12)
    is_clipped = int(out.stats["clipped_low_sum"] + out.stats["clipped_high_sum"])
    assert is_clipped == int((~stays_T).sum())
    if threshold < 10:
        unbound = policy_loss(logits_TV, ids_T, spec=replace(WIDE, clip_low=1.0), **tokens)
        assert not torch.allclose(torch.autograd.grad(unbound.loss, logits_TV)[0], truth)
