"""What others pass to the losses: shapes and dtypes, autocast, other trainers' options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flowkernels import (
    LogProbs,
    LossSpec,
    PolicyLoss,
    linear_logprobs,
    linear_policy_loss,
    logprobs,
    policy_loss,
)
from flowkernels.sequences import sequence_mean
from graphs import Graphs
from kernel_truth import IMPLS, Batch, counted, plain_rows
from rows import HEAD, batch_of, leaves_of
from rows import ours as result_of
from torch import Tensor

SIZE_B, SIZE_L, SIZE_D, SIZE_V = 2, 3, 4, 7
TEMPERATURES = torch.tensor([0.5, 1.0, 1.5, 2.0, 0.7, 1.2])
PER_TOKEN = (
    *("target_ids_T", "advantage_T", "weight_T", "temperature"),
    *("old_logprob_T", "ref_logprob_T", "sampler_logprob_T"),
)


def flat_batch(form: str = "head", **options: Any) -> Batch:
    """Two sequences; a target and weights take rows out of both."""
    batch = batch_of(form, SIZE_B * SIZE_L, SIZE_V, dim=SIZE_D, **options)
    return batch | {"cu_seqlens_S1": torch.arange(0, SIZE_B * SIZE_L + 1, SIZE_L)}


def new_batch(form: str = "head") -> Batch:
    """Tokens in [B, L], and every option there is."""
    batch = flat_batch(form, temperature=TEMPERATURES, softcap=5.0, masked=True)
    rows = (*PER_TOKEN, "hidden_TD", "logits_TV")
    return {
        name: value.unflatten(0, (SIZE_B, SIZE_L)) if name in rows else value
        for name, value in batch.items()
    }


def both() -> tuple[Batch, Batch]:
    return new_batch(), new_batch("logits")


def without(batch: Batch, *names: str) -> Batch:
    return {name: value for name, value in batch.items() if name not in names}


def flat(batch: Batch) -> Batch:
    """The same batch with one dimension of tokens."""
    rows = (*PER_TOKEN, "hidden_TD", "logits_TV")
    return {name: value.flatten(0, 1) if name in rows else value for name, value in batch.items()}


def run(batch: Batch, spec: Any, impl: str = "torch", **options: Any) -> tuple[PolicyLoss, Tensor]:
    """The result of the loss that has these arguments, and the gradient of its rows."""
    out, gradients = result_of(spec, batch, impl, **options)
    return out, gradients[leaves_of(batch)[0]]


def same(ours: tuple[PolicyLoss, Tensor], theirs: tuple[PolicyLoss, Tensor]) -> None:
    """The loss and its gradient to the bit; that of `theirs` is not all zeros."""
    assert torch.equal(ours[0].loss, theirs[0].loss) and theirs[1].any()
    assert torch.equal(ours[1], theirs[1].view(ours[1].shape))


SPECS = {
    "clip": LossSpec(dual_clip=3.0, kl_coef=0.1, entropy_coef=0.1, tis=1.1, mis=(0.5, 2.0)),
    "gspo": LossSpec("gspo"),
}
FUSED = LossSpec()


# ---- batches


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_batch_is_its_rows_one_after_another(spec: str, impl: str) -> None:
    for batch in both():
        ours, theirs = (run(form, SPECS[spec], impl) for form in (batch, flat(batch)))
        same(ours, theirs)
        for name in ("logprob_T", "entropy_T"):
            shaped = getattr(ours[0], name)
            assert shaped.shape == (SIZE_B, SIZE_L)
            assert torch.equal(shaped.flatten(), getattr(theirs[0], name))


def test_log_probs_of_a_batch_have_its_shape_and_their_gradient_reaches_it() -> None:
    names = ("target_ids_T", "temperature", "softcap", "sampling_mask")
    for batch in both():
        name = "logits_TV" if "logits_TV" in batch else "hidden_TD"
        function: Any = logprobs if name == "logits_TV" else linear_logprobs
        results: list[tuple[LogProbs, Tensor]] = []
        for form in (batch, flat(batch)):
            rows = form[name].clone().requires_grad_()
            given = {x: form[x] for x in (*names, "weight_VD", "bias_V") if x in form}
            out = function(**{name: rows}, **given, differentiable=True)
            (out.logprob_T + 2 * out.entropy_T).sum().backward()
            assert rows.grad is not None and rows.grad.any()
            results.append((out, rows.grad))
        ours, theirs = results
        for field in ("logprob_T", "entropy_T", "lse_T"):
            assert getattr(ours[0], field).shape == (SIZE_B, SIZE_L)
            assert torch.equal(getattr(ours[0], field).flatten(), getattr(theirs[0], field))
        assert torch.equal(ours[1].flatten(0, 1), theirs[1])


def test_a_batch_may_have_any_number_of_dimensions() -> None:
    batch = new_batch("logits")
    deep = {
        name: value[None, :, :, None] if name in PER_TOKEN else value
        for name, value in batch.items()
    }
    deep["logits_TV"] = batch["logits_TV"][None, :, :, None]
    ours = run(deep, SPECS["clip"])
    assert ours[0].logprob_T.shape == (1, SIZE_B, SIZE_L, 1)
    same(ours, run(batch, SPECS["clip"]))


@pytest.mark.parametrize("spec", SPECS)
def test_a_gradient_goes_over_the_logits_of_a_batch(spec: str) -> None:
    batch = new_batch("logits")
    theirs = run(batch, SPECS[spec])
    logits = batch["logits_TV"].clone().requires_grad_()
    out = policy_loss(**{**batch, "logits_TV": logits}, spec=SPECS[spec], inplace=True)
    out.loss.backward()
    assert torch.equal(logits.detach(), theirs[1]) and logits.grad is not None
    assert torch.equal(logits.grad, theirs[1])


def test_logits_without_their_last_position_are_copied_or_refused() -> None:
    """A slice of positions is no view of rows; the whole with targets of -1 is the same loss."""
    batch = new_batch("logits")
    short = {name: batch[name][:, :-1] for name in (*PER_TOKEN, "logits_TV")}
    short["cu_seqlens_S1"] = torch.tensor([0, 2, 4])
    whole = {**short, **{name: batch[name].clone() for name in (*PER_TOKEN, "logits_TV")}}
    whole["target_ids_T"][:, -1] = -1
    whole["cu_seqlens_S1"] = batch["cu_seqlens_S1"]
    logits = batch["logits_TV"].clone().requires_grad_()
    out = policy_loss(**{**short, "logits_TV": logits[:, :-1]}, spec=SPECS["clip"])
    out.loss.backward()
    ours, theirs = (out, logits.grad), run(whole, SPECS["clip"])
    torch.testing.assert_close(ours[0].loss, theirs[0].loss)
    torch.testing.assert_close(ours[1], theirs[1])
    with pytest.raises(ValueError, match=r"logits_TV .* inplace=True, got \(2, 2, 7\)"):
        policy_loss(**short, spec=SPECS["clip"], inplace=True)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_tensor_of_another_shape_than_the_batch_is_named(name: str) -> None:
    for batch in both():
        for wrong in (batch[name].flatten(), batch[name][:, :-1], batch[name][..., None]):
            with pytest.raises(ValueError, match=rf"{name} must be .* \[2, 3\]"):
                run({**batch, name: wrong}, SPECS["clip"])


# ---- the policy that sampled is the current one


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("loss_type", ["clip", "cispo", "gspo"])
def test_without_old_log_probs_the_ratio_is_1_with_the_gradient_of_the_log_prob(
    loss_type: Any, impl: str
) -> None:
    """Even where the clip range is a point; for "gspo", with that of the sequence's mean."""
    for batch in both():
        given = without(flat(batch), "old_logprob_T", "sampler_logprob_T")
        spec = LossSpec(loss_type, clip_low=0.0, clip_high=0.0)
        ours = run(given, spec, impl)
        weight_T, advantage_T = given["weight_T"], given["advantage_T"]
        if loss_type == "gspo":
            bounds_S1 = given["cu_seqlens_S1"]
            mean_T = sequence_mean(weight_T * advantage_T, counted(given), bounds_S1)
            advantage_T = torch.where(counted(given), mean_T / weight_T, 0.0)
        policy_gradient = run({**given, "advantage_T": advantage_T}, LossSpec("nll"), impl)
        torch.testing.assert_close(ours[1], policy_gradient[1], rtol=1e-6, atol=1e-7)
        assert ours[1].any()
        stats = ours[0].stats
        assert stats["ratio_max"] == stats["ratio_min"] == 1 and stats["clipped_high_sum"] == 0
        counts_T = counted(given)
        if loss_type != "cispo":  # its loss is the policy gradient's
            expected = -(weight_T * given["advantage_T"])[counts_T].sum()
            torch.testing.assert_close(ours[0].loss.cpu(), expected)


