"""The gradient of every loss is that of the number it returns, by finite differences in fp64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from flowkernels import LossSpec, logprobs
from flowkernels.sequences import sequence_mean
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_truth import Batch, counted
from rows import FORMS, leaves_of, loss_of, plain_logits
from torch import Tensor

STEP = 1e-5
NEAR = 1e-3
"""Log-ratios are at least that far from where a loss has a kink."""
LENGTHS = (3, 0, 1, 4)
VOCAB = 5


def random_tokens(form: str, seed: int) -> Batch:
    """Numbers of which no two are alike; one weight is 0 and one target is left out."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    num = sum(LENGTHS)
    batch: Batch = {
        "target_ids_T": torch.randint(VOCAB, (num,), generator=rng),
        "advantage_T": normal(num),
        "weight_T": normal(num),
        "cu_seqlens_S1": torch.tensor([0, *LENGTHS]).cumsum(0),
        "temperature": 0.8,
    }
    batch["weight_T"][5], batch["target_ids_T"][1] = 0.0, -1
    if form in ("head", "chunks"):
        batch |= {"hidden_TD": normal(num, 3), "weight_VD": normal(VOCAB, 3)}
        batch["bias_V"] = normal(VOCAB) if form == "head" else None
    else:
        batch["logits_TV"] = normal(num, VOCAB)
    logp_T = logprobs_of(batch)
    old_T = logp_T + 0.4 * normal(num)
    names = ("old_logprob_T", "ref_logprob_T", "sampler_logprob_T")
    return batch | dict(
        zip(names, (old_T, logp_T + 0.7 * normal(num), old_T + 0.5 * normal(num)), strict=True)
    )


def logprobs_of(batch: Batch) -> Tensor:
    found = logprobs(plain_logits(batch), batch["target_ids_T"], temperature=batch["temperature"])
    return found.logprob_T


def is_smooth(spec: LossSpec, batch: Batch) -> bool:
    """Whether no token that counts is near a clip, a clamp or a bound."""
    counts_T, logp_T = counted(batch), logprobs_of(batch)
    ratio_T, limit = logp_T - batch["old_logprob_T"], spec.log_ratio_limit
    if spec.mis is not None and spec.correction_level == "token":
        behind_T = batch["old_logprob_T"] - batch["sampler_logprob_T"]
        low, high = spec.mis
        counts_T = counts_T & (behind_T.exp() >= low) & (behind_T.exp() <= high)
    if spec.loss_type == "gspo":
        ratio_T = sequence_mean(ratio_T, counts_T, batch["cu_seqlens_S1"])
    kinks = [math.log1p(-spec.clip_low), math.log1p(spec.clip_high), limit, -limit]
    kinks += [math.log(spec.dual_clip)] if spec.dual_clip else []
    u_T = batch["ref_logprob_T"] - logp_T
    near_T = (u_T.abs() - limit).abs() < NEAR
    near_T |= ((u_T.exp() - u_T - 1) - 10).abs() < NEAR
    for kink in kinks:
        near_T |= (ratio_T - kink).abs() < NEAR
    return not bool((near_T & counts_T).any())


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    form=st.sampled_from(list(FORMS)),
    seed=st.integers(0, 10**6),
    loss_type=st.sampled_from(["clip", "gspo", "cispo", "nll"]),
    clips=st.sampled_from([(0.2, 0.2), (0.4, 0.6), (0.9, 3.0)]),
    dual_clip=st.sampled_from([None, 1.3]),
    correction_level=st.sampled_from(["token", "sequence"]),
    tis=st.sampled_from([None, 0.9, 2.0]),
    mis=st.sampled_from([None, (0.5, 1.6)]),
    kl=st.sampled_from(["k1", "k2", "k3", "low_var_kl"]),
    kl_coef=st.sampled_from([0.0, 0.3]),
    kl_ratio=st.booleans(),
    others=st.sampled_from([(0.0, 0.0), (0.2, 0.05)]),
    log_ratio_limit=st.sampled_from([20.0, 0.5]),
    has_old=st.booleans(),
)
def test_the_gradient_is_that_of_the_loss_that_is_returned(
    form: str,
    seed: int,
    loss_type: Any,
    clips: tuple[float, float],
    kl_ratio: bool,
    others: tuple[float, float],
    has_old: bool,
    **options: Any,
) -> None:
    spec = LossSpec(
        loss_type,
        clip_low=clips[0],
        clip_high=clips[1],
        entropy_coef=others[0],
        z_loss_coef=others[1],
        kl_ratio=kl_ratio and options["kl_coef"] > 0,
        **options,
    )
    batch = random_tokens(form, seed)
    given_batch, fixed = batch, batch
    if not has_old:  # the loss holds today's log-probs constant, and so must the differences
        spec = replace(spec, tis=None, mis=None)
        given_batch = {**batch, "old_logprob_T": None, "sampler_logprob_T": None}
        fixed = {**batch, "old_logprob_T": logprobs_of(batch)}
    assume(is_smooth(spec, fixed))
    truth = spec
    if loss_type == "cispo":  # its ratio is a constant too
        limit = spec.log_ratio_limit
        ratio_T = (logprobs_of(batch) - fixed["old_logprob_T"]).clamp(-limit, limit).exp()
        fixed = {**fixed, "advantage_T": batch["advantage_T"] * ratio_T.clamp(max=1 + clips[1])}
        truth = replace(spec, loss_type="nll")

    names = leaves_of(batch)
    leaves = {name: batch[name].clone().requires_grad_() for name in names}
    loss = loss_of(spec, {**given_batch, **leaves}, **FORMS[form]).loss
    loss.backward()
    rng = torch.Generator().manual_seed(seed + 1)
    for _ in range(3):
        ways = {
            name: torch.randn(batch[name].shape, generator=rng, dtype=torch.float64)
            for name in names
        }
        ahead, behind = (
            loss_of(truth, {**fixed, **{x: batch[x] + step * ways[x] for x in names}}).loss
            for step in (STEP, -STEP)
        )
        true = float(ahead - behind) / (2 * STEP)
        found = sum(float((leaves[name].grad * ways[name]).sum()) for name in names)
        assert abs(found - true) < 1e-6 * max(1.0, abs(true))
