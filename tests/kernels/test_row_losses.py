"""What holds of every loss of rows (`rows.SPECS`) in every form (`rows.FORMS`), in both kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from flowkernels import LossSpec, linear_logprobs, linear_policy_loss, token_loss
from flowkernels.lm_head import LMHead
from kernel_truth import BF16_ROUNDING, counted, device_of, on_device, plain_rows
from rows import (
    BRANCHES,
    FORMS,
    HEAD,
    MAIN,
    SETTINGS,
    SPECS,
    VOCAB,
    batch_of,
    cases,
    close,
    head_batch,
    leaves_of,
    loss_of,
    of_rows,
    ours,
    plain_logits,
    truth,
    with_garbage,
)
from torch import Tensor

LOGITS = ("logits", "inplace")
of_cases = partial(pytest.mark.parametrize, ("name", "form", "impl"))


def check(name: str, form: str, impl: str, **options: Any) -> None:
    """Loss, gradients, log-probs and entropies against autograd of the plain formula in fp64."""
    batch = batch_of(form, **options)
    out, gradients = ours(SPECS[name], batch, impl, **FORMS[form])
    loss, true, scores = truth(SPECS[name], batch)
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-5)
    close(gradients, true)
    rows = counted(batch)
    low, high = getattr(SPECS[name], "mis", None) or (0.0, math.inf)
    behind = (batch["old_logprob_T"] - batch["sampler_logprob_T"])[rows].exp()
    is_read = (behind >= low) & (behind <= high)
    assert is_read.sum() >= 6
    for found_T, true_T in zip((out.logprob_T, out.entropy_T), scores, strict=False):
        expected = torch.where(is_read, true_T, 0.0)
        torch.testing.assert_close(found_T[rows].double(), expected, rtol=1e-6, atol=5e-6)
        assert (found_T[~rows] == 0).all()


@of_cases(cases(SPECS, kernels=BRANCHES))
def test_loss_gradients_and_scores_are_those_of_fp64(name: str, form: str, impl: str) -> None:
    """Every token at a temperature of its own; some do not count."""
    check(name, form, impl, **SETTINGS["per-token"])


OTHERS = [
    (*case, setting)
    for case in cases((*MAIN, "gspo-z-loss", "own"))
    for setting in SETTINGS
    if setting != "per-token" and (case[2] == "torch" or "softcap" in setting)
]
"""On kernels, other tests have a mask without a softcap, and neither."""


@pytest.mark.parametrize(("name", "form", "impl", "setting"), OTHERS)
def test_temperature_softcap_and_masks(name: str, form: str, impl: str, setting: str) -> None:
    check(name, form, impl, **SETTINGS[setting])


@of_cases(cases(("clip", "gspo"), ("logits",), kernels=("clip", "gspo")))
def test_a_bounded_kl_has_a_gradient_within_its_bound_alone(
    name: str, form: str, impl: str
) -> None:
    """Log-probs of a reference on both sides of where k3 is 10; one kernel, and two passes."""
    spec, batch = replace(SPECS[name], kl="low_var_kl", kl_coef=0.4), batch_of(form)
    batch["ref_logprob_T"] = batch["old_logprob_T"] + torch.linspace(-12.5, 4.5, 20)
    out, gradients = ours(spec, batch, impl)
    loss, true, _ = truth(spec, batch)
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    close(gradients, true)
    wide, _ = ours(replace(spec, kl="k3"), batch, impl)
    assert wide.stats["kl_sum"] > out.stats["kl_sum"] + 10


# ---- what surrounds a loss


@of_cases(cases((*MAIN, "own")))
def test_gradients_are_scaled_by_what_follows_the_loss(name: str, form: str, impl: str) -> None:
    batch = batch_of(form)
    out, gradients = ours(SPECS[name], batch, impl, scale=-0.37, **FORMS[form])
    loss, true, _ = truth(SPECS[name], batch)
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    close(gradients, true, factor=-0.37)


@of_cases(cases(("all",), LOGITS))
def test_the_factor_of_a_bf16_gradient_is_not_rounded(name: str, form: str, impl: str) -> None:
    batch = batch_of(form, 10, dtype=torch.bfloat16)
    (once,), (scaled,) = (
        ours(SPECS[name], batch, impl, scale=scale, **FORMS[form])[1].values()
        for scale in (1.0, -0.37)
    )
    assert torch.equal(scaled, (once.float() * -0.37).bfloat16()) and scaled.any()


@pytest.mark.parametrize("needs", [("hidden_TD",), ("weight_VD",), ("weight_VD", "bias_V")])
@pytest.mark.parametrize("name", ["all", "gspo-all", "own"])
def test_tensors_without_requires_grad_get_no_gradient(name: str, needs: tuple[str, ...]) -> None:
    """A head that is frozen, and hidden states that are given."""
    batch = batch_of("head")
    all_out, all_gradients = ours(SPECS[name], batch, "torch")
    out, gradients = ours(SPECS[name], batch, "torch", needs=needs)
    assert torch.equal(out.loss, all_out.loss) and set(gradients) == set(needs)
    for key, gradient in gradients.items():
        assert torch.equal(gradient, all_gradients[key]) and gradient.any()


@of_cases(cases((*MAIN, "own"), ("head",)))
def test_without_a_gradient_the_loss_is_the_same(name: str, form: str, impl: str) -> None:
    batch = batch_of(form)
    expected, _ = ours(SPECS[name], batch, impl)
    moved = on_device(batch, impl)
    leaves = {key: moved[key].clone().requires_grad_() for key in leaves_of(batch)}
    with torch.no_grad():
        quiet = loss_of(SPECS[name], {**moved, **leaves}, impl)
    for out in (loss_of(SPECS[name], moved, impl), quiet):
        assert not out.loss.requires_grad
        found = [(x.loss.cpu(), x.logprob_T.cpu(), x.entropy_T.cpu()) for x in (out, expected)]
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
        stats = {key: value.cpu() for key, value in out.stats.items()}
        torch.testing.assert_close(stats, expected.stats, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("retain_graph", [False, True])
@of_cases(cases((*MAIN, "own"), ("logits", "inplace", "head"), kernels=("all", "gspo-all")))
def test_a_second_backward_pass_is_refused(
    name: str, form: str, impl: str, retain_graph: bool
) -> None:
    """Where it is not computed anew, from what a graph that was retained has kept."""
    batch = on_device(batch_of(form, 6), impl)
    leaf = batch[leaves_of(batch)[0]].requires_grad_()
    out = loss_of(SPECS[name], batch, impl, **FORMS[form])
    (2 * out.loss).backward(retain_graph=retain_graph)
    assert leaf.grad is not None
    keeps_logits = form == "logits" and name in ("gspo-all", "own")
    if retain_graph and (keeps_logits or (form == "head" and name == "own")):
        first = leaf.grad.clone()
        (2 * out.loss).backward()
        assert torch.equal(leaf.grad, 2 * first) and first.any()
        return
    is_formed_before = not keeps_logits and (form, name) != ("head", "own")
    message = "gradient of a policy loss was taken twice" if is_formed_before else "second time"
    with pytest.raises(RuntimeError, match=message):
        out.loss.backward()


# ---- rows


@of_cases(cases((*MAIN, "cispo", "tis", "own")))
def test_rows_left_out_are_not_read(name: str, form: str, impl: str) -> None:
    """Whatever they hold, everything is as if they were not there."""
    batch = batch_of(form, masked=name == "all")
    rows = counted(batch)
    alone, true = ours(SPECS[name], of_rows(batch, rows), impl)
    out, gradients = ours(SPECS[name], with_garbage(batch), impl, **FORMS[form])
    assert out.loss.item() == pytest.approx(alone.loss.item(), rel=1e-6)
    of_row = leaves_of(batch)[0]
    assert (gradients[of_row][~rows] == 0).all()
    close({**gradients, of_row: gradients[of_row][rows]}, true, rtol=1e-5)
    for scores_T, alone_T in ((out.logprob_T, alone.logprob_T), (out.entropy_T, alone.entropy_T)):
        assert (scores_T[~rows] == 0).all()
        torch.testing.assert_close(scores_T[rows], alone_T)
    torch.testing.assert_close(out.stats, alone.stats, rtol=1e-5, atol=1e-6)


@of_cases(cases(("all", "gspo-all"), ("head",)))
def test_uncompacted_garbage_is_never_silently_wrong(name: str, form: str, impl: str) -> None:
    """0 * NaN may reach the weight's gradient, and then as NaN."""
    batch = batch_of(form)
    rows = counted(batch)
    alone, true = ours(SPECS[name], of_rows(batch, rows), impl)
    out, gradients = ours(SPECS[name], with_garbage(batch), impl, compact=False)
    assert out.loss.item() == pytest.approx(alone.loss.item(), rel=1e-6)
    assert (gradients["hidden_TD"][~rows] == 0).all()
    gradients["hidden_TD"] = gradients["hidden_TD"][rows]
    if gradients["weight_VD"].isnan().all():
        del gradients["weight_VD"], true["weight_VD"]
    close(gradients, true, rtol=1e-5)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_reference_that_is_not_trained_on_may_be_nan(impl: str) -> None:
    batch = batch_of("logits")
    loss, true, _ = truth(LossSpec(), batch)
    batch["ref_logprob_T"] = torch.full((20,), math.nan)
    out, gradients = ours(LossSpec(), batch, impl)
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-5) and out.stats["kl_sum"].isnan()
    close(gradients, true)


