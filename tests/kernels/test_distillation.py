"""Distillation over the whole vocabulary: values and gradients are autograd's of whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from divergences import LEARNT, gradients, leaves, near, plain_divergence
from flowkernels import DIVERGENCES, LossSpec, linear_distillation, linear_policy_loss
from flowkernels.lm_head import LMHead
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_truth import peak_bytes
from torch import Tensor

NUM, WIDTH, OTHER, VOCAB = 11, 6, 9, 37


def batch(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

    weight_T = torch.rand(NUM, generator=rng, dtype=torch.float64).to(dtype)
    weight_T[[2, 7]] = 0
    given = {
        "hidden_TD": normal(NUM, WIDTH),
        "weight_VD": normal(VOCAB, WIDTH),
        "bias_V": normal(VOCAB),
        "teacher_TE": normal(NUM, OTHER),
        "teacher_weight_VE": normal(VOCAB, OTHER),
        "teacher_bias_V": normal(VOCAB),
        "weight_T": weight_T,
        "temperature": torch.linspace(0.5, 2.0, NUM, dtype=dtype),
    }
    for name in LEARNT:
        given[name].requires_grad_()
    return given


def truth(b: dict[str, Any], divergence: str, mix: float) -> tuple[Tensor, Tensor]:
    """(loss, divergences [T]) by whole logits."""
    heat = b["temperature"][:, None]
    log_p = ((b["hidden_TD"] @ b["weight_VD"].T + b["bias_V"]) / heat).log_softmax(1)
    logits = b["teacher_TE"] @ b["teacher_weight_VE"].T + b["teacher_bias_V"]
    log_q = (logits / heat).log_softmax(1)
    found = plain_divergence(log_p, log_q, divergence, mix)
    return (b["weight_T"] * found).sum(), found


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("budget", [None, 1200])
def test_values_and_gradients_are_those_of_whole_logits(
    impl: str, divergence: Any, budget: int | None
) -> None:
    """In one chunk and in several; rows of weight 0 are left out."""
    dtype = torch.float64 if impl == "torch" else torch.float32
    b = leaves(batch(dtype), impl)
    how = {"divergence": divergence, "mix": 0.3, "memory_budget": budget, "impl": impl}
    out = linear_distillation(**b, **how)
    loss, found_T = truth(b, divergence, 0.3)
    torch.testing.assert_close(out.loss, loss, **near(impl))
    counts_T = b["weight_T"] != 0
    torch.testing.assert_close(out.divergence_T, torch.where(counts_T, found_T, 0.0), **near(impl))
    for ours, theirs in zip(gradients(2 * out.loss, b), gradients(2 * loss, b), strict=True):
        torch.testing.assert_close(ours, theirs, **near(impl))


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    st.sampled_from(DIVERGENCES), st.floats(0.01, 0.99), st.integers(0, 10**6), st.integers(1, 40)
)
def test_any_chunks_in_fp64(divergence: Any, mix: float, seed: int, rows: int) -> None:
    b = batch(torch.float64, seed)
    how = {"divergence": divergence, "mix": mix, "memory_budget": rows * VOCAB * 8}
    out, (loss, _) = linear_distillation(**b, **how), truth(b, divergence, mix)
    torch.testing.assert_close(out.loss, loss, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(gradients(out.loss, b), gradients(loss, b), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_words_that_neither_can_write_count_nothing(impl: str, divergence: Any) -> None:
    b = batch()
    with torch.no_grad():
        for name in ("bias_V", "teacher_bias_V"):
            b[name][[3, 20]] = -torch.inf
    b = leaves(b, impl)
    out, (loss, _) = (
        linear_distillation(**b, divergence=divergence, impl=impl),
        truth({n: x.detach() for n, x in b.items()}, divergence, 0.5),
    )
    assert bool(loss.isfinite())
    torch.testing.assert_close(out.loss.detach(), loss, rtol=1e-4, atol=1e-5)
    hidden, weight, bias = gradients(out.loss, b)
    assert all(bool(g.isfinite().all()) for g in (hidden, weight, bias))
    assert not bias[[3, 20]].any() and bool(bias.abs().max() > 1e-3)


def test_a_student_that_is_its_teacher_has_no_gradient(impl: str) -> None:
    b = batch()
    b |= {"teacher_TE": b["hidden_TD"].detach(), "teacher_weight_VE": b["weight_VD"].detach()}
    b |= {"teacher_bias_V": b["bias_V"].detach()}
    b = leaves(b, impl)
    for divergence in DIVERGENCES:
        out = linear_distillation(**b, divergence=divergence, impl=impl)
        assert abs(float(out.loss)) < 1e-6
        assert all(float(g.abs().max()) < 1e-6 for g in gradients(out.loss, b))


def test_in_16_bits_the_error_is_that_of_its_logits(impl: str) -> None:
    b = leaves(batch(torch.bfloat16), impl)
    wide = {name: x.detach().double().requires_grad_(x.requires_grad) for name, x in b.items()}
    truths = gradients(truth(wide, "jsd", 0.5)[0], wide)
    errors = []
    for fp32_logits in (False, True):
        out = linear_distillation(**b, divergence="jsd", fp32_logits=fp32_logits, impl=impl)
        found = gradients(out.loss, b)
        assert all(g.dtype == torch.bfloat16 for g in found)
        errors.append(
            max(
                float((g.double() - t).abs().max() / t.abs().max())
                for g, t in zip(found, truths, strict=True)
            )
        )
    assert errors[1] < 2**-7 and errors[0] < 2**-4


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_operator_is_one_that_torch_can_trace(divergence: str) -> None:
    """Its shapes are known without its values."""
    b = batch(torch.float64)
    head = b["hidden_TD"], b["weight_VD"], b["bias_V"]
    teacher = b["teacher_TE"], b["teacher_weight_VE"], b["teacher_bias_V"]
    options = [True, True, True], False, 3, 3, "torch"
    given = *head, *teacher, None, b["temperature"], b["weight_T"], divergence, 0.5, *options
    operator = torch.ops.flowkernels.linear_distillation.default
    # A second backward pass, which a check takes, is refused.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, given, test_utils=checks)


def test_a_chunk_of_logits_of_each_is_alive_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, of_head = [], LMHead.logits

    def logits(head: LMHead, hidden_CD: Tensor) -> Tensor:
        sizes.append(len(hidden_CD))
        return of_head(head, hidden_CD)

    monkeypatch.setattr(LMHead, "logits", logits)
    linear_distillation(**batch(), memory_budget=VOCAB * 4 * 6 * 3)
    assert sizes == [3] * 6, "nine rows that count, three at a time, of two heads"


def test_it_takes_hardly_more_memory_than_a_policy_loss() -> None:
    """At a vocabulary of 151,936."""
    num, width, vocab = 96, 64, 151_936
    hidden, weight = torch.randn(num, width), torch.randn(vocab, width).div_(8)
    tensors = [hidden.requires_grad_(), weight.requires_grad_()]
    ones, ids = torch.ones(num), torch.zeros(num, dtype=torch.int64)
    other = torch.randn(num, width), torch.randn(vocab, width).div_(8)

    def policy() -> None:
        loss = linear_policy_loss(
            *tensors, ids, spec=LossSpec(), advantage_T=ones, weight_T=ones, old_logprob_T=-ones
        ).loss
        torch.autograd.grad(loss, tensors)

    def distilled() -> None:
        torch.autograd.grad(linear_distillation(*tensors, *other, weight_T=ones).loss, tensors)

    assert peak_bytes(distilled) < 1.2 * peak_bytes(policy)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"divergence": "tv"}, "divergence='tv' must be one of 'reverse_kl'"),
        ({"mix": 1.0}, "mix=1.0 must be between 0 and 1"),
        ({"teacher_TE": torch.zeros(NUM - 1, OTHER)}, r"teacher_TE must be .*\[T=11, E\]"),
        ({"teacher_weight_VE": torch.zeros(VOCAB + 1, OTHER)}, "V=37 rows.*vocabularies differ"),
        ({"weight_T": torch.zeros(NUM + 1)}, r"weight_T must be float32 \[11\]"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    plain = {**batch(), "teacher_bias_V": None}
    with pytest.raises(ValueError, match=words):
        linear_distillation(**{**plain, **change})


def test_a_loss_is_taken_once_and_a_teacher_gets_nothing() -> None:
    b = batch()
    b["teacher_TE"].requires_grad_()
    b["teacher_weight_VE"].requires_grad_()
    out = linear_distillation(**b)
    out.loss.backward(retain_graph=True)
    assert b["teacher_TE"].grad is None and b["teacher_weight_VE"].grad is None
    with pytest.raises(RuntimeError, match=r"second|once|twice"):
        out.loss.backward()