# ---- autocast


@pytest.mark.parametrize("names", [("hidden_TD",), ("weight_VD", "bias_V"), ("weight_VD",)])
def test_autocast_casts_tensors_of_unlike_dtypes_to_its_own(names: tuple[str, ...]) -> None:
    """As torch.nn.functional.linear would; gradients come back in the dtypes of the tensors."""
    batch = new_batch()
    head = HEAD
    half = {name: batch[name].bfloat16() for name in head}
    mixed = {
        name: (half[name] if name in names else batch[name]).clone().requires_grad_()
        for name in head
    }
    half = {name: x.requires_grad_() for name, x in half.items()}
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_policy_loss(**{**batch, **mixed}, spec=SPECS["clip"])
        scores = linear_logprobs(**mixed, target_ids_T=batch["target_ids_T"])
    theirs = linear_policy_loss(**{**batch, **half}, spec=SPECS["clip"])
    assert torch.equal(ours.loss, theirs.loss)
    expected = linear_logprobs(**half, target_ids_T=batch["target_ids_T"])
    assert torch.equal(scores.logprob_T, expected.logprob_T)
    ours.loss.backward()
    theirs.loss.backward()
    for name in head:
        given, wanted = mixed[name].grad, half[name].grad
        assert given is not None and wanted is not None and wanted.any()
        assert given.dtype == mixed[name].dtype
        torch.testing.assert_close(given.float(), wanted.float(), rtol=1e-2, atol=1e-3)