@of_cases(cases(MAIN, LOGITS))
def test_a_nan_logit_of_a_counted_row_gives_nan(name: str, form: str, impl: str) -> None:
    batch = batch_of(form, 6)
    batch["target_ids_T"][3], batch["weight_T"][:] = 0, 1.0
    batch["logits_TV"][3, 12] = math.nan
    spec = SPECS[name]
    out, (gradient,) = nan = ours(replace(spec, tis=None, mis=None), batch, impl, **FORMS[form])
    gradient = nan[1]["logits_TV"]
    assert out.loss.isnan() and gradient[3].isnan().all()
    if name != "gspo-all":  # a sequence shares its ratio
        assert gradient[[0, 1, 2, 4, 5]].isfinite().all()


@of_cases(cases(MAIN, LOGITS))
def test_a_masked_vocabulary_is_as_good_as_absent(name: str, form: str, impl: str) -> None:
    """-inf logits: loss, entropy and gradient are those over the other ids."""
    batch = batch_of(form, 12, 40)
    batch["target_ids_T"] = torch.where(batch["target_ids_T"] < 0, -1, batch["target_ids_T"] % 9)
    logits = batch["logits_TV"]
    fewer, true = ours(SPECS[name], {**batch, "logits_TV": logits[:, :9]}, impl)
    logits[:, 9:] = -math.inf
    out, gradients = ours(SPECS[name], batch, impl, **FORMS[form])
    assert out.loss.item() == pytest.approx(fewer.loss.item(), rel=1e-6) and out.loss.isfinite()
    torch.testing.assert_close(out.entropy_T, fewer.entropy_T, rtol=1e-6, atol=1e-6)
    assert (gradients["logits_TV"][:, 9:] == 0).all()
    close({"logits_TV": gradients["logits_TV"][:, :9]}, true, rtol=1e-5, atol=1e-6)


