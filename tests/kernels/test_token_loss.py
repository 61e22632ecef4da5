"""Token losses against formulas written here case by case, and their derivatives against autograd and finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flowkernels import LossSpec, TokenLoss, token_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

SPECS = {
    "clip": LossSpec(),
    "clip-higher": LossSpec(clip_low=0.2, clip_high=0.3),
    "clip-lower": LossSpec(clip_low=0.4, clip_high=0.1),
    "dual": LossSpec(clip_low=0.2, clip_high=0.3, dual_clip=3.0),
    "clip-k1": LossSpec(kl="k1", kl_coef=0.3),
    "clip-k2": LossSpec(kl="k2", kl_coef=0.3),
    "clip-k3": LossSpec(kl="k3", kl_coef=0.3),
    "nll": LossSpec("nll"),
    "nll-k3-entropy": LossSpec("nll", kl_coef=0.1, entropy_coef=0.05),
    "all": LossSpec(clip_low=0.1, clip_high=0.4, dual_clip=2.0, kl_coef=0.2, entropy_coef=-0.03),
    "small-limit": LossSpec(kl_coef=0.2, log_ratio_limit=0.5, clip_high=5.0, clip_low=1.0),
}


def plain_loss(spec: LossSpec, logp: Tensor, entropy: Tensor, advantage: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """The objective by its cases: for A > 0 the ratio pays up to 1 + high, for A < 0 it costs from 1 - low on and up to the dual bound."""
    limit = spec.log_ratio_limit
    if spec.policy == "nll":
        loss = -advantage * logp
    else:
        ratio = torch.exp((logp - old).clamp(-limit, limit))
        is_good, one = advantage > 0, torch.ones_like(advantage)
        least = torch.where(is_good, 0 * one, (1 - spec.clip_low) * one)
        most = torch.where(is_good, (1 + spec.clip_high) * one, (spec.dual_clip or float("inf")) * one)
        loss = -advantage * ratio.clamp(least, most)
    u = (ref - logp).clamp(-limit, limit)
    kl = {"k1": -u, "k2": u * u / 2, "k3": torch.exp(u) - 1 - u}[spec.kl]
    return loss + spec.kl_coef * kl - spec.entropy_coef * entropy


def random_tokens(num_tokens: int = 200, spread: float = 0.7) -> dict[str, Tensor]:
    """fp64 tokens on both sides of every clip."""
    rng = torch.Generator().manual_seed(0)
    logp = -3 * torch.rand(num_tokens, generator=rng, dtype=torch.float64)
    noise = torch.randn(4, num_tokens, generator=rng, dtype=torch.float64)
    return {
        "logprob_T": logp,
        "entropy_T": noise[0].abs(),
        "advantage_T": noise[1],
        "old_logprob_T": logp + spread * noise[2],
        "ref_logprob_T": logp + spread * noise[3],
    }


def compare(spec: LossSpec, tokens: dict[str, Tensor]) -> TokenLoss:
    """Loss and both derivatives against autograd of the plain formula."""
    logp, entropy = tokens["logprob_T"].clone().requires_grad_(), tokens["entropy_T"].clone().requires_grad_()
    truth = plain_loss(spec, logp, entropy, tokens["advantage_T"], tokens["old_logprob_T"], tokens["ref_logprob_T"])
    dlogp, dentropy = torch.autograd.grad(truth.sum(), (logp, entropy), allow_unused=True)
    ours = token_loss(spec, **tokens)
    torch.testing.assert_close(ours.loss_T, truth.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.dlogprob_T, dlogp, rtol=1e-12, atol=1e-12)
    assert (ours.dentropy_T is None) == (spec.entropy_coef == 0)
    if ours.dentropy_T is not None:
        torch.testing.assert_close(ours.dentropy_T, dentropy, rtol=0, atol=0)
    return ours


@pytest.mark.parametrize("name", SPECS)
def test_loss_and_derivatives_match_the_plain_formula(name: str) -> None:
    spec, tokens = SPECS[name], random_tokens()
    ours = compare(spec, tokens)
    torch.testing.assert_close(ours.log_ratio_T, tokens["logprob_T"] - tokens["old_logprob_T"], rtol=0, atol=0)
    if spec.policy == "clip" and name != "small-limit":
        assert 20 < int(ours.is_clipped_T.sum()) < 180, "the case is to have clipped and free tokens"


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    policy=st.sampled_from(["clip", "nll"]),
    kl=st.sampled_from(["k1", "k2", "k3"]),
    clip_low=st.floats(0, 1),
    clip_high=st.floats(0, 3),
    dual_clip=st.none() | st.floats(1.01, 10),
    coefs=st.tuples(st.floats(0, 2), st.floats(-2, 2)),
    numbers=st.lists(st.tuples(st.floats(-9, 0), st.floats(-3, 3), st.floats(-9, 0), st.floats(-9, 0)), min_size=1, max_size=5),
)
def test_any_loss_matches_the_plain_formula(policy: Any, kl: Any, coefs: Any, numbers: Any, **options: Any) -> None:
    spec = LossSpec(policy, kl=kl, kl_coef=coefs[0], entropy_coef=coefs[1], log_ratio_limit=6.0, **options)
    logp, advantage, old, ref = torch.tensor(numbers, dtype=torch.float64).T
    # At a kink the derivative is a matter of taste (autograd and we may pick either side).
    ratio = torch.exp(logp - old)
    for kink in (1 - spec.clip_low, 1 + spec.clip_high, spec.dual_clip or 0.0):
        advantage = torch.where((ratio - kink).abs() < 1e-9, 0.0, advantage)
    tokens = {"logprob_T": logp, "entropy_T": -logp, "advantage_T": advantage, "old_logprob_T": old, "ref_logprob_T": ref}
    compare(spec, tokens)


class _Differentiated(torch.autograd.Function):
    """The token loss with its hand-written derivatives as the backward pass, for gradcheck."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, entropy: Tensor, spec: LossSpec, tokens: dict[str, Tensor]) -> Tensor:
        out = token_loss(spec, logp, entropy, tokens["advantage_T"], tokens["old_logprob_T"], tokens["ref_logprob_T"])
        ctx.derivatives = out.dlogprob_T, torch.zeros_like(entropy) if out.dentropy_T is None else out.dentropy_T
        return out.loss_T

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        return dloss * ctx.derivatives[0], dloss * ctx.derivatives[1], None, None