def test_tensors_of_unlike_dtypes_are_refused_without_autocast() -> None:
    batch = new_batch()
    with pytest.raises(ValueError, match=r"weight_VD must be torch.float32 .* got torch.bfloat16"):
        run({**batch, "weight_VD": batch["weight_VD"].bfloat16()}, SPECS["clip"])
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match=r"weight_VD must be torch.float32 .* got torch.float64"),
    ):
        run({**batch, "weight_VD": batch["weight_VD"].double()}, SPECS["clip"])


# ---- dtypes, and advantages of sequences


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("target_ids_T", torch.int32),
        ("advantage_T", torch.bfloat16),
        ("advantage_T", torch.float16),
        ("advantage_T", torch.float64),
        ("weight_T", torch.bool),
        ("weight_T", torch.int64),
        ("weight_T", torch.bfloat16),
        ("old_logprob_T", torch.float64),
        ("ref_logprob_T", torch.float64),
        ("sampler_logprob_T", torch.float64),
        ("temperature", torch.bfloat16),
    ],
)
def test_other_dtypes_become_those_of_the_losses(name: str, dtype: torch.dtype) -> None:
    for batch in both():
        given = batch[name].to(dtype)
        exact = {**batch, name: given.to(batch[name].dtype)}
        same(run({**batch, name: given}, SPECS["clip"]), run(exact, SPECS["clip"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_advantage_of_a_sequence_is_that_of_its_tokens(dtype: torch.dtype) -> None:
    advantage_S = torch.tensor([1.5, 7.0, -0.5], dtype=dtype)
    bounds = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    for batch in (new_batch(), flat(new_batch("logits"))):
        batch["cu_seqlens_S1"] = bounds
        advantage_T = torch.tensor([1.5, 1.5, -0.5, -0.5, -0.5, -0.5])
        expanded = {**batch, "advantage_T": advantage_T.view(batch["weight_T"].shape)}
        ours = run({**batch, "advantage_T": advantage_S}, SPECS["gspo"])
        same(ours, run(expanded, SPECS["gspo"]))
        for wrong in (advantage_S[:2], advantage_S[:, None]):
            with pytest.raises(ValueError, match="advantage_T must be float32"):
                run({**batch, "advantage_T": wrong}, SPECS["gspo"])
        with pytest.raises(ValueError, match="advantage_T must be float32"):
            given = {**batch, "advantage_T": advantage_S, "cu_seqlens_S1": None}
            run(given, LossSpec())


# ---- options of other trainers


def sequence_ratios(batch: Batch) -> Tensor:
    """pi_old / pi_sampler over the tokens of a flat batch that count, at every token."""
    counts = counted(batch)
    log_ratio = torch.where(counts, batch["old_logprob_T"] - batch["sampler_logprob_T"], 0.0)
    return log_ratio.view(SIZE_B, SIZE_L).sum(1).exp().repeat_interleave(SIZE_L)


@pytest.mark.parametrize("loss_type", ["clip", "gspo"])
def test_a_correction_of_sequences_takes_their_whole_ratio(loss_type: Any) -> None:
    """Uncounted tokens may hold anything."""
    for batch in map(flat, both()):
        ratio = sequence_ratios(batch)
        low, high = sorted({*ratio.tolist()})
        for name, value in (("old_logprob_T", 7.0), ("sampler_logprob_T", 1.0)):
            batch[name] = batch[name].clone()
            batch[name][~counted(batch)] = torch.tensor([torch.nan, value, torch.nan])
        bound = (low + high) / 2
        cut = ratio.clamp(max=bound)
        truncated = {**batch, "advantage_T": batch["advantage_T"] * cut}
        spec = LossSpec(loss_type, tis=bound, correction_level="sequence")
        ours, theirs = run(batch, spec), run(truncated, LossSpec(loss_type))
        torch.testing.assert_close(ours[0].loss, theirs[0].loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-6)
        assert theirs[1].any()
        masked = {**batch, "weight_T": torch.where(ratio > bound, 0.0, batch["weight_T"])}
        spec = LossSpec(loss_type, mis=(0.0, bound), correction_level="sequence")
        same(run(batch, spec), run(masked, LossSpec(loss_type)))


@pytest.mark.parametrize("limit", [20.0, 0.2], ids=["free", "clamped"])
@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("loss_type", ["clip", "gspo"])
def test_a_kl_term_with_the_ratio_has_the_gradient_of_both(
    loss_type: Any, has_old: bool, limit: float
) -> None:
    """Advantages of 0 leave the policy term out of the truth. A clamped ratio is a constant."""
    batch = flat_batch("logits")
    batch["advantage_T"] = torch.zeros(6)
    batch["weight_T"] = torch.tensor([0.5, 0.0, 1.5, 2.0, -1.0, 0.3])
    counts, logits = counted(batch), batch["logits_TV"].double().requires_grad_()
    logp, _, _ = plain_rows(logits, batch["target_ids_T"].clamp(min=0))
    log_ratio = logp - (batch["old_logprob_T"] if has_old else logp.detach())
    if loss_type == "gspo":
        total = torch.where(counts, log_ratio, 0.0).view(SIZE_B, SIZE_L).sum(1)
        mean = total / counts.view(SIZE_B, SIZE_L).sum(1)
        log_ratio = mean.repeat_interleave(SIZE_L)
    u = (batch["ref_logprob_T"] - logp).clamp(-limit, limit)
    term = 0.3 * log_ratio.clamp(-limit, limit).exp() * (u.exp() - u - 1)
    true = (batch["weight_T"] * term)[counts].sum()
    true.backward()
    assert logits.grad is not None and logits.grad.abs().max() > 1e-3
    given = batch if has_old else without(batch, "old_logprob_T", "sampler_logprob_T")
    spec = LossSpec(loss_type, kl_coef=0.3, kl_ratio=True, log_ratio_limit=limit)
    for inplace in (False, True):
        out, gradient = run(given, spec, inplace=inplace)
        torch.testing.assert_close(out.loss.double(), true.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient.double(), logits.grad, rtol=1e-4, atol=1e-6)


# ---- the rest


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("loss_type", "advantage", "cost"),
    [
        ("clip", 1.0, -1.2),
        ("clip", -1.0, 4.85165e8),
        ("gspo", -1.0, 4.85165e8),
        ("cispo", -1.0, None),
    ],
)
def test_an_old_log_prob_of_minus_infinity_has_a_finite_loss(
    loss_type: Any, advantage: float, cost: float | None, impl: str
) -> None:
    """And no gradient, but for "cispo", whose weight is bounded."""
    batch = {
        "logits_TV": torch.randn(1, SIZE_V, generator=torch.Generator().manual_seed(0)),
        "target_ids_T": torch.tensor([2]),
        "advantage_T": torch.tensor([advantage]),
        "weight_T": torch.ones(1),
        "old_logprob_T": torch.tensor([-torch.inf]),
        "cu_seqlens_S1": torch.tensor([0, 1]),
    }
    out, gradient = run(batch, LossSpec(loss_type), impl)
    if cost is None:
        weighted = {**batch, "advantage_T": torch.tensor([1.2 * advantage])}
        same((out, gradient), run(weighted, LossSpec("nll"), impl))
    else:
        assert out.loss.item() == pytest.approx(cost, rel=1e-5)
        assert not gradient.any()
    assert out.stats["ratio_max"] == torch.inf


def test_what_callers_pass_compiles_into_one_graph() -> None:
    spec = LossSpec("clip", kl_coef=0.3, tis=1.0)
    batch = {**new_batch(), "advantage_T": torch.tensor([1.0, -1.0])}
    batch["weight_T"], batch["target_ids_T"] = batch["weight_T"] > 0, batch["target_ids_T"].int()

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            given = {**batch, "hidden_TD": hidden, "weight_VD": weight, "bias_V": None}
            fused = linear_policy_loss(**given, spec=FUSED).loss
            return fused + linear_policy_loss(**given, spec=spec).loss

    results = []
    for function in (loss, Graphs().compile(loss, dynamic=True)):
        hidden = batch["hidden_TD"].bfloat16().requires_grad_()
        weight = batch["weight_VD"].clone().requires_grad_()
        value = function(hidden, weight)
        value.backward()
        results.append((value.detach(), hidden.grad, weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
