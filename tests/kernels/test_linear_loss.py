"""Policy losses from hidden states: values and the gradients of hidden, weight and bias against
fp64 autograd of plain formulas.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from typing import Any

import pytest
import torch
from flowkernels import (
    LossSpec,
    PolicyLoss,
    TokenLoss,
    TokenLossFn,
    Tokens,
    linear_logprobs,
    linear_policy_loss,
    policy_loss,
    token_loss,
)
from flowkernels.lm_head import LMHead
from kernel_truth import (
    BF16_ROUNDING,
    Batch,
    counted,
    counted_tokens,
    mask_of,
    on_device,
    plain_loss,
    plain_rows,
    random_batch,
)
from torch import Tensor

HEAD = ("hidden_TD", "weight_VD", "bias_V")
"""Tensors that have a gradient."""
Gradients = dict[str, Tensor]


def squared(tokens: Tokens) -> TokenLoss:
    """A loss of one's own: (logp - old)^2 - A logp + 0.1 H^2."""
    assert tokens.old_logprob_T is not None
    difference_T = tokens.logprob_T - tokens.old_logprob_T
    return TokenLoss(
        loss_T=difference_T**2 - tokens.advantage_T * tokens.logprob_T + 0.1 * tokens.entropy_T**2,
        dlogprob_T=2 * difference_T - tokens.advantage_T,
        dentropy_T=0.2 * tokens.entropy_T,
        log_ratio_T=difference_T,
        is_clipped_T=difference_T > 0.5,
        kl_T=difference_T**2 / 2,
    )


def plain_squared(logp: Tensor, entropy: Tensor, tokens: Batch) -> Tensor:
    weight, old, advantage = (
        tokens[name].to(logp.dtype) for name in ("weight_T", "old_logprob_T", "advantage_T")
    )
    return (weight * ((logp - old) ** 2 - advantage * logp + 0.1 * entropy**2)).sum()


SPECS: dict[str, LossSpec | TokenLossFn] = {
    "clip": LossSpec(clip_low=0.2, clip_high=0.3),
    "dual": LossSpec(dual_clip=1.5),
    "k3-entropy": LossSpec(kl="k3", kl_coef=0.4, entropy_coef=0.3),
    "gspo": LossSpec("gspo", clip_low=0.1, clip_high=0.05),
    "gspo-all": LossSpec("gspo", kl_coef=0.2, entropy_coef=0.1, tis=2.0, mis=(0.5, 2.5)),
    "cispo": LossSpec("cispo", clip_high=0.1),
    "nll": LossSpec("nll"),
    "tis": LossSpec(tis=1.2),
    "mis": LossSpec(mis=(0.6, 1.5)),
    "own": squared,
}
MAIN = ("k3-entropy", "gspo-all", "own")
"""One kernel per chunk, a loss of whole sequences, and the way that computes logits twice."""


def temperatures(num_tokens: int = 19) -> Tensor:
    return torch.linspace(0.5, 2.5, num_tokens)


def head_batch(
    num_tokens: int = 19,
    dim: int = 24,
    vocab: int = 17,
    temperature: float | Tensor = 1.0,
    dtype: torch.dtype = torch.float32,
    subsets: list[list[int]] | None = None,
) -> Batch:
    """`random_batch` with hidden states, weight and bias (in `dtype`) where the logits were, and
    log-probs near those of this head.
    """
    batch = random_batch(num_tokens, vocab, temperature)
    rng = torch.Generator().manual_seed(dim)
    hidden, weight, bias = (
        torch.randn(*size, generator=rng) for size in ((num_tokens, dim), (vocab, dim), (vocab,))
    )
    head = dict(
        zip(HEAD, (x.to(dtype) for x in (2 / dim**0.5 * hidden, weight, 0.5 * bias)), strict=True)
    )
    ids, old_logits = batch["target_ids_T"] % vocab, batch.pop("logits_TV")
    after = plain_rows(plain_logits(head).float(), ids, temperature, subsets=subsets)[0]
    shift = after - plain_rows(old_logits, ids, temperature)[0]
    return {
        **batch,
        **head,
        **{
            f"{name}_logprob_T": batch[f"{name}_logprob_T"] + shift
            for name in ("old", "ref", "sampler")
        },
    }