@of_cases(cases(("clip", "cispo", "own", *MAIN)))
def test_no_tokens_give_a_zero_loss(name: str, form: str, impl: str) -> None:
    batch = of_rows(batch_of(form, masked=name == "all"), torch.zeros(20, dtype=torch.bool))
    batch["cu_seqlens_S1"] = torch.tensor([0, 0])
    out, gradients = ours(SPECS[name], batch, impl, **FORMS[form])
    assert out.loss.item() == 0
    for key, gradient in gradients.items():
        assert gradient.shape == batch[key].shape and not gradient.any()
    assert all((value == 0).all() for key, value in out.stats.items() if key.endswith("_sum"))
    assert (out.stats["ratio_max"].item(), out.stats["ratio_min"].item()) == (-math.inf, math.inf)


@of_cases([case for case in cases(MAIN, LOGITS) if case[2] == "triton"])
def test_two_runs_agree_to_the_bit_and_rows_do_not_see_each_other(
    name: str, form: str, impl: str
) -> None:
    """Kernels alone; each row of these batches is a sequence of its own."""
    batch = batch_of(form, 6, 300, masked=True)
    batch["target_ids_T"] = batch["target_ids_T"].clamp(min=0)
    batch |= {"weight_T": torch.ones(6), "cu_seqlens_S1": torch.arange(7)}
    (first, gradients), (second, same) = (
        ours(SPECS[name], batch, impl, **FORMS[form]) for _ in range(2)
    )
    gradient = gradients["logits_TV"]
    assert torch.equal(first.loss, second.loss) and torch.equal(gradient, same["logits_TV"])
    assert all(torch.equal(value, second.stats[stat]) for stat, value in first.stats.items())
    for i in (0, 3, 5):
        row = of_rows(batch, torch.arange(6) == i) | {"cu_seqlens_S1": torch.arange(2)}
        alone, of_row = ours(SPECS[name], row, impl, **FORMS[form])
        assert torch.equal(alone.logprob_T[0], first.logprob_T[i])
        assert torch.equal(alone.entropy_T[0], first.entropy_T[i])
        assert torch.equal(of_row["logits_TV"][0], gradient[i]) and gradient[i].any()