@pytest.mark.parametrize("name", SPECS)
def test_derivatives_match_finite_differences(name: str) -> None:
    tokens = random_tokens(40)
    inputs = tokens["logprob_T"].clone().requires_grad_(), tokens["entropy_T"].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, h: _Differentiated.apply(x, h, SPECS[name], tokens), inputs)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "dlogp", "is_clipped"),
    [
        # A = 2, eps 0.2 / 0.3: -min(r 2, clip(r, 0.8, 1.3) 2)
        (2.0, 1.0, -2.0, -2.0, False),
        (2.0, 1.25, -2.5, -2.5, False),  # below 1.3
        (2.0, 1.5, -2.6, 0.0, True),  # 2 * 1.3
        (2.0, 0.5, -1.0, -1.0, False),  # a good token that became unlikely keeps its gradient
        # A = -2: max(2 r, 2 * 0.8), at most 3 * 2
        (-2.0, 1.0, 2.0, 2.0, False),
        (-2.0, 0.5, 1.6, 0.0, True),  # 2 * 0.8
        (-2.0, 2.5, 5.0, 5.0, False),  # a bad token that became likely keeps its gradient
        (-2.0, 3.5, 6.0, 0.0, True),  # dual clip
        (0.0, 9.0, 0.0, 0.0, False),  # no advantage: nothing was taken away
    ],
)
def test_worked_examples_of_the_clip(advantage: float, ratio: float, loss: float, dlogp: float, is_clipped: bool) -> None:
    logp = torch.tensor([-1.0], dtype=torch.float64)
    out = token_loss(
        LossSpec(clip_high=0.3, dual_clip=3.0), logp, -logp, torch.tensor([advantage]).double(), logp - torch.tensor(ratio).log()
    )
    assert out.loss_T.item() == pytest.approx(loss, abs=1e-6)
    assert out.dlogprob_T.item() == pytest.approx(dlogp, abs=1e-6)
    assert out.is_clipped_T.item() is is_clipped
    assert out.log_ratio_T.exp().item() == pytest.approx(ratio)


def test_without_dual_clip_a_bad_token_has_no_bound() -> None:
    logp = torch.tensor([-1.0])
    out = token_loss(LossSpec(), logp, -logp, torch.tensor([-2.0]), logp - torch.tensor(50.0).log())
    assert out.loss_T.item() == pytest.approx(100.0, rel=1e-5) and not out.is_clipped_T.item()