def plain_logits(head: Batch) -> Tensor:
    """Logits in fp64."""
    hidden, weight, bias = (head[name].double() for name in HEAD)
    return hidden @ weight.T + bias


def head_truth(
    spec: LossSpec | TokenLossFn,
    batch: Batch,
    temperature: float | Tensor = 1.0,
    dtype: torch.dtype = torch.float64,
    softcap: float | None = None,
    subsets: list[list[int]] | None = None,
) -> tuple[Tensor, Gradients, tuple[Tensor, Tensor]]:
    """Loss, gradients (fp64), and (logp, entropy) of the counted rows by autograd; head and softmax
    in `dtype`, the loss in fp64.
    """
    leaves = {name: batch[name].detach().to(dtype, copy=True).requires_grad_() for name in HEAD}
    rows = counted(batch)
    tokens = counted_tokens({name: value for name, value in batch.items() if name not in HEAD})
    if isinstance(temperature, Tensor):
        temperature = temperature[rows]
    if subsets is not None:
        subsets = [
            ids for ids, is_counted in zip(subsets, rows.tolist(), strict=True) if is_counted
        ]
    logits = torch.addmm(leaves["bias_V"], leaves["hidden_TD"], leaves["weight_VD"].T)
    logp, entropy, _ = (
        x.double()
        for x in plain_rows(logits[rows], tokens["target_ids_T"], temperature, softcap, subsets)
    )
    loss = (
        plain_loss(spec, logp, entropy, tokens)
        if isinstance(spec, LossSpec)
        else plain_squared(logp, entropy, tokens)
    )
    loss.backward()
    gradients = {name: leaf.grad.double() for name, leaf in leaves.items() if leaf.grad is not None}
    return loss.detach(), gradients, (logp.detach(), entropy.detach())


def ours(
    spec: LossSpec | TokenLossFn,
    batch: Batch,
    impl: str,
    *,
    scale: float = 1.0,
    needs: Collection[str] = HEAD,
    **options: Any,
) -> tuple[PolicyLoss, Gradients]:
    """Return the result of `linear_policy_loss`, and the gradients that its loss times `scale`
    leaves in those that need one, on the CPU.
    """
    moved = on_device({**batch, **options}, impl)
    leaves = {
        name: moved[name].detach().clone().requires_grad_(name in needs)
        for name in HEAD
        if moved[name] is not None
    }
    out = linear_policy_loss(**{**moved, **leaves}, spec=spec, impl=impl)
    (out.loss * scale).backward()
    assert out.loss.dtype == torch.float32 and all(
        leaf.grad is None or leaf.grad.dtype == leaf.dtype for leaf in leaves.values()
    )
    return out, {name: leaf.grad.cpu() for name, leaf in leaves.items() if leaf.grad is not None}


