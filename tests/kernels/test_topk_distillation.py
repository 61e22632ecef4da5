"""Distillation from the likeliest tokens: values and gradients are autograd's of whole logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from divergences import LEARNT, gradients, leaves, near, plain_divergence
from flowkernels import DIVERGENCES, LossSpec, linear_policy_loss, linear_topk_distillation
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_truth import peak_bytes
from torch import Tensor

NUM, WIDTH, VOCAB = 11, 6, 37


def batch(num_ids: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    log_q = normal(NUM, VOCAB).log_softmax(1)
    logprob, ids = log_q.topk(num_ids, 1)
    weight_T = torch.rand(NUM, generator=rng, dtype=torch.float64)
    weight_T[[2, 7]] = 0
    given = {
        "hidden_TD": normal(NUM, WIDTH).to(dtype),
        "weight_VD": normal(VOCAB, WIDTH).to(dtype),
        "bias_V": normal(VOCAB).to(dtype),
        "teacher_ids_TK": ids,
        "teacher_logprob_TK": logprob if dtype == torch.float64 else logprob.float(),
        "weight_T": weight_T.to(dtype),
        "temperature": torch.linspace(0.5, 2.0, NUM, dtype=dtype),
    }
    for name in LEARNT:
        given[name].requires_grad_()
    return given


def truth(b: dict[str, Any], divergence: str, mix: float) -> tuple[Tensor, Tensor]:
    """(loss, divergences [T]) by whole distributions, whose rest is summed up by a matrix."""
    ids, logprob = b["teacher_ids_TK"], b["teacher_logprob_TK"].double()
    logits = (b["hidden_TD"] @ b["weight_VD"].T + b["bias_V"]) / b["temperature"][:, None]
    p_V = logits.double().softmax(1)
    named = torch.zeros_like(p_V).scatter_(1, ids, 1.0)
    p = torch.cat([p_V.gather(1, ids), (p_V * (1 - named)).sum(1, keepdim=True)], 1)
    q = torch.cat([logprob.exp(), 1 - logprob.exp().sum(1, keepdim=True)], 1)
    if ids.shape[1] == VOCAB:
        p, q = p[:, :-1], q[:, :-1]
    found = plain_divergence(p.log(), q.log(), divergence, mix)
    return (b["weight_T"] * found).sum(), found


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("num_ids", [1, 5, VOCAB])
@pytest.mark.parametrize("budget", [None, 1200])
def test_values_and_gradients_are_those_of_whole_logits(
    impl: str, divergence: Any, num_ids: int, budget: int | None
) -> None:
    """In one chunk and in several; rows of weight 0 are left out. All ids are named: dense KL."""
    dtype = torch.float64 if impl == "torch" else torch.float32
    b = leaves(batch(num_ids, dtype), impl)
    how = {"divergence": divergence, "mix": 0.3, "memory_budget": budget, "impl": impl}
    out = linear_topk_distillation(**b, **how)
    loss, found_T = truth(b, divergence, 0.3)
    torch.testing.assert_close(out.loss, loss.to(dtype), **near(impl))
    counts_T = b["weight_T"] != 0
    found_T = torch.where(counts_T, found_T, 0.0).to(dtype)
    torch.testing.assert_close(out.divergence_T, found_T, **near(impl))
    for ours, theirs in zip(gradients(2 * out.loss, b), gradients(2 * loss, b), strict=True):
        torch.testing.assert_close(ours, theirs, **near(impl))


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    st.sampled_from(DIVERGENCES),
    st.floats(0.01, 0.99),
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.integers(1, VOCAB),
)
def test_any_chunks_and_ids_in_fp64(
    divergence: Any, mix: float, seed: int, rows: int, num_ids: int
) -> None:
    b = batch(num_ids, torch.float64, seed)
    how = {"divergence": divergence, "mix": mix, "memory_budget": rows * VOCAB * 8}
    out, (loss, _) = linear_topk_distillation(**b, **how), truth(b, divergence, mix)
    torch.testing.assert_close(out.loss, loss, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(gradients(out.loss, b), gradients(loss, b), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_gradient_is_that_of_finite_differences(divergence: Any) -> None:
    """One loss is taken once, so along random directions rather than by gradcheck."""
    b, rng = batch(3, torch.float64), torch.Generator().manual_seed(1)
    found = gradients(linear_topk_distillation(**b, divergence=divergence, mix=0.3).loss, b)
    for name, gradient in zip(LEARNT, found, strict=True):
        step = 1e-6 * torch.randn(gradient.shape, generator=rng, dtype=torch.float64)
        ends = [
            linear_topk_distillation(
                **{**b, name: b[name].detach() + sign * step}, divergence=divergence, mix=0.3
            ).loss
            for sign in (1, -1)
        ]
        difference = (ends[0] - ends[1]) / 2
        torch.testing.assert_close((gradient * step).sum(), difference, rtol=1e-7, atol=1e-14)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_rest_that_rounding_takes_away_stays_finite(impl: str, divergence: Any) -> None:
    """Of a sure teacher, and of a student that cannot write what is not named."""
    b = batch(4)
    b["teacher_logprob_TK"] = torch.tensor([[0.0, -40.0, -50.0, -50.0]]).repeat(NUM, 1)
    found = linear_topk_distillation(**leaves(b, impl), divergence=divergence, impl=impl)
    assert bool(found.divergence_T.isfinite().all())
    assert float(found.divergence_T.max()) < 14 + 50, "-log(2^-20), and what nobody writes"
    with torch.no_grad():
        b["bias_V"].fill_(-torch.inf)
        b["bias_V"][b["teacher_ids_TK"][0]] = 0.0
    b["teacher_ids_TK"] = b["teacher_ids_TK"][:1].expand(NUM, -1)
    b = leaves(b, impl)
    if divergence != "forward_kl":  # which is infinite there
        out = linear_topk_distillation(**b, divergence=divergence, impl=impl)
        assert bool(out.loss.isfinite())
        assert all(bool(g.isfinite().all()) for g in gradients(out.loss, b))


def test_a_student_that_is_its_teacher_has_no_gradient(impl: str) -> None:
    b = batch(5, torch.float32)
    logits = (b["hidden_TD"] @ b["weight_VD"].T + b["bias_V"]) / b["temperature"][:, None]
    logprob, ids = logits.detach().log_softmax(1).topk(5, 1)
    b = leaves(b | {"teacher_ids_TK": ids.int(), "teacher_logprob_TK": logprob}, impl)
    for divergence in DIVERGENCES:
        out = linear_topk_distillation(**b, divergence=divergence, impl=impl)
        assert abs(float(out.loss.detach())) < 1e-6
        assert all(float(g.abs().max()) < 1e-5 for g in gradients(out.loss, b))


def test_in_16_bits_the_error_is_that_of_its_logits(impl: str) -> None:
    b = leaves(batch(5, torch.bfloat16), impl)
    wide = {
        name: (x.detach().double() if x.is_floating_point() else x).requires_grad_(x.requires_grad)
        for name, x in b.items()
    }
    truths = gradients(truth(wide, "jsd", 0.5)[0], wide)
    errors = []
    for fp32_logits in (False, True):
        how = {"divergence": "jsd", "fp32_logits": fp32_logits, "impl": impl}
        found = gradients(linear_topk_distillation(**b, **how).loss, b)
        assert all(g.dtype == torch.bfloat16 for g in found)
        pairs = zip(found, truths, strict=True)
        errors.append(max(float((g - t).abs().max() / t.abs().max()) for g, t in pairs))
    assert errors[1] < 2**-7 and errors[0] < 2**-4


def test_a_batch_of_sequences_is_its_tokens() -> None:
    b = batch(5)
    flat = linear_topk_distillation(**b)
    shaped = {name: x if name in LEARNT[1:] else x.unflatten(0, (1, NUM)) for name, x in b.items()}
    out = linear_topk_distillation(**shaped)
    assert torch.equal(out.divergence_T, flat.divergence_T[None]) and out.loss == flat.loss


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_operator_is_one_that_torch_can_trace(divergence: str) -> None:
    """Its shapes are known without its values."""
    b = batch(5, torch.float64)
    teacher = b["teacher_logprob_TK"], None, None, b["teacher_ids_TK"]
    options = [True, True, True], False, 3, 3, "torch"
    head = [b[name] for name in LEARNT]
    given = *head, *teacher, b["temperature"], b["weight_T"], divergence, 0.5, *options
    operator = torch.ops.flowkernels.linear_distillation.default
    # A second backward pass, which a check takes, is refused.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, given, test_utils=checks)


def test_it_takes_hardly_more_memory_than_a_policy_loss() -> None:
    """At a vocabulary of 151,936."""
    num, width, vocab = 96, 64, 151_936
    hidden, weight = torch.randn(num, width), torch.randn(vocab, width).div_(8)
    tensors = [hidden.requires_grad_(), weight.requires_grad_()]
    ones, ids = torch.ones(num), torch.zeros(num, dtype=torch.int64)
    named = torch.arange(20).expand(num, -1), torch.full((num, 20), -3.5)

    def policy() -> None:
        loss = linear_policy_loss(
            *tensors, ids, spec=LossSpec(), advantage_T=ones, weight_T=ones, old_logprob_T=-ones
        ).loss
        torch.autograd.grad(loss, tensors)

    def distilled() -> None:
        torch.autograd.grad(linear_topk_distillation(*tensors, *named, weight_T=ones).loss, tensors)

    assert peak_bytes(distilled) < 1.2 * peak_bytes(policy)


def named(ids: Sequence[int]) -> dict[str, Tensor]:
    """The same ids in each row."""
    tensor = torch.tensor([list(ids)] * NUM, dtype=torch.int64)
    return {"teacher_ids_TK": tensor, "teacher_logprob_TK": torch.full(tensor.shape, -4.0)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"divergence": "tv"}, "divergence='tv' must be one of 'reverse_kl'"),
        ({"mix": 1.0}, "mix=1.0 must be between 0 and 1"),
        ({"teacher_ids_TK": torch.zeros(NUM - 1, 2).long()}, r"teacher_ids_TK must be int64 \[11"),
        *((named(ids), r"different ids in \[0, V=37\)") for ids in ([0, 37], [-1, 3], [3, 3])),
        (named(range(38)), r"different ids in \[0, V=37\)"),
        ({"teacher_logprob_TK": torch.zeros(NUM, 3)}, r"teacher_logprob_TK must be float32 \[11"),
        ({"weight_T": torch.zeros(NUM + 1)}, r"weight_T must be float32 \[11\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        linear_topk_distillation(**{**batch(2), **change})