@of_cases(cases(MAIN, LOGITS))
def test_rows_of_a_larger_buffer(name: str, form: str, impl: str) -> None:
    """Every other row and a part of the columns; in place, nothing around them is touched."""
    batch = on_device(batch_of(form, 10, temperature=torch.linspace(0.5, 2.5, 10)), impl)
    expected = ours(SPECS[name], batch, impl)[1]["logits_TV"]
    batch["temperature"] = torch.stack([batch["temperature"], -batch["temperature"]], 1)[:, 0]
    buffer = torch.full((20, 40), 7.0, device=device_of(impl))
    view = buffer[::2, 3:20]
    view.copy_(batch["logits_TV"])
    before = buffer.clone()
    view.requires_grad_()
    loss_of(SPECS[name], {**batch, "logits_TV": view}, impl, **FORMS[form]).loss.backward()
    assert view.grad is not None and (expected != 0).any()
    # Kernels sum a row from the first multiple of 16 bytes on.
    same = {"rtol": 0, "atol": 0} if impl == "torch" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(view.grad.cpu(), expected, **same)
    before[::2, 3:20] = buffer[::2, 3:20]
    assert torch.equal(buffer, before)
    assert form == "inplace" or torch.equal(view.detach(), batch["logits_TV"])


@of_cases(cases(("all", "gspo-all", "own"), ("head",)))
def test_operands_may_have_any_strides(name: str, form: str, impl: str) -> None:
    """Hidden states cut out of longer rows, and a weight that is stored the other way round."""
    batch = batch_of(form)
    moved = on_device(batch, impl)
    wide = moved["hidden_TD"].repeat_interleave(2, 0).repeat(1, 2).requires_grad_()
    across = moved["weight_VD"].t().contiguous().requires_grad_()
    given = {**moved, "hidden_TD": wide[::2, 24:], "weight_VD": across.t()}
    out = loss_of(SPECS[name], given, impl)
    out.loss.backward()
    expected, true = ours(SPECS[name], batch, impl)
    torch.testing.assert_close(out.loss.cpu(), expected.loss, rtol=1e-6, atol=1e-6)
    found = {"hidden_TD": wide.grad[::2, 24:].cpu(), "weight_VD": across.grad.t().cpu()}
    close(found, {key: true[key] for key in found}, rtol=1e-5, atol=1e-6)
    assert not wide.grad[1::2].any() and not wide.grad[:, :24].any()


# ---- sampling masks, whose log-probs are tested in test_sampling_mask.py


@of_cases(cases(("clip", "k3-entropy", "gspo", "gspo-all"), LOGITS, kernels=("clip", "gspo-all")))
def test_the_gradient_stays_on_the_mask_unless_the_entropy_is_trained(
    name: str, form: str, impl: str
) -> None:
    batch = batch_of(form, 16, masked=True)
    gradient = ours(SPECS[name], batch, impl, **FORMS[form])[1]["logits_TV"]
    mask, is_in = batch["sampling_mask"], torch.zeros(16, VOCAB, dtype=torch.bool)
    row_K = torch.repeat_interleave(torch.arange(16), mask.offsets_T1.diff())
    is_in[row_K, mask.token_ids_K] = True
    is_in[mask.offsets_T1.diff() == 0] = True
    is_in[torch.arange(16), batch["target_ids_T"]] = True
    rows = gradient.any(1)
    assert rows.sum() >= 4 and (~is_in[rows]).sum() > 30
    spec = SPECS[name]
    if spec.entropy_coef:
        assert (gradient[rows] != 0).all()
    else:
        assert (gradient[rows][~is_in[rows]] == 0).all()


# ---- dtypes and extremes