def close(
    gradients: Gradients,
    true: Gradients,
    rtol: float = 1e-4,
    atol: float = 5e-6,
    factor: float = 1.0,
) -> None:
    assert set(gradients) == set(true)
    for name, gradient in gradients.items():
        assert true[name].abs().max() > 0.01, f"{name} would be close to anything"
        expected = factor * true[name]
        torch.testing.assert_close(
            gradient.double(),
            expected,
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("name", SPECS)
def test_loss_scores_and_gradients_match_fp64_autograd(name: str, impl: str) -> None:
    """Every token at a temperature of its own; rows do not count by weight or by target."""
    batch = head_batch(temperature=temperatures())
    out, gradients = ours(SPECS[name], batch, impl, temperature=temperatures())
    true_loss, true_gradients, true_scores = head_truth(SPECS[name], batch, temperatures())
    assert out.loss.item() == pytest.approx(true_loss.item(), rel=1e-5, abs=1e-5)
    close(gradients, true_gradients)
    rows = counted(batch)
    for scores_T, true in zip((out.logprob_T.cpu(), out.entropy_T.cpu()), true_scores, strict=True):
        is_read = (
            scores_T[rows] != 0
            if name in ("mis", "gspo-all")
            else torch.ones_like(true, dtype=torch.bool)
        )  # MIS drops rows
        assert is_read.sum() >= 6 and (scores_T[~rows] == 0).all()
        torch.testing.assert_close(
            scores_T[rows][is_read].double(), true[is_read], rtol=1e-6, atol=5e-6
        )


@pytest.mark.parametrize("name", SPECS)
def test_statistics_are_those_of_the_policy_loss_of_the_logits(name: str, impl: str) -> None:
    batch = head_batch()
    out, _ = ours(SPECS[name], batch, impl)
    others = {key: value for key, value in batch.items() if key not in HEAD}
    expected = policy_loss(
        plain_logits(batch).float(), **others, spec=SPECS[name], impl="torch"
    ).stats
    assert set(out.stats) == set(expected) and expected["num_tokens_sum"] > 5
    for stat, value in expected.items():
        torch.testing.assert_close(
            out.stats[stat].cpu(),
            value,
            rtol=1e-5,
            atol=1e-5,
            msg=lambda text, stat=stat: f"{stat}: {text}",
        )


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("name", MAIN)
def test_temperature_softcap_masks_and_no_bias(name: str, softcap: float | None, impl: str) -> None:
    """Sampling masks without ids, with and without the target, in any order; chunks of five rows
    cut the list of ids.
    """
    num_tokens, vocab = 16, 17
    rng = torch.Generator().manual_seed(5)
    subsets = [
        torch.randperm(vocab, generator=rng)[: (0, 1, 4, 9)[row % 4]].tolist()
        for row in range(num_tokens)
    ]
    batch = head_batch(num_tokens, vocab=vocab, temperature=0.7, subsets=subsets)
    batch["bias_V"] = torch.zeros(vocab)
    true_loss, true_gradients, _ = head_truth(
        SPECS[name], batch, 0.7, softcap=softcap, subsets=subsets
    )
    options = {
        "temperature": 0.7,
        "softcap": softcap,
        "sampling_mask": mask_of(subsets),
        "memory_budget": 5 * vocab * 4,
    }
    out, gradients = ours(SPECS[name], batch | {"bias_V": None}, impl, **options)
    assert out.loss.item() == pytest.approx(true_loss.item(), rel=1e-5, abs=1e-5)
    close(gradients, {key: value for key, value in true_gradients.items() if key != "bias_V"})


@pytest.mark.parametrize("name", MAIN)
def test_gradients_are_scaled_by_the_upstream_factor(name: str, impl: str) -> None:
    batch = head_batch()
    _, gradients = ours(SPECS[name], batch, impl, scale=-0.37)
    close(gradients, head_truth(SPECS[name], batch)[1], factor=-0.37)


@pytest.mark.parametrize(
    "needs",
    [("hidden_TD",), ("weight_VD",), ("bias_V",), ("hidden_TD", "bias_V"), ("weight_VD", "bias_V")],
)
@pytest.mark.parametrize("name", MAIN)
def test_tensors_without_requires_grad_get_no_gradient(
    name: str, needs: tuple[str, ...], impl: str
) -> None:
    """A frozen head, hidden states that are given, a bias trained alone."""
    batch = head_batch(12)
    all_out, all_gradients = ours(SPECS[name], batch, impl)
    out, gradients = ours(SPECS[name], batch, impl, needs=needs)
    assert torch.equal(out.loss, all_out.loss) and set(gradients) == set(needs)
    assert all(
        torch.equal(gradients[key], all_gradients[key]) and gradients[key].any() for key in needs
    )


@pytest.mark.parametrize("name", MAIN)
def test_without_a_gradient_the_loss_is_the_same(name: str, impl: str) -> None:
    batch = head_batch(12)
    expected, _ = ours(SPECS[name], batch, impl)
    moved = on_device(batch, impl)
    plain = linear_policy_loss(**moved, spec=SPECS[name], impl=impl)
    leaves = {key: moved[key].clone().requires_grad_() for key in HEAD}
    with torch.no_grad():
        quiet = linear_policy_loss(**{**moved, **leaves}, spec=SPECS[name], impl=impl)
    for out in (plain, quiet):
        assert not out.loss.requires_grad
        found = [(x.loss.detach(), x.logprob_T, x.entropy_T) for x in (out, expected)]
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(out.stats, expected.stats, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("name", MAIN)
def test_a_second_backward_pass_is_refused(name: str, retain_graph: bool, impl: str) -> None:
    batch = on_device(head_batch(6), impl)
    hidden = batch["hidden_TD"].clone().requires_grad_()
    out = linear_policy_loss(**{**batch, "hidden_TD": hidden}, spec=SPECS[name], impl=impl)
    (2 * out.loss).backward(retain_graph=retain_graph)
    assert hidden.grad is not None
    if (
        retain_graph and name == "own"
    ):  # logits are computed again: a graph that was retained gives the same once more
        first = hidden.grad.clone()
        (2 * out.loss).backward()
        assert torch.equal(hidden.grad, 2 * first) and first.any()
        return
    with pytest.raises(RuntimeError, match=r"twice|second time|modified by an inplace operation"):
        out.loss.backward()


@pytest.mark.parametrize("name", [*MAIN, "cispo", "tis"])
def test_rows_left_out_are_not_read(name: str, impl: str) -> None:
    """Hidden states and all else of rows that do not count may hold anything: everything is as if
    they were not there.
    """
    batch, few, rows = with_garbage(name)
    alone, alone_gradients = ours(SPECS[name], few, impl)
    out, gradients = ours(SPECS[name], batch, impl)
    assert out.loss.item() == pytest.approx(alone.loss.item(), rel=1e-6)
    hidden = gradients["hidden_TD"]
    assert (
        (hidden[~rows] == 0).all()
        and (out.logprob_T.cpu()[~rows] == 0).all()
        and (out.entropy_T.cpu()[~rows] == 0).all()
    )
    close(
        {**gradients, "hidden_TD": hidden[rows]},
        {key: value.double() for key, value in alone_gradients.items()},
        rtol=1e-5,
    )
    torch.testing.assert_close(out.stats, alone.stats, rtol=1e-5, atol=1e-6)


def with_garbage(name: str) -> tuple[Batch, Batch, Tensor]:
    """(a batch whose rows that do not count hold garbage, the batch without them, the rows that
    count).
    """
    batch = head_batch()
    rows = counted(batch)
    assert (~rows & (batch["weight_T"] == 0)).sum() >= 3 and (
        ~rows & (batch["target_ids_T"] < 0)
    ).sum() >= 2
    few = {
        key: value if key in ("weight_VD", "bias_V", "cu_seqlens_S1") else value[rows]
        for key, value in batch.items()
    }
    few["cu_seqlens_S1"] = torch.tensor(
        [int(rows[:bound].sum()) for bound in batch["cu_seqlens_S1"]]
    )
    for i, index in enumerate((~rows).nonzero()[:, 0].tolist()):
        for key in (
            "hidden_TD",
            "old_logprob_T",
            "ref_logprob_T",
            "sampler_logprob_T",
            "advantage_T",
        ):
            batch[key][index] = (math.nan, math.inf, -math.inf, 1e30)[i % 4]
    return batch, few, rows


@pytest.mark.parametrize("name", ["k3-entropy", "gspo-all"])
def test_uncompacted_garbage_is_never_silently_wrong(name: str, impl: str) -> None:
    """compact=False multiplies with the hidden states of all rows. 0 * NaN may reach the weight's
    gradient, and then as NaN.
    """
    batch, few, rows = with_garbage(name)
    alone, alone_gradients = ours(SPECS[name], few, impl)
    out, gradients = ours(SPECS[name], batch, impl, compact=False)
    assert out.loss.item() == pytest.approx(alone.loss.item(), rel=1e-6)
    assert (gradients["hidden_TD"][~rows] == 0).all()
    torch.testing.assert_close(
        gradients["hidden_TD"][rows], alone_gradients["hidden_TD"], rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(gradients["bias_V"], alone_gradients["bias_V"], rtol=1e-5, atol=1e-6)
    weight, expected = gradients["weight_VD"], alone_gradients["weight_VD"]
    assert weight.isnan().all() or torch.allclose(weight, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in SPECS if name not in ("mis", "tis")])
def test_no_tokens_give_a_zero_loss(name: str, impl: str) -> None:
    batch = {
        key: value if key in ("weight_VD", "bias_V") else value[:0]
        for key, value in head_batch().items()
    }
    batch["cu_seqlens_S1"] = torch.tensor([0, 0])
    out, gradients = ours(SPECS[name], batch, impl)
    assert out.loss.item() == 0 and gradients["hidden_TD"].shape == (0, 24)
    assert (
        gradients["weight_VD"].shape == (17, 24)
        and not gradients["weight_VD"].any()
        and not gradients["bias_V"].any()
    )
    assert all((value == 0).all() for key, value in out.stats.items() if key.endswith("_sum"))


@pytest.mark.parametrize("name", MAIN)
def test_a_bf16_head_loses_less_than_plain_torch_does(name: str, impl: str) -> None:
    """Root mean squares of what is lost. The floor is one rounding of the result; fp32 logits spare
    most of the rest.
    """
    batch = head_batch(80 if impl == "torch" else 30, 64, dtype=torch.bfloat16)
    _, true, true_scores = head_truth(SPECS[name], batch)
    _, plain, plain_scores = head_truth(SPECS[name], batch, dtype=torch.bfloat16)
    rows = counted(batch)
    for fp32_logits in (False, True):
        out, gradients = ours(SPECS[name], batch, impl, fp32_logits=fp32_logits)
        for key in HEAD:
            error, plain_error = ((x[key] - true[key]).norm() for x in (gradients, plain))
            assert (
                error
                <= (0.5 if fp32_logits else 1.0) * plain_error
                + BF16_ROUNDING / 2 * true[key].norm()
            ), (key, fp32_logits)
        for ours_T, true_score, plain_score in zip(
            (out.logprob_T, out.entropy_T), true_scores, plain_scores, strict=True
        ):
            score = torch.where(
                ours_T.cpu()[rows] != 0, ours_T.cpu()[rows], true_score
            )  # MIS drops rows
            assert (score - true_score).norm() <= (1e-4 if fp32_logits else 1.0) * (
                plain_score - true_score
            ).norm()


@pytest.mark.parametrize("name", MAIN)
def test_fp16_heads(name: str, impl: str) -> None:
    batch = head_batch(dtype=torch.float16)
    _, gradients = ours(SPECS[name], batch, impl, fp32_logits=True)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float16}
    close(gradients, head_truth(SPECS[name], batch)[1], rtol=2**-8, atol=2e-3)


def test_fp64_heads_get_fp64_gradients() -> None:
    """Exact to the last digits, which fp32 products or a softmax in fp32 would lose. (What is [T]
    is fp32, hence numbers of few digits.)
    """
    batch = head_batch(dtype=torch.float64)
    batch["advantage_T"], batch["weight_T"] = (
        batch["advantage_T"].sign(),
        2 * batch["weight_T"].sign(),
    )
    out, gradients = ours(SPECS["nll"], batch, "torch", memory_budget=4 * 17 * 8)
    true_loss, true, _ = head_truth(SPECS["nll"], batch)
    assert out.loss.item() == pytest.approx(true_loss.item(), rel=1e-6)
    close(gradients, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spec", [LossSpec("nll"), partial(token_loss, LossSpec("nll"))])
@pytest.mark.parametrize("rows", [1, 60])
def test_the_gradient_of_a_bf16_weight_is_summed_in_fp32(rows: int, spec: Any, impl: str) -> None:
    """One row per chunk or one chunk, and the first row weighs so much that bf16 would round away
    whatever comes after it.
    """
    num_tokens, vocab = 60, 5
    batch = head_batch(num_tokens, 8, vocab, dtype=torch.bfloat16)
    batch["hidden_TD"].fill_(1.0).sub_(
        0.1 * torch.rand(num_tokens, 8, generator=torch.Generator().manual_seed(0))
    )
    batch |= {
        "advantage_T": torch.ones(num_tokens),
        "weight_T": torch.ones(num_tokens),
        "target_ids_T": batch["target_ids_T"] * 0,
    }
    batch["weight_T"][0] = 700
    _, gradients = ours(spec, batch, impl, memory_budget=2 * vocab * rows)
    true = head_truth(SPECS["nll"], batch)[1]["weight_VD"]
    dlogits = batch["weight_T"][:, None] * (
        plain_logits(batch).softmax(-1) - torch.eye(vocab, dtype=torch.float64)[0]
    )
    rounded = torch.zeros(vocab, 8, dtype=torch.bfloat16)
    for dlogits_V, hidden_D in zip(dlogits.bfloat16(), batch["hidden_TD"], strict=True):
        rounded += dlogits_V[:, None] * hidden_D
    error, rounded_error = (
        (x - true).norm() / true.norm() for x in (gradients["weight_VD"], rounded)
    )
    assert error < BF16_ROUNDING and rounded_error > 0.05


@pytest.mark.parametrize(("dtype", "lost"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_fp32_logits_are_as_exact_as_their_operands(
    dtype: torch.dtype, lost: float, impl: str
) -> None:
    """Logits of size 30, of which a 16-bit number keeps 8 or 11 bits."""
    batch = head_batch(24, 64, vocab=40, dtype=dtype)
    batch["hidden_TD"] *= 16
    logits, targets = plain_logits(batch), batch["target_ids_T"]
    assert 25 < logits.std() < 40
    true = torch.where(targets >= 0, plain_rows(logits, targets.clamp(min=0))[0], 0.0)
    moved = on_device({name: batch[name] for name in (*HEAD, "target_ids_T")}, impl)
    errors = {}
    for fp32_logits in (False, True):
        logprob_T = linear_logprobs(**moved, fp32_logits=fp32_logits, impl=impl).logprob_T
        errors[fp32_logits] = (logprob_T.cpu() - true).abs().max()
        of_loss = linear_policy_loss(
            **on_device(batch, impl), spec=SPECS["clip"], fp32_logits=fp32_logits, impl=impl
        ).logprob_T
        rows = counted(batch)
        torch.testing.assert_close(of_loss.cpu()[rows], logprob_T.cpu()[rows], rtol=1e-6, atol=1e-6)
    assert errors[True] <= 1e-4 and errors[False] > lost


def test_what_lies_between_rows_of_logits_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may multiply it, by zeros, in the products behind."""
    monkeypatch.setattr(
        Tensor, "new_empty", lambda x, size, dtype: x.new_full(size, math.nan, dtype=dtype)
    )
    weight_VD = torch.ones(13, 4, dtype=torch.bfloat16)
    for bias_V in (None, torch.ones(13, dtype=torch.bfloat16)):
        head = LMHead(weight_VD, bias_V, False, chunk_rows=8, whole_rows=8)
        logits_CV = head.logits(torch.ones(3, 4, dtype=torch.bfloat16))
        whole = logits_CV.as_strided((3, 16), (16, 1))
        assert torch.equal(whole[:, 13:], torch.zeros(3, 3).bfloat16())
        assert bool((logits_CV == 4 + (bias_V is not None)).all())
