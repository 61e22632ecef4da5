"""The policy loss and its gradient by the logits against autograd of plain formulas in fp64
(`kernel_truth`), in both implementations.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from flowkernels import LossSpec, TokenLoss, Tokens, policy_loss, token_loss
from kernel_truth import (
    BF16_ROUNDING,
    counted,
    device_of,
    on_device,
    ours,
    plain_rows,
    random_batch,
    truth,
)
from torch import Tensor

SPECS = {
    "clip": LossSpec(),
    "clip-higher": LossSpec(clip_low=0.2, clip_high=0.3),
    "dual": LossSpec(clip_low=0.2, clip_high=0.3, dual_clip=1.5),
    "gspo": LossSpec("gspo", clip_low=0.1, clip_high=0.05),
    "gspo-dual": LossSpec("gspo", clip_high=0.3, dual_clip=1.2),
    "cispo": LossSpec("cispo", clip_high=0.1),
    "nll": LossSpec("nll"),
    "k1": LossSpec(kl="k1", kl_coef=0.4),
    "k2": LossSpec(kl="k2", kl_coef=0.4),
    "k3": LossSpec(kl="k3", kl_coef=0.4),
    "entropy": LossSpec(entropy_coef=0.3),
    "tis": LossSpec(tis=1.2),
    "mis": LossSpec(mis=(0.6, 1.5)),
    "mis-open": LossSpec(mis=(0.6, math.inf)),
    "released": LossSpec(
        clip_low=0.2, clip_high=0.3, dual_clip=3.0, kl="low_var_kl", kl_coef=0.001
    ),
    "all": LossSpec(
        clip_low=0.1,
        clip_high=0.4,
        dual_clip=1.5,
        kl="k2",
        kl_coef=0.2,
        entropy_coef=0.1,
        tis=2.0,
        mis=(0.5, 2.5),
    ),
    "gspo-all": LossSpec("gspo", kl="k3", kl_coef=0.2, entropy_coef=0.1, tis=2.0, mis=(0.5, 2.5)),
    "cispo-all": LossSpec("cispo", kl="k1", kl_coef=0.2, entropy_coef=0.1, tis=0.8, mis=(0.5, 2.5)),
    "nll-all": LossSpec("nll", kl="k1", kl_coef=0.2, entropy_coef=-0.1),
}
MAIN = ("gspo-all", "all", "nll")
"""The two-pass way, the fused one with every term, and the fused one with the fewest."""


def temperatures(num_tokens: int = 20) -> Tensor:
    return torch.linspace(0.5, 2.5, num_tokens)


@pytest.mark.parametrize(
    ("name", "inplace"),
    [*((name, False) for name in SPECS), *((name, True) for name in ("clip", *MAIN))],
)
def test_loss_and_gradient_match_fp64_autograd(name: str, impl: str, inplace: bool) -> None:
    """Every token at a temperature of its own; some rows do not count."""
    batch = random_batch(temperature=temperatures())
    out, gradient = ours(SPECS[name], batch, impl, inplace=inplace, temperature=temperatures())
    true_loss, true_gradient = truth(SPECS[name], batch, temperatures())
    assert out.loss.item() == pytest.approx(true_loss.item(), rel=1e-5, abs=1e-5)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-4, atol=2e-6)
    rows = counted(batch)
    logp, entropy, _ = plain_rows(
        batch["logits_TV"].double(), batch["target_ids_T"].clamp(min=0), temperatures()
    )
    if "mis" not in name and "all" not in name:  # rows that MIS drops are not read
        torch.testing.assert_close(
            out.logprob_T.cpu().double(), torch.where(rows, logp, 0.0), rtol=1e-6, atol=4e-6
        )
        torch.testing.assert_close(
            out.entropy_T.cpu().double(), torch.where(rows, entropy, 0.0), rtol=1e-6, atol=4e-6
        )


@pytest.mark.parametrize("loss_type", ["clip", "gspo"])
def test_a_bounded_kl_has_a_gradient_within_its_bound_alone(
    loss_type: Any, impl: str, inplace: bool
) -> None:
    """Log-probs of a reference on both sides of where k3 is 10; one kernel, and two passes."""
    spec = LossSpec(loss_type, kl="low_var_kl", kl_coef=0.4)
    batch = random_batch()
    batch["ref_logprob_T"] = batch["old_logprob_T"] + torch.linspace(-12.5, 4.5, 20)
    out, gradient = ours(spec, batch, impl, inplace=inplace)
    true_loss, true_gradient = truth(spec, batch)
    assert out.loss.item() == pytest.approx(true_loss.item(), rel=1e-5, abs=1e-5)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-4, atol=2e-6)
    wide, _ = ours(replace(spec, kl="k3"), batch, impl)
    assert wide.stats["kl_sum"] > out.stats["kl_sum"] + 10


@pytest.mark.parametrize(
    ("name", "temperature", "softcap"),
    [*((name, 0.6, 4.0) for name in MAIN), ("all", 2.5, None), ("nll", 1.0, 1.5)],
)
def test_temperature_and_softcap(
    name: str, temperature: float, softcap: float | None, impl: str, inplace: bool
) -> None:
    batch = random_batch(12, temperature=temperature)
    out, gradient = ours(
        SPECS[name], batch, impl, inplace=inplace, temperature=temperature, softcap=softcap
    )
    true_loss, true_gradient = truth(SPECS[name], batch, temperature, softcap=softcap)
    assert out.loss.item() == pytest.approx(true_loss.item(), rel=1e-5, abs=1e-5)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", MAIN)
def test_the_gradient_is_scaled_by_what_follows_the_loss(
    name: str, impl: str, inplace: bool
) -> None:
    batch = random_batch()
    out, gradient = ours(SPECS[name], batch, impl, inplace=inplace, scale=-0.37)
    true_loss, true_gradient = truth(SPECS[name], batch)
    assert out.loss.item() == pytest.approx(true_loss.item(), rel=1e-5, abs=1e-5)
    torch.testing.assert_close(gradient.double(), -0.37 * true_gradient, rtol=1e-4, atol=2e-6)


def test_the_factor_of_a_bf16_gradient_is_not_rounded(impl: str, inplace: bool) -> None:
    batch = random_batch()
    batch["logits_TV"] = batch["logits_TV"].bfloat16()
    _, gradient = ours(SPECS["all"], batch, impl, inplace=inplace)
    _, scaled = ours(SPECS["all"], batch, impl, inplace=inplace, scale=-0.37)
    assert torch.equal(scaled, (gradient.float() * -0.37).bfloat16()) and (scaled != 0).any()


@pytest.mark.parametrize("name", [*MAIN, "cispo", "tis"])
def test_rows_left_out_are_not_read(name: str, impl: str, inplace: bool) -> None:
    """Their gradient, logp and entropy are 0, whatever they hold; loss and statistics are those of
    the other rows alone.
    """
    batch = random_batch()
    rows = counted(batch)
    assert (~rows & (batch["weight_T"] == 0)).sum() >= 3 and (
        ~rows & (batch["target_ids_T"] < 0)
    ).sum() >= 2
    bounds = batch["cu_seqlens_S1"]
    few = {key: value[rows] for key, value in batch.items() if key != "cu_seqlens_S1"}
    few["cu_seqlens_S1"] = torch.tensor([int(rows[:bound].sum()) for bound in bounds])
    alone, alone_gradient = ours(SPECS[name], few, impl)
    for i, index in enumerate((~rows).nonzero()[:, 0].tolist()):
        for key in (
            "logits_TV",
            "old_logprob_T",
            "ref_logprob_T",
            "sampler_logprob_T",
            "advantage_T",
        ):
            batch[key][index] = (math.nan, math.inf, -math.inf, 1e30)[i % 4]
    out, gradient = ours(SPECS[name], batch, impl, inplace=inplace)
    assert out.loss.item() == pytest.approx(alone.loss.item(), rel=1e-6)
    assert (gradient[~rows] == 0).all()
    torch.testing.assert_close(gradient[rows], alone_gradient)
    for scores_T, alone_T in ((out.logprob_T, alone.logprob_T), (out.entropy_T, alone.entropy_T)):
        assert (scores_T.cpu()[~rows] == 0).all()
        torch.testing.assert_close(scores_T.cpu()[rows], alone_T.cpu())
    for stat, value in out.stats.items():
        torch.testing.assert_close(value, alone.stats[stat], rtol=1e-5, atol=1e-6)


def test_a_reference_that_is_not_trained_on_may_be_nan(impl: str) -> None:
    batch = random_batch()
    expected, true_gradient = truth(LossSpec(), batch)
    batch["ref_logprob_T"] = torch.full((20,), math.nan)
    out, gradient = ours(LossSpec(), batch, impl)
    assert (
        out.loss.item() == pytest.approx(expected.item(), rel=1e-5) and out.stats["kl_sum"].isnan()
    )
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-4, atol=2e-6)


def test_a_nan_logit_of_a_counted_row_gives_nan(impl: str, inplace: bool) -> None:
    batch = random_batch(6)
    batch["target_ids_T"][3], batch["weight_T"][:] = 0, 1.0
    for name in MAIN:
        nan_batch = {**batch, "logits_TV": batch["logits_TV"].clone()}
        nan_batch["logits_TV"][3, 12] = math.nan
        out, gradient = ours(
            replace(SPECS[name], tis=None, mis=None), nan_batch, impl, inplace=inplace
        )
        assert out.loss.isnan() and gradient[3].isnan().all(), name
        if name != "gspo-all":  # a sequence shares its ratio
            assert gradient[[0, 1, 2, 4, 5]].isfinite().all(), name


@pytest.mark.parametrize("name", MAIN)
def test_a_masked_vocabulary_is_as_good_as_absent(name: str, impl: str, inplace: bool) -> None:
    """-inf logits: loss, entropy and gradient are those over the other ids."""
    batch = random_batch(12, vocab=40)
    batch["target_ids_T"] = torch.where(batch["target_ids_T"] < 0, -1, batch["target_ids_T"] % 9)
    logits = batch["logits_TV"]
    fewer, fewer_gradient = ours(SPECS[name], {**batch, "logits_TV": logits[:, :9]}, impl)
    logits[:, 9:] = -math.inf
    out, gradient = ours(SPECS[name], batch, impl, inplace=inplace)
    assert out.loss.item() == pytest.approx(fewer.loss.item(), rel=1e-6) and out.loss.isfinite()
    torch.testing.assert_close(out.entropy_T, fewer.entropy_T, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient[:, :9], fewer_gradient, rtol=1e-5, atol=1e-6)
    assert (gradient[:, 9:] == 0).all() and (fewer_gradient != 0).any()


@pytest.mark.parametrize("name", ["clip", "gspo", "cispo", "nll", "all"])
def test_no_tokens_give_a_zero_loss(name: str, impl: str, inplace: bool) -> None:
    batch = {key: value[:0] for key, value in random_batch().items()}
    batch["cu_seqlens_S1"] = torch.tensor([0, 0])
    out, gradient = ours(SPECS[name], batch, impl, inplace=inplace)
    assert out.loss.item() == 0 and gradient.shape == (0, 17)
    assert all((value == 0).all() for key, value in out.stats.items() if key.endswith("_sum"))
    assert (out.stats["ratio_max"].item(), out.stats["ratio_min"].item()) == (-math.inf, math.inf)


@pytest.mark.parametrize("name", ["clip", "all", "gspo-all", "cispo-all"])
def test_bf16_logits_lose_less_than_plain_torch_does(name: str, impl: str) -> None:
    num_tokens = 100 if impl == "torch" else 40
    batch = random_batch(num_tokens, temperature=0.7)
    batch["logits_TV"] = batch["logits_TV"].bfloat16()
    true_loss, true_gradient = truth(SPECS[name], batch, 0.7)
    plain_loss, plain_gradient = truth(SPECS[name], batch, 0.7, torch.bfloat16)
    out, gradient = ours(SPECS[name], batch, impl, temperature=0.7)
    # fp32 sums and ratios of a few dozen numbers.
    assert (out.loss.cpu() - true_loss).abs() <= (
        plain_loss - true_loss
    ).abs() + 1e-5 * true_loss.abs() + 1e-5
    # All arithmetic is fp32: what is lost is the rounding of the result to bf16 and nothing else.
    error, rounding = (gradient - true_gradient).abs(), BF16_ROUNDING
    assert (error <= rounding * true_gradient.abs() + 1e-5).all()
    assert (
        error.max()
        <= (plain_gradient - true_gradient).abs().max() + rounding / 2 * true_gradient.abs().max()
    )


@pytest.mark.parametrize("name", MAIN)
def test_fp16_logits_get_an_fp16_gradient(name: str, impl: str, inplace: bool) -> None:
    batch = random_batch()
    batch["logits_TV"] = batch["logits_TV"].half()
    _, gradient = ours(SPECS[name], batch, impl, inplace=inplace)
    assert gradient.dtype == torch.float16
    torch.testing.assert_close(
        gradient.double(), truth(SPECS[name], batch)[1], rtol=2**-10, atol=1e-5
    )


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_fp64_logits_get_an_fp64_gradient(softcap: float | None, inplace: bool) -> None:
    """Exact to the last digits, which a softmax in fp32 would lose. (Tensors [T] are fp32, hence
    numbers of few digits.)
    """
    batch = random_batch()
    batch["logits_TV"] = batch["logits_TV"].double()
    batch["advantage_T"], batch["weight_T"] = (
        batch["advantage_T"].sign(),
        2 * batch["weight_T"].sign(),
    )
    out, gradient = ours(SPECS["nll"], batch, "torch", inplace=inplace, softcap=softcap)
    true_loss, true_gradient = truth(SPECS["nll"], batch, softcap=softcap)
    assert out.loss.item() == pytest.approx(true_loss.item(), rel=1e-6)
    torch.testing.assert_close(gradient, true_gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 30.0) for name in ("clip", "nll", "entropy", "gspo")),
        *(("clip", 1e4), ("entropy", 1e30), ("gspo", 1e30)),
    ],
)
def test_extreme_logits(name: str, size: float, impl: str, inplace: bool) -> None:
    """One-hot distributions, hit or missed by the target: everything stays finite and right."""
    logits = torch.zeros(4, 6)
    logits[0, 2], logits[1, 2], logits[2], logits[3, :3] = size, size, -size, size
    targets = torch.tensor([2, 3, 0, 1])
    logp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    batch = random_batch(4, 6)
    batch |= {
        "logits_TV": logits,
        "target_ids_T": targets,
        "advantage_T": torch.tensor([1.0, -1.0, 2.0, 1.0]),
        "weight_T": torch.ones(4),
    }
    batch |= {"old_logprob_T": logp + 0.05, "ref_logprob_T": logp + 0.05}
    out, gradient = ours(SPECS[name], batch, impl, inplace=inplace)
    assert out.loss.isfinite() and gradient.isfinite().all()
    if size < 1e5:  # beyond, old + 0.05 is no longer a number of its own
        true_loss, true_gradient = truth(SPECS[name], batch)
        assert out.loss.item() == pytest.approx(true_loss.item(), rel=1e-3)
        torch.testing.assert_close(gradient.double(), true_gradient, rtol=2e-3, atol=1e-6)
    # The hit, the miss, the uniform row, and the row of three equal peaks.
    true_logp, true_entropy = (
        [0.0, -size, -math.log(6), -math.log(3)],
        [0.0, 0.0, math.log(6), math.log(3)],
    )
    torch.testing.assert_close(out.logprob_T.cpu(), torch.tensor(true_logp), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        out.entropy_T.cpu(), torch.tensor(true_entropy), rtol=1e-6, atol=1e-6
    )


def asymmetric(tokens: Tokens) -> TokenLoss:
    """A loss of one's own, of a kind no spec has: (logp - old)^2, three times that where it is
    negative, A and 0.1 H^2 beside it.
    """
    assert tokens.old_logprob_T is not None
    difference_T = tokens.logprob_T - tokens.old_logprob_T
    factor_T = torch.where(difference_T < 0, 3.0, 1.0)
    return TokenLoss(
        loss_T=factor_T * difference_T**2
        - tokens.advantage_T * tokens.logprob_T
        + 0.1 * tokens.entropy_T**2,
        dlogprob_T=2 * factor_T * difference_T - tokens.advantage_T,
        dentropy_T=0.2 * tokens.entropy_T,
        log_ratio_T=difference_T,
        is_clipped_T=difference_T > 0.5,
        kl_T=difference_T**2 / 2,
    )


def test_a_loss_of_ones_own_matches_fp64_autograd(impl: str, inplace: bool) -> None:
    batch = random_batch(temperature=0.8)
    rows = counted(batch)
    logits = batch["logits_TV"].double().requires_grad_()
    old, advantage, weight = (
        batch[name][rows].double() for name in ("old_logprob_T", "advantage_T", "weight_T")
    )
    logp, entropy, _ = plain_rows(logits[rows], batch["target_ids_T"][rows], 0.8)
    difference = logp - old
    square = torch.maximum(
        3 * difference * (-difference).clamp(min=0) * -1, difference * difference.clamp(min=0)
    )
    loss = (weight * (square - advantage * logp + 0.1 * entropy * entropy)).sum()
    loss.backward()
    out, gradient = ours(asymmetric, batch, impl, inplace=inplace, temperature=0.8)
    assert logits.grad is not None and out.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(gradient.double(), logits.grad, rtol=1e-4, atol=2e-6)
    assert out.stats["clipped_high_sum"].item() == (difference > 0.5).sum() > 0
    assert out.stats["kl_sum"].item() == pytest.approx((difference**2).sum().item() / 2, rel=1e-4)


def test_a_loss_of_ones_own_without_an_entropy_term(impl: str, inplace: bool) -> None:
    batch = random_batch()
    spec = LossSpec(kl_coef=0.3)
    out, gradient = ours(lambda tokens: token_loss(spec, tokens), batch, impl, inplace=inplace)
    true_loss, true_gradient = truth(spec, batch)
    assert out.loss.item() == pytest.approx(true_loss.item(), rel=1e-5)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("name", MAIN)
def test_a_second_backward_pass_is_refused(
    name: str, retain_graph: bool, impl: str, inplace: bool
) -> None:
    batch = on_device(random_batch(6), impl)
    logits = batch["logits_TV"].clone().requires_grad_()
    out = policy_loss(
        **{**batch, "logits_TV": logits}, spec=SPECS[name], inplace=inplace, impl=impl
    )
    out.loss.backward(retain_graph=retain_graph)
    assert logits.grad is not None
    first = logits.grad.clone()
    if retain_graph and name == "gspo-all" and not inplace:
        # Two passes over kept logits: a graph that the caller retained gives the same gradient
        # again.
        out.loss.backward()
        assert torch.equal(logits.grad, 2 * first) and (first != 0).any()
        return
    with pytest.raises(RuntimeError, match=r"twice|second time|modified by an inplace operation"):
        out.loss.backward()


@pytest.mark.parametrize("name", MAIN)
def test_two_runs_agree_to_the_bit_and_rows_do_not_see_each_other(name: str, inplace: bool) -> None:
    """Kernels alone; each row of these batches is a sequence of its own."""
    batch = random_batch(6, vocab=300)
    batch |= {
        "target_ids_T": batch["target_ids_T"].clamp(min=0),
        "weight_T": torch.ones(6),
        "cu_seqlens_S1": torch.arange(7),
    }
    first, gradient = ours(SPECS[name], batch, "triton", inplace=inplace)
    second, same_gradient = ours(SPECS[name], batch, "triton", inplace=inplace)
    assert (
        torch.equal(first.loss, second.loss)
        and torch.equal(gradient, same_gradient)
        and (gradient != 0).any()
    )
    assert all(torch.equal(value, second.stats[stat]) for stat, value in first.stats.items())
    for i in range(6):
        row = {key: value[i : i + 1] for key, value in batch.items()} | {
            "cu_seqlens_S1": torch.arange(2)
        }
        alone, row_gradient = ours(SPECS[name], row, "triton", inplace=inplace)
        assert torch.equal(alone.logprob_T[0], first.logprob_T[i]) and torch.equal(
            alone.entropy_T[0], first.entropy_T[i]
        )
        assert torch.equal(row_gradient[0], gradient[i])


@pytest.mark.parametrize("name", MAIN)
def test_rows_of_a_larger_buffer(name: str, impl: str, inplace: bool) -> None:
    """Every other row and a part of the columns; in place, nothing around them is touched."""
    batch = on_device(random_batch(10), impl)
    temperature = torch.stack([temperatures(10), -temperatures(10)], dim=1).to(device_of(impl))[
        :, 0
    ]
    _, expected = ours(SPECS[name], batch, impl, temperature=temperature)
    buffer = torch.full((20, 40), 7.0, device=device_of(impl))
    view = buffer[::2, 3:20]
    view.copy_(batch["logits_TV"])
    before = buffer.clone()
    view.requires_grad_()
    out = policy_loss(
        **{**batch, "logits_TV": view},
        spec=SPECS[name],
        temperature=temperature,
        inplace=inplace,
        impl=impl,
    )
    out.loss.backward()
    assert view.grad is not None and (expected != 0).any()
    # Kernels sum a row from the first multiple of 16 bytes on.
    same = {"rtol": 0, "atol": 0} if impl == "torch" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(view.grad.cpu(), expected, **same)
    before[::2, 3:20] = buffer[::2, 3:20]
    assert torch.equal(buffer, before)
    if not inplace:
        assert torch.equal(view.detach(), batch["logits_TV"])