@of_cases(cases(("clip", "cispo-all", "all", "gspo-all", "own"), ("logits", "head")))
def test_bf16_loses_less_than_plain_torch_does(name: str, form: str, impl: str) -> None:
    """All arithmetic is fp32: of logits the gradient loses its own rounding to bf16 and nothing
    else; of a head, root mean squares, whose floor that is. fp32 logits spare most of the rest.
    """
    num_tokens = 100 if impl == "torch" else 30
    batch = batch_of(form, num_tokens, dim=64, dtype=torch.bfloat16, temperature=0.7)
    loss, true, true_scores = truth(SPECS[name], batch)
    plain_loss, plain, plain_scores = truth(SPECS[name], batch, torch.bfloat16)
    rows = counted(batch)
    if form == "logits":
        out, gradients = ours(SPECS[name], batch, impl)
        lost = (plain_loss - loss).abs() + 1e-5 * loss.abs() + 1e-5  # fp32 sums of dozens
        assert (out.loss - loss).abs() <= lost
        exact = true["logits_TV"]
        error = (gradients["logits_TV"] - exact).abs()
        assert (error <= BF16_ROUNDING * exact.abs() + 1e-5).all()
        most = (plain["logits_TV"] - exact).abs().max() + BF16_ROUNDING / 2 * exact.abs().max()
        assert error.max() <= most
        return
    for fp32_logits in (False, True):
        out, gradients = ours(SPECS[name], batch, impl, fp32_logits=fp32_logits)
        share, of_scores = (0.5, 1e-4) if fp32_logits else (1.0, 1.0)
        for key in HEAD:
            error, plain_error = ((x[key] - true[key]).norm() for x in (gradients, plain))
            assert error <= share * plain_error + BF16_ROUNDING / 2 * true[key].norm(), key
        for found_T, true_T, plain_T in zip(
            (out.logprob_T, out.entropy_T), true_scores, plain_scores, strict=False
        ):
            score = torch.where(found_T[rows] != 0, found_T[rows], true_T)  # MIS drops rows
            assert (score - true_T).norm() <= of_scores * (plain_T - true_T).norm()


@of_cases(cases((*MAIN, "own"), ("logits", "inplace", "head")))
def test_fp16_gets_fp16_gradients(name: str, form: str, impl: str) -> None:
    batch = batch_of(form, dtype=torch.float16)
    options = {"fp32_logits": True} if form == "head" else FORMS[form]
    _, gradients = ours(SPECS[name], batch, impl, **options)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float16}
    rtol, atol = (2**-8, 2e-3) if form == "head" else (2**-10, 1e-5)
    close(gradients, truth(SPECS[name], batch)[1], rtol=rtol, atol=atol)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["all", "gspo-all", "cispo-all", "nll", "z-loss", "own"])
def test_fp64_stays_fp64(name: str, form: str) -> None:
    """Exact to the last digits, of which each number has more than fp32 can hold."""
    batch = batch_of(form, dtype=torch.float64, softcap=3.0, masked=True)
    for key in [key for key, x in batch.items() if key.endswith("_T") and x.is_floating_point()]:
        batch[key] = batch[key].double() * (1 + 3e-9)
    for temperature in (0.7, torch.linspace(0.5, 2.5, 20, dtype=torch.float64)):
        batch["temperature"] = temperature
        out, gradients = ours(SPECS[name], batch, "torch", scale=0.3, **FORMS[form])
        loss, true, scores = truth(SPECS[name], batch)
        assert out.loss.item() == pytest.approx(loss.item(), rel=1e-13)
        close(gradients, true, rtol=1e-12, atol=1e-13, factor=0.3)
        rows, numbers = counted(batch), (out.logprob_T, out.entropy_T, *out.stats.values())
        assert {x.dtype for x in numbers} == {torch.float64}
        for found_T, true_T in zip((out.logprob_T, out.entropy_T), scores, strict=False):
            is_read = found_T[rows] != 0  # MIS leaves some out
            assert is_read.sum() >= 6
            torch.testing.assert_close(
                found_T[rows][is_read], true_T[is_read], rtol=1e-12, atol=1e-13
            )