@pytest.mark.parametrize(
    ("kl", "value", "derivative"),
    # u = log_ref - logp = -1 - (-1.5) = 0.5; e^0.5 = 1.648721
    [("k1", -0.5, 1.0), ("k2", 0.125, -0.5), ("k3", 0.1487213, -0.6487213)],
)
def test_worked_examples_of_the_kl(kl: Any, value: float, derivative: float) -> None:
    logp, ref, zero = torch.tensor([-1.5]), torch.tensor([-1.0]), torch.zeros(1)
    out = token_loss(LossSpec(kl=kl, kl_coef=2.0), logp, zero, zero, logp, ref)
    assert out.kl_T.item() == pytest.approx(value)
    assert out.loss_T.item() == pytest.approx(2 * value)
    assert out.dlogprob_T.item() == pytest.approx(2 * derivative)


def test_the_kl_is_measured_without_being_trained() -> None:
    tokens = random_tokens(20)
    with_ref = token_loss(LossSpec(kl="k2"), **tokens)
    torch.testing.assert_close(with_ref.kl_T, (tokens["ref_logprob_T"] - tokens["logprob_T"]).square() / 2)
    torch.testing.assert_close(with_ref.loss_T, token_loss(LossSpec(), **tokens).loss_T)
    without = token_loss(LossSpec(kl="k2"), **{**tokens, "ref_logprob_T": None})
    u = tokens["old_logprob_T"] - tokens["logprob_T"]
    torch.testing.assert_close(without.kl_T, u.exp() - 1 - u)


@pytest.mark.parametrize("log_ratio", [25.0, -25.0, 500.0, float("inf")])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_huge_ratios_stay_finite_and_get_no_gradient(log_ratio: float, advantage: float) -> None:
    logp = torch.tensor([-1.0])
    other = logp - log_ratio
    out = token_loss(LossSpec(kl_coef=0.1), logp, -logp, torch.tensor([advantage]), other, other)
    assert out.log_ratio_T.item() == log_ratio, "the statistic is taken before the clamp"
    assert out.loss_T.isfinite().all() and out.kl_T.isfinite().all()
    assert out.dlogprob_T.item() == 0


def test_supervised_loss_needs_no_old_logprobs() -> None:
    logp = torch.tensor([-1.5, -0.5])
    out = token_loss(LossSpec("nll"), logp, -logp, torch.tensor([1.0, 2.0]))
    assert out.loss_T.tolist() == [1.5, 1.0] and out.dlogprob_T.tolist() == [-1.0, -2.0]
    assert out.log_ratio_T.tolist() == [0, 0] and out.kl_T.tolist() == [0, 0] and not out.is_clipped_T.any()
    # With old log-probs the ratio is a statistic; it never clips.
    old = torch.tensor([-4.0, -0.5])
    moved = token_loss(LossSpec("nll"), logp, -logp, torch.tensor([1.0, 2.0]), old)
    assert moved.loss_T.tolist() == [1.5, 1.0] and moved.log_ratio_T.tolist() == [2.5, 0] and not moved.is_clipped_T.any()


def test_no_tokens() -> None:
    none = torch.zeros(0)
    out = token_loss(SPECS["all"], none, none, none, none, none)
    assert out.loss_T.shape == out.dlogprob_T.shape == out.kl_T.shape == (0,)


def test_a_missing_input_is_named() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="policy='clip' needs old_logprob_T"):
        token_loss(LossSpec(), one, one, one)
    with pytest.raises(ValueError, match=r"kl_coef=0\.5 needs ref_logprob_T"):
        token_loss(LossSpec(kl_coef=0.5), one, one, one, one)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "ppo"}, "policy='ppo'"),
        ({"kl": "k4"}, "kl='k4'"),
        ({"clip_low": -0.1}, r"clip_low=-0\.1"),
        ({"clip_low": 1.1}, r"clip_low=1\.1"),
        ({"clip_low": float("nan")}, "clip_low=nan"),
        ({"clip_high": -0.1}, r"clip_high=-0\.1"),
        ({"dual_clip": 1.0}, r"dual_clip=1\.0"),
        ({"kl_coef": -1e-3}, r"kl_coef=-0\.001"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossSpec(**options)


def test_a_spec_accepts_its_limits() -> None:
    LossSpec(clip_low=0.0, clip_high=0.0, dual_clip=1.01, kl_coef=0.0)
    LossSpec(clip_low=1.0, clip_high=1e9, entropy_coef=-1.0)
