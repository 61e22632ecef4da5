"""Token losses and their derivatives against autograd of plain formulas, and by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from flowkernels import LossSpec, TokenLoss, Tokens, by_autograd, correct_for_sampler, token_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_truth import plain_tokens, sequence_means
from rows import SPECS as OF_ROWS
from torch import Tensor

SPECS = {
    name: replace(spec, tis=None, mis=None)  # which correct the inputs
    for name, spec in OF_ROWS.items()
    if isinstance(spec, LossSpec)
} | {
    "clip-lower": LossSpec(clip_low=0.4, clip_high=0.1),
    "small-limit": LossSpec(kl_coef=0.2, log_ratio_limit=0.5, clip_high=5.0, clip_low=1.0),
}


def sequence_of(tokens: Tokens) -> Tensor:
    lengths = tokens.cu_seqlens_S1.diff()
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)


def log_ratio_of(spec: LossSpec, tokens: Tokens) -> Tensor:
    log_ratio = tokens.logprob_T - tokens.old_logprob_T
    if spec.loss_type == "gspo":
        log_ratio = sequence_means(log_ratio, tokens.weight_T, sequence_of(tokens))
    return log_ratio


def random_tokens(num_tokens: int = 200, spread: float = 0.7) -> Tokens:
    """fp64 tokens on both sides of every clip, in sequences of which some are empty."""
    rng = torch.Generator().manual_seed(0)
    logp = -3 * torch.rand(num_tokens, generator=rng, dtype=torch.float64)
    noise = torch.randn(4, num_tokens, generator=rng, dtype=torch.float64)
    bounds = torch.randint(6, (num_tokens,), generator=rng).cumsum(0).clamp(max=num_tokens)
    return Tokens(
        logprob_T=logp,
        entropy_T=noise[0].abs(),
        lse_T=2 + noise[0],
        advantage_T=noise[1],
        weight_T=(torch.rand(num_tokens, generator=rng, dtype=torch.float64) - 0.25).clamp(min=0),
        old_logprob_T=logp + spread * noise[2],
        ref_logprob_T=logp + spread * noise[3],
        cu_seqlens_S1=torch.cat([torch.zeros(1, dtype=torch.int64), bounds]),
    )


def few(**tensors: list[float]) -> Tokens:
    """fp64 tokens whose numbers are all 1 unless said otherwise."""
    one = torch.ones(len(tensors["logprob_T"]), dtype=torch.float64)
    given = {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in tensors.items()}
    names = ("entropy_T", "lse_T", "advantage_T", "weight_T")
    return Tokens(**{**dict.fromkeys(names, one), **given})


def compare(spec: LossSpec, tokens: Tokens) -> TokenLoss:
    """Loss and derivatives, times the weights, against autograd of the plain formula."""
    scores = (tokens.logprob_T, tokens.entropy_T, tokens.lse_T)
    leaves = [x.clone().requires_grad_() for x in scores]
    plain = {**tokens.per_token(), "sequence_T": sequence_of(tokens)}
    truth, weight = plain_tokens(spec, *leaves, {k: x for k, x in plain.items() if x is not None})
    dlogp, dentropy, dlse = torch.autograd.grad((weight * truth).sum(), leaves)
    ours = token_loss(spec, tokens)
    slopes = ours.weighted_slopes(weight)
    torch.testing.assert_close(ours.loss_T, truth.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slopes.logprob_T, dlogp, rtol=1e-12, atol=1e-12)
    for coef, found, true in (
        (spec.entropy_coef, slopes.entropy_T, dentropy),
        (spec.z_loss_coef, slopes.lse_T, dlse),
    ):
        assert (found is None) == (coef == 0)
        if found is not None:
            torch.testing.assert_close(found, true, rtol=1e-12, atol=0)
    return ours


@pytest.mark.parametrize("name", SPECS)
def test_loss_and_derivatives_match_the_plain_formula(name: str) -> None:
    spec, tokens = SPECS[name], random_tokens()
    ours = compare(spec, tokens)
    log_ratio = log_ratio_of(spec, tokens)
    torch.testing.assert_close(ours.log_ratio_T, log_ratio, rtol=0, atol=1e-15)
    if spec.loss_type != "nll" and name != "small-limit":
        assert 20 < int(ours.is_clipped_T.sum()) < 180, (
            "the case is to have clipped and free tokens"
        )


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    loss_type=st.sampled_from(["clip", "gspo", "cispo", "nll"]),
    kl=st.sampled_from(["k1", "k2", "k3", "low_var_kl"]),
    clip_low=st.floats(0, 1),
    clip_high=st.floats(0, 3),
    dual_clip=st.none() | st.floats(1.01, 10),
    coefs=st.tuples(st.floats(0, 2), st.floats(-2, 2)),
    numbers=st.lists(
        st.tuples(
            st.floats(-9, 0),
            st.floats(-3, 3),
            st.floats(-9, 0),
            st.floats(-9, 0),
            st.sampled_from([0.0, 1.0, 0.25, -2.0]),
        ),
        min_size=1,
        max_size=6,
    ),
    cut=st.integers(0, 6),
)
def test_any_loss_matches_the_plain_formula(
    loss_type: Any, kl: Any, coefs: Any, numbers: Any, cut: int, **options: Any
) -> None:
    spec = LossSpec(
        loss_type, kl=kl, kl_coef=coefs[0], entropy_coef=coefs[1], log_ratio_limit=6.0, **options
    )
    logp, advantage, old, ref, weight = torch.tensor(numbers, dtype=torch.float64).T
    bounds = torch.tensor([0, min(cut, len(logp)), len(logp)])
    tokens = Tokens(
        logprob_T=logp,
        entropy_T=-logp,
        lse_T=-logp,
        advantage_T=advantage,
        weight_T=weight,
        old_logprob_T=old,
        ref_logprob_T=ref,
        cu_seqlens_S1=bounds,
    )
    # At a kink the derivative is a matter of taste (autograd and we may pick either side).
    ratio = torch.exp(log_ratio_of(spec, tokens))
    for kink in (
        1 - spec.clip_low,
        1 + spec.clip_high,
        spec.dual_clip or 0.0,
        math.exp(6.0),
        math.exp(-6.0),
    ):
        advantage = torch.where((ratio - kink).abs() < 1e-9, 0.0, advantage)
    compare(spec, replace(tokens, advantage_T=advantage))


@pytest.mark.parametrize("dual_clip", [None, 1.2])
def test_gspo_tokens_have_the_gradient_of_their_sequence(dual_clip: float | None) -> None:
    """Eq. 5: exp(mean log-ratio) through a clip, by autograd."""
    spec = LossSpec("gspo", clip_low=0.1, clip_high=0.15, dual_clip=dual_clip)
    tokens = random_tokens(60)
    bounds, advantage = tokens.cu_seqlens_S1.tolist(), tokens.advantage_T.clone()
    spans = [(begin, end) for begin, end in itertools.pairwise(bounds) if end > begin]
    for begin, end in spans:
        advantage[begin:end] = advantage[begin]
    ours = token_loss(spec, replace(tokens, advantage_T=advantage))
    slopes_T = ours.weighted_slopes(tokens.weight_T).logprob_T
    logp, has_weight = tokens.logprob_T.clone().requires_grad_(), tokens.weight_T != 0
    for begin, end in spans:
        rows = torch.arange(begin, end)[has_weight[begin:end]]
        if not len(rows):
            continue
        ratio = torch.exp((logp - tokens.old_logprob_T)[rows].mean())
        loss = -torch.minimum(ratio * advantage[begin], ratio.clamp(0.9, 1.15) * advantage[begin])
        if dual_clip is not None and advantage[begin] < 0:
            loss = torch.minimum(loss, -dual_clip * advantage[begin])
        (tokens.weight_T[rows].sum() * loss).backward()
        torch.testing.assert_close(
            ours.loss_T[rows], loss.detach().expand(len(rows)), rtol=1e-12, atol=1e-12
        )
        torch.testing.assert_close(slopes_T[rows], logp.grad[rows], rtol=1e-12, atol=1e-12)
    num_clipped = int(ours.is_clipped_T.sum())
    assert 5 < num_clipped < 55 and len(spans) > 10


def test_gspo_leaves_tokens_without_weight_out_of_the_mean() -> None:
    # Sequences: (0.1, 0.3, [huge]), none, ([NaN], 0.4), ([inf]).
    tokens = few(
        logprob_T=[-1.0] * 6,
        old_logprob_T=[-1.1, -1.3, 99.0, math.nan, -1.4, -math.inf],
        weight_T=[1, 2, 0, 0, 1, 0],
    )
    out = token_loss(
        LossSpec("gspo"),
        replace(tokens, cu_seqlens_S1=torch.tensor([0, 3, 3, 5, 6], dtype=torch.int32)),
    )
    torch.testing.assert_close(
        out.log_ratio_T, torch.tensor([0.2, 0.2, 0.2, 0.4, 0.4, 0.0]).double(), rtol=1e-6, atol=1e-6
    )
    # A = 1: the ratio e^0.2 = 1.2214 is above 1.2.
    torch.testing.assert_close(
        out.loss_T, torch.tensor([-1.2] * 5 + [-1.0]).double(), rtol=1e-6, atol=1e-6
    )
    assert out.is_clipped_T.tolist() == [True] * 5 + [False]


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
def test_worked_examples_of_the_clip(
    advantage: float, ratio: float, loss: float, dlogp: float, is_clipped: bool
) -> None:
    tokens = few(logprob_T=[-1.0], advantage_T=[advantage], old_logprob_T=[-1.0 - math.log(ratio)])
    out = token_loss(LossSpec(clip_high=0.3, dual_clip=3.0), tokens)
    assert out.loss_T.item() == pytest.approx(loss, abs=1e-6)
    assert out.dlogprob_T.item() == pytest.approx(dlogp, abs=1e-6)
    assert out.is_clipped_T.item() is is_clipped
    assert out.log_ratio_T.exp().item() == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("ratio", "weight", "is_bounded"),
    [
        (1.0, 1.0, False),
        (1.25, 1.25, False),
        (1.5, 1.3, True),
        (0.1, 0.1, False),
    ],  # bounded above only
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_worked_examples_of_cispo(
    ratio: float, weight: float, is_bounded: bool, advantage: float
) -> None:
    """logp = -1.5: weight A 1.5, whose gradient never vanishes."""
    tokens = few(logprob_T=[-1.5], advantage_T=[advantage], old_logprob_T=[-1.5 - math.log(ratio)])
    out = token_loss(LossSpec("cispo", clip_low=0.2, clip_high=0.3), tokens)
    assert out.loss_T.item() == pytest.approx(weight * advantage * 1.5)
    assert out.dlogprob_T.item() == pytest.approx(-weight * advantage)
    assert out.is_clipped_T.item() is is_bounded


def test_without_dual_clip_a_bad_token_has_no_bound() -> None:
    out = token_loss(
        LossSpec(), few(logprob_T=[-1.0], advantage_T=[-2.0], old_logprob_T=[-1.0 - math.log(50.0)])
    )
    assert out.loss_T.item() == pytest.approx(100.0, rel=1e-5) and not out.is_clipped_T.item()


@pytest.mark.parametrize(
    ("kl", "ref", "value", "derivative"),
    # u = log_ref - logp = -1 - (-1.5) = 0.5; e^0.5 = 1.648721
    [
        ("k1", -1.0, -0.5, 1.0),
        ("k2", -1.0, 0.125, -0.5),
        ("k3", -1.0, 0.1487213, -0.6487213),
        ("low_var_kl", -1.0, 0.1487213, -0.6487213),
        # Beyond u = 2.6 and below -11 the estimate is above 10: the bound, which has no gradient.
        ("k3", 1.5, 16.0855369, -19.0855369),
        ("low_var_kl", 1.5, 10.0, 0.0),
        ("low_var_kl", 0.9, 7.6231764, -10.0231764),
        ("low_var_kl", -13.5, 10.0, 0.0),
    ],
)
def test_worked_examples_of_the_kl(kl: Any, ref: float, value: float, derivative: float) -> None:
    out = token_loss(
        LossSpec(kl=kl, kl_coef=2.0),
        few(logprob_T=[-1.5], advantage_T=[0.0], old_logprob_T=[-1.5], ref_logprob_T=[ref]),
    )
    assert out.kl_T.item() == pytest.approx(value)
    assert out.loss_T.item() == pytest.approx(2 * value)
    assert out.dlogprob_T.item() == pytest.approx(2 * derivative)


def test_the_kl_is_measured_without_being_trained() -> None:
    tokens = random_tokens(20)
    with_ref = token_loss(LossSpec(kl="k2"), tokens)
    torch.testing.assert_close(
        with_ref.kl_T, (tokens.ref_logprob_T - tokens.logprob_T).square() / 2
    )
    without = token_loss(LossSpec(kl="k2"), replace(tokens, ref_logprob_T=None))
    u = tokens.old_logprob_T - tokens.logprob_T
    torch.testing.assert_close(without.kl_T, u.exp() - 1 - u)
    torch.testing.assert_close(with_ref.loss_T, without.loss_T)


@pytest.mark.parametrize("log_ratio", [25.0, -25.0, 500.0, math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("loss_type", ["clip", "gspo"])
def test_huge_ratios_stay_finite_and_get_no_gradient(
    loss_type: Any, log_ratio: float, advantage: float
) -> None:
    other = [-1.0 - log_ratio]
    tokens = few(
        logprob_T=[-1.0], advantage_T=[advantage], old_logprob_T=other, ref_logprob_T=other
    )
    out = token_loss(
        LossSpec(loss_type, kl_coef=0.1), replace(tokens, cu_seqlens_S1=torch.tensor([0, 1]))
    )
    assert out.log_ratio_T.item() == log_ratio, "the statistic is taken before the clamp"
    assert out.loss_T.isfinite().all() and out.kl_T.isfinite().all()
    assert out.dlogprob_T.item() == 0


def test_supervised_loss_needs_no_old_logprobs() -> None:
    tokens = few(logprob_T=[-1.5, -0.5], advantage_T=[1.0, 2.0])
    out = token_loss(LossSpec("nll"), tokens)
    assert out.loss_T.tolist() == [1.5, 1.0] and out.dlogprob_T.tolist() == [-1.0, -2.0]
    assert out.log_ratio_T.tolist() == [0, 0]
    assert out.kl_T.tolist() == [0, 0]
    assert not out.is_clipped_T.any()
    # With old log-probs the ratio is a statistic; it never clips.
    moved = token_loss(
        LossSpec("nll"), replace(tokens, old_logprob_T=torch.tensor([-4.0, -0.5]).double())
    )
    assert moved.loss_T.tolist() == [1.5, 1.0]
    assert moved.log_ratio_T.tolist() == [2.5, 0]
    assert not moved.is_clipped_T.any()


def test_truncated_importance_sampling_scales_the_advantage() -> None:
    """pi_old / pi_sampler = 0.5, 1, 1.5 and 3, at most 2."""
    ratio = torch.tensor([0.5, 1.0, 1.5, 3.0])
    old = torch.full((4,), -2.0)
    advantage = torch.tensor([1.0, -1.0, 2.0, -2.0])
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    corrected, same = correct_for_sampler(
        LossSpec(tis=2.0), advantage, weight, old, old - ratio.log()
    )
    torch.testing.assert_close(corrected, torch.tensor([0.5, -1.0, 3.0, -4.0]))
    assert torch.equal(same, weight)


def test_masked_importance_sampling_drops_tokens() -> None:
    ratio = torch.tensor([0.4, 0.6, 1.0, 1.9, 2.1, math.nan])
    old, ones = torch.full((6,), -2.0), torch.ones(6)
    same, weight = correct_for_sampler(
        LossSpec(mis=(0.5, 2.0)), ones, 2 * ones, old, old - ratio.log()
    )
    found = weight.tolist()
    assert found == [0, 2, 2, 2, 0, 2], "a NaN ratio stays, so that it shows up in the loss"
    assert torch.equal(same, ones)
    both, weight = correct_for_sampler(
        LossSpec(tis=1.5, mis=(0.5, 2.0)), ones, ones, old, old - ratio.log()
    )
    torch.testing.assert_close(both[:4], torch.tensor([0.4, 0.6, 1.0, 1.5]))
    assert both[5].isnan() and weight.tolist() == [0, 1, 1, 1, 0, 1]


def test_no_sampler_correction_needs_nothing_and_changes_nothing() -> None:
    advantage, weight = torch.ones(2), torch.ones(2)
    assert correct_for_sampler(LossSpec(), advantage, weight, None, None) == (advantage, weight)
    # A sampler that is far off does not overflow.
    huge, _ = correct_for_sampler(
        LossSpec(tis=math.inf), advantage, weight, torch.zeros(2), torch.tensor([-500.0, 500.0])
    )
    assert huge.isfinite().all() and huge[0] > 1e8 and huge[1] < 1e-8


NAN, INF = math.nan, math.inf
REFUSED: dict[str, list[Any]] = {
    "loss_type": ["ppo", "", None],
    "kl": ["k4", None],
    "kl_ratio": [True],
    "correction_level": ["row", None],
    "clip_low": [-0.1, 1.1, NAN],
    "clip_high": [-0.1, INF, NAN],
    "dual_clip": [1.0, 0.5, -2.0, INF, NAN],
    "kl_coef": [-1e-3, INF, NAN],
    "entropy_coef": [INF, -INF, NAN],
    "z_loss_coef": [-1e-4, INF, NAN],
    "log_ratio_limit": [0.0, -1.0, 81.0, INF, NAN],
    "tis": [0.0, -1.0, NAN],
    "mis": [(-0.1, 2.0), (1.0, 1.0), (2.0, 1.0), (NAN, 2.0), (0.5, NAN)],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values]
)
def test_a_spec_that_makes_no_sense_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}=") as refusal:
        LossSpec(**{field: value})
    assert repr(value) in str(refusal.value)


def test_a_spec_accepts_its_limits() -> None:
    """Every field has a case above."""
    LossSpec(
        clip_low=0.0,
        clip_high=0.0,
        dual_clip=1.01,
        kl_coef=0.0,
        log_ratio_limit=80.0,
        tis=1e-3,
        mis=(0.0, 1e-3),
    )
    LossSpec(
        clip_low=1.0,
        clip_high=1e9,
        entropy_coef=-1.0,
        log_ratio_limit=1e-3,
        tis=INF,
        mis=(0.5, INF),
        kl_coef=1e-3,
        kl_ratio=True,
        correction_level="sequence",
        z_loss_coef=1e-4,
    )
    assert set(REFUSED) == {field.name for field in fields(LossSpec) if field.init}


def test_autograd_gives_a_loss_of_ones_own_its_slopes() -> None:
    """PPO's loss with an entropy bonus and z-loss, by autograd and by hand."""
    spec = LossSpec(clip_high=0.3, entropy_coef=0.1, z_loss_coef=0.01)

    def ppo(t: Tokens) -> Tensor:
        ratio_T = torch.exp(t.logprob_T - t.old_logprob_T)
        clipped_T = torch.minimum(ratio_T * t.advantage_T, ratio_T.clamp(0.8, 1.3) * t.advantage_T)
        return -clipped_T - 0.1 * t.entropy_T + 0.01 * t.lse_T**2

    numbers = torch.Generator().manual_seed(3)
    one = {name: torch.randn(40, generator=numbers) for name in ("logprob_T", "entropy_T", "lse_T")}
    old_T = one["logprob_T"] + 0.3 * torch.randn(40, generator=numbers)
    advantage_T = torch.randn(40, generator=numbers)
    tokens = Tokens(**one, advantage_T=advantage_T, weight_T=torch.ones(40), old_logprob_T=old_T)
    ours, truth = by_autograd(ppo)(tokens), token_loss(spec, tokens)
    for name in ("loss_T", "dlogprob_T", "dentropy_T", "dlse_T", "log_ratio_T"):
        torch.testing.assert_close(getattr(ours, name), getattr(truth, name))
    assert not ours.loss_T.requires_grad
    plain = by_autograd(lambda t: -t.logprob_T)(tokens)
    assert plain.dentropy_T is None and plain.dlse_T is None
    with pytest.raises(ValueError, match=r"the loss has the shape \(\), not one number for each"):
        by_autograd(lambda t: t.logprob_T.mean())(tokens)


def test_autograd_follows_a_loss_through_other_tokens() -> None:
    """GSPO's, with weights that differ within a sequence, of which some are 0."""
    tokens = random_tokens()

    def gspo(t: Tokens) -> Tensor:
        log_ratio_T = sequence_means(t.logprob_T - t.old_logprob_T, t.weight_T, sequence_of(t))
        ratio_T = log_ratio_T.exp()
        return -torch.minimum(ratio_T * t.advantage_T, ratio_T.clamp(0.8, 1.2) * t.advantage_T)

    found, true = (
        loss.weighted_slopes(tokens.weight_T).logprob_T
        for loss in (by_autograd(gspo)(tokens), token_loss(LossSpec("gspo"), tokens))
    )
    torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-12)