@pytest.mark.parametrize(("name", "size"), [("nll", 30.0), ("clip", 1e4), ("gspo", 1e30)])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_extreme_logits(name: str, size: float, impl: str) -> None:
    """One-hot distributions, hit or missed by the target: everything stays finite and right."""
    logits = torch.zeros(4, 6)
    logits[0, 2], logits[1, 2], logits[2], logits[3, :3] = size, size, -size, size
    targets = torch.tensor([2, 3, 0, 1])
    old = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0] + 0.05
    batch = {
        "logits_TV": logits,
        "target_ids_T": targets,
        "advantage_T": torch.tensor([1.0, -1.0, 2.0, 1.0]),
        "weight_T": torch.ones(4),
        "cu_seqlens_S1": torch.tensor([0, 1, 1, 2, 4]),
        **{f"{of}_logprob_T": old for of in ("old", "ref", "sampler")},
    }
    spec = SPECS[name]
    spec = replace(spec, entropy_coef=0.3)
    out, gradients = ours(spec, batch, impl)
    assert out.loss.isfinite() and gradients["logits_TV"].isfinite().all()
    if size < 1e5:  # beyond, old + 0.05 is no longer a number of its own
        loss, true, _ = truth(spec, batch)
        assert out.loss.item() == pytest.approx(loss.item(), rel=1e-3)
        close(gradients, true, rtol=2e-3, atol=1e-6)
    # The hit, the miss, the uniform row, and the row of three equal peaks.
    three, six = math.log(3), math.log(6)
    for found_T, true_T in (
        (out.logprob_T, [0, -size, -six, -three]),
        (out.entropy_T, [0, 0, six, three]),
    ):
        torch.testing.assert_close(found_T, torch.tensor(true_T).float(), rtol=1e-6, atol=1e-6)


OF_BF16 = {"fused": LossSpec("nll"), "own": partial(token_loss, LossSpec("nll"))}


@pytest.mark.parametrize("spec", OF_BF16)
@pytest.mark.parametrize("rows", [1, 60])
def test_the_gradient_of_a_bf16_weight_is_summed_in_fp32(rows: int, spec: str) -> None:
    """bf16 would round away whatever comes after the heavy first row."""
    num_tokens, vocab = 60, 5
    batch = head_batch(num_tokens, 8, vocab, dtype=torch.bfloat16)
    rng = torch.Generator().manual_seed(0)
    batch["hidden_TD"].fill_(1.0).sub_(0.1 * torch.rand(num_tokens, 8, generator=rng))
    batch |= {key: torch.ones(num_tokens) for key in ("advantage_T", "weight_T")}
    batch["target_ids_T"], batch["weight_T"][0] = batch["target_ids_T"] * 0, 700
    _, gradients = ours(OF_BF16[spec], batch, "torch", memory_budget=2 * vocab * rows)
    true = truth(SPECS["nll"], batch)[1]["weight_VD"]
    dlogits = plain_logits(batch).softmax(-1) - torch.eye(vocab, dtype=torch.float64)[0]
    dlogits *= batch["weight_T"][:, None]
    rounded = torch.zeros(vocab, 8, dtype=torch.bfloat16)
    for dlogits_V, hidden_D in zip(dlogits.bfloat16(), batch["hidden_TD"], strict=True):
        rounded += dlogits_V[:, None] * hidden_D
    error, rounded_error = ((x - true).norm() for x in (gradients["weight_VD"], rounded))
    assert error < BF16_ROUNDING * true.norm() and rounded_error > 0.05 * true.norm()


@pytest.mark.parametrize(("dtype", "lost"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_fp32_logits_are_as_exact_as_their_operands(dtype: torch.dtype, lost: float) -> None:
    """Logits of size 30, of which a 16-bit number keeps 8 or 11 bits."""
    batch = head_batch(24, 64, vocab=40, dtype=dtype)
    batch["hidden_TD"] *= 16
    logits, targets, rows = plain_logits(batch), batch["target_ids_T"], counted(batch)
    assert 25 < logits.std() < 40
    true = torch.where(targets >= 0, plain_rows(logits, targets.clamp(min=0))[0], 0.0)
    few, errors = {name: batch[name] for name in (*HEAD, "target_ids_T")}, {}
    for fp32_logits in (False, True):
        logprob_T = linear_logprobs(**few, fp32_logits=fp32_logits).logprob_T
        errors[fp32_logits] = (logprob_T - true).abs().max()
        of_loss = linear_policy_loss(**batch, spec=LossSpec(), fp32_logits=fp32_logits).logprob_T
        torch.testing.assert_close(of_loss[rows], logprob_T[rows], rtol=1e-6, atol=1e-6)
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
