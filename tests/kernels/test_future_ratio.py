"""Future-aware advantages against the sum written out, and autograd through their loss."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from flowkernels import FutureRatio, LossSpec, future_aware, linear_policy_loss, policy_loss
from flowkernels.future_ratio import future_ratio
from flowkernels.token_loss import TokenInputs, Tokens
from kernel_truth import IMPLS, Batch, on_device, random_batch
from torch import Tensor

SPEC = LossSpec(clip_high=0.28, dual_clip=3.0)


def advantages_by_hand(tokens: Tokens, spec: LossSpec, future: FutureRatio) -> Tensor:
    """A (1 + b A_fut), 0 for sequences left out: loops over tokens, in fp64."""
    d = (tokens.logprob_T.double() - tokens.old_logprob_T.double()).tolist()
    base, weight = tokens.advantage_T.double().tolist(), tokens.weight_T.tolist()
    limit = math.log(spec.dual_clip) if spec.dual_clip else math.inf
    found = [0.0] * len(d)
    for begin, end in pairwise(tokens.cu_seqlens_S1.tolist()):
        bounded = [t for t in range(begin, end) if weight[t] != 0 and base[t] < 0 and d[t] > limit]
        stays = (
            spec.dual_clip is None
            or future.max_dual_clipped is None
            or len(bounded) <= future.max_dual_clipped
        )
        for t in range(begin, end):
            total = sum(
                2 ** (-(k - t) / future.half_life) * d[k]
                for k in range(t, end)
                if weight[k] != 0 and d[k] <= limit
            )
            factor = min(max(math.exp(min(max(total, -20), 20)), future.low), future.high)
            if base[t] < 0 and d[t] > math.log(6):
                factor = min(max(factor, 0.8), 1.0)
            found[t] = base[t] * (1 + future.coef * factor) * stays
    return torch.tensor(found, dtype=torch.float64)


def tokens_of(batch: Batch, logprob_T: Tensor) -> Tokens:
    weight_T = torch.where(batch["target_ids_T"] >= 0, batch["weight_T"], 0.0)
    inputs = TokenInputs(
        advantage_T=batch["advantage_T"],
        weight_T=weight_T,
        old_logprob_T=batch["old_logprob_T"],
        cu_seqlens_S1=batch["cu_seqlens_S1"],
    )
    return inputs.scored(logprob_T, entropy_T=logprob_T, lse_T=logprob_T)


def logprobs_of(logits_TV: Tensor, batch: Batch) -> Tensor:
    return logits_TV.log_softmax(-1).gather(1, batch["target_ids_T"].clamp(min=0)[:, None])[:, 0]


FUTURES = {
    "default": FutureRatio(),
    "both sides": FutureRatio(coef=0.5, half_life=3.0, low=0.8, high=1.2, max_dual_clipped=None),
    "wide": FutureRatio(coef=2.0, half_life=1e6, low=0.0, high=50.0, max_dual_clipped=0),
}


@pytest.mark.parametrize(
    ("impl", "name", "spread"),
    [
        *(("torch", name, spread) for name in FUTURES for spread in (0.3, 1.5)),
        *((impl, "both sides", 1.5) for impl in IMPLS[1:]),
    ],
)
def test_loss_and_gradient_are_those_with_the_advantages_written_out(
    impl: str, name: str, spread: float
) -> None:
    batch, future = random_batch(num_tokens=40, spread=spread, seed=3), FUTURES[name]
    logits = batch["logits_TV"].double().requires_grad_()
    tokens = tokens_of(batch, logprobs_of(logits, batch))
    advantage = advantages_by_hand(tokens, SPEC, future).detach()
    ratio = (tokens.logprob_T - batch["old_logprob_T"].double()).exp()
    token = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    token = torch.where(advantage < 0, torch.minimum(token, -3.0 * advantage), token)
    truth = (tokens.weight_T.double() * token).sum()
    truth.backward()

    moved: dict[str, Any] = {
        k: v
        for k, v in on_device(batch, impl).items()
        if k not in ("ref_logprob_T", "sampler_logprob_T")
    }
    moved["logits_TV"] = moved["logits_TV"].detach().requires_grad_()
    out = policy_loss(**moved, spec=future_aware(SPEC, future, impl), impl=impl)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(truth.item(), rel=1e-5, abs=1e-5)
    torch.testing.assert_close(
        moved["logits_TV"].grad.cpu().double(), logits.grad, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 1e-5), (torch.float64, 1e-14)])
def test_future_ratio_ignores_earlier_tokens(dtype: torch.dtype, rel: float) -> None:
    """Sequence (d0, d1, d2): A_fut of the last token is its own ratio, whatever came before."""
    old, logprob = (torch.tensor(x, dtype=dtype) for x in ([-1.0] * 3, [-0.2, -1.3, -0.95]))
    ones, bounds = torch.ones(3), torch.tensor([0, 3])
    future = FutureRatio(half_life=1.0, low=0.0, high=9.0)

    def first_ratios(weight: Tensor, bounds: Tensor) -> list[float]:
        return future_ratio(logprob - old, ones, weight, bounds, future, None).tolist()

    got = first_ratios(ones, bounds)
    d = [0.8, -0.3, 0.05]
    wanted = [math.exp(d[0] + d[1] / 2 + d[2] / 4), math.exp(d[1] + d[2] / 2), math.exp(d[2])]
    assert got == pytest.approx(wanted, rel=rel)
    masked = first_ratios(torch.tensor([1.0, 0.0, 1.0]), bounds)[0]
    assert masked == pytest.approx(math.exp(d[0] + d[2] / 4), rel=rel), "positions count"
    split = first_ratios(ones, torch.tensor([0, 1, 3]))[0]
    assert split == pytest.approx(math.exp(d[0]), rel=rel)


def test_the_head_takes_it_too() -> None:
    batch = random_batch(num_tokens=30, vocab=24)
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(30, 8, generator=rng), torch.randn(24, 8, generator=rng)
    given = {
        k: v
        for k, v in batch.items()
        if k not in ("logits_TV", "ref_logprob_T", "sampler_logprob_T")
    }
    spec = future_aware(SPEC, FutureRatio(low=0.5, high=2.0))
    results = []
    for through_head in (True, False):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        out = (
            linear_policy_loss(*leaves, **given, spec=spec)
            if through_head
            else policy_loss(leaves[0] @ leaves[1].T, **given, spec=spec)
        )
        out.loss.backward()
        results.append([out.loss.detach(), *(leaf.grad for leaf in leaves)])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_truncated_importance_sampling_weighs_the_advantage_once() -> None:
    batch = {k: v for k, v in random_batch().items() if k != "ref_logprob_T"}
    spec = LossSpec(tis=1.1)
    factor = (batch["old_logprob_T"] - batch["sampler_logprob_T"]).exp().clamp(max=1.1)
    by_hand = {**batch, "advantage_T": batch["advantage_T"] * factor}
    ours = policy_loss(**batch, spec=future_aware(spec, FutureRatio()))
    plain = policy_loss(**by_hand, spec=future_aware(LossSpec(), FutureRatio()))
    assert ours.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
