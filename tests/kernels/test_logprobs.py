"""Log-probabilities, entropies and log-sum-exps against fp64; their gradients against autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from flowkernels import LossSpec, logprobs, policy_loss
from kernel_truth import IMPLS, on_device, plain_rows, random_batch
from rows import SETTINGS, batch_of, plain_scores
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ("logits_TV", "target_ids_T", "temperature", "softcap", "sampling_mask")
"""Arguments of `logprobs`."""
PARTS = [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
"""Of log-prob, entropy and log-sum-exp: which have a gradient."""
CELLS = [(setting, torch.float32) for setting in SETTINGS]
CELLS += [("mask-softcap", dtype) for dtype in DTYPES[1:]]
CASES = [
    (*cell, parts, impl)
    for cell in CELLS
    for parts in PARTS
    for impl in IMPLS
    if impl == "torch" or parts == PARTS[0] or cell[0] == "per-token"
]


def scores_of(logits: Tensor, targets: Tensor, impl: str, **options: Any) -> list[Tensor]:
    """Logp, entropy and lse, on the CPU."""
    arguments = on_device({"logits_TV": logits, "target_ids_T": targets, **options}, impl)
    out = logprobs(**arguments, impl=impl)
    return [out.logprob_T.cpu(), out.entropy_T.cpu(), out.lse_T.cpu()]


@pytest.mark.parametrize(("setting", "dtype", "parts", "impl"), CASES)
def test_scores_and_gradients_match_fp64_autograd(
    setting: str, dtype: torch.dtype, parts: tuple[int, ...], impl: str
) -> None:
    """For any gradients from above; rows with a negative target have none."""
    batch = batch_of("logits", dtype=dtype, **SETTINGS[setting])
    batch = {name: batch[name] for name in NAMES if name in batch}
    rows, logits = batch["target_ids_T"] >= 0, batch["logits_TV"].double().requires_grad_()
    assert 0 < rows.sum() < len(rows)
    true = plain_scores({**batch, "logits_TV": logits}, rows)
    rng = torch.Generator().manual_seed(5)
    upstream = torch.randn(3, 20, generator=rng) * torch.tensor(parts)[:, None]
    (upstream[:, rows] * torch.stack(true)).sum().backward()
    batch["logits_TV"][~rows] = math.nan
    moved = on_device(batch, impl)
    leaf = moved["logits_TV"].requires_grad_()
    out = logprobs(**moved, differentiable=True, impl=impl)
    found = [
        x for x, part in zip((out.logprob_T, out.entropy_T, out.lse_T), parts, strict=True) if part
    ]
    for found_T, true_T in zip(
        found, (x for x, y in zip(true, parts, strict=True) if y), strict=True
    ):
        assert found_T.dtype == torch.float32 and (found_T[~rows] == 0).all()
        torch.testing.assert_close(
            found_T.detach().cpu()[rows].double(), true_T.detach(), rtol=1e-6, atol=4e-6
        )
    both = torch.stack(found)
    both.backward(upstream[torch.tensor(parts) == 1].to(both.device))
    assert leaf.grad is not None and logits.grad is not None and leaf.grad.dtype == dtype
    rtol, atol = (1e-4, 4e-6) if dtype == torch.float32 else (2**-7, 1e-5)
    torch.testing.assert_close(leaf.grad.cpu().double(), logits.grad, rtol=rtol, atol=atol)
    assert (leaf.grad.cpu()[~rows] == 0).all() and (logits.grad[rows] != 0).any()


def test_nothing_carries_a_gradient_unless_asked(impl: str) -> None:
    batch = on_device(random_batch(4), impl)
    logits = batch["logits_TV"].requires_grad_()
    out = logprobs(logits, batch["target_ids_T"], impl=impl)
    assert not any(x.requires_grad for x in (out.logprob_T, out.entropy_T, out.lse_T))
    asked = logprobs(logits, batch["target_ids_T"], differentiable=True, impl=impl)
    assert all(x.requires_grad for x in (asked.logprob_T, asked.entropy_T, asked.lse_T))
    with torch.no_grad():
        assert not logprobs(
            logits, batch["target_ids_T"], differentiable=True, impl=impl
        ).logprob_T.requires_grad
    loss = policy_loss(**batch, spec=LossSpec(entropy_coef=0.1), impl=impl)
    assert loss.loss.requires_grad and loss.loss.shape == ()
    assert not any(x.requires_grad for x in (loss.logprob_T, loss.entropy_T, *loss.stats.values()))


def test_masked_ids_are_as_good_as_absent(impl: str) -> None:
    """-inf logits, also a whole block of them; an id that is masked has log-prob -inf."""
    rng = torch.Generator().manual_seed(2)
    logits, targets = torch.randn(4, 20_000, generator=rng), torch.tensor([19_990, 3, 19_999, 7])
    kept = torch.cat([torch.arange(0, 40), torch.arange(19_980, 20_000)])
    masked = torch.full_like(logits, -math.inf)
    masked[:, kept] = logits[:, kept]
    positions = torch.tensor([50, 3, 59, 7])
    truth = plain_rows(logits[:, kept].double(), positions)
    for ours_T, true_T in zip(scores_of(masked, targets, impl), truth, strict=True):
        torch.testing.assert_close(ours_T.double(), true_T, rtol=1e-6, atol=4e-6)
    logp, entropy, _ = scores_of(masked, torch.full((4,), 5000), impl)
    assert (logp == -math.inf).all(), "a masked target is impossible"
    torch.testing.assert_close(entropy.double(), truth[1], rtol=1e-6, atol=4e-6)


def test_far_targets_keep_their_log_probability(impl: str) -> None:
    """Targets thousands of nats below the most likely id: low temperatures, confident models."""
    logits = torch.tensor([[60.0, -60.0, 0.0], [3000.0, 0.0, 1.0], [-5.0, -105.0, -6.0]])
    logp, _, _ = scores_of(logits, torch.tensor([1, 1, 1]), impl, temperature=0.1)
    torch.testing.assert_close(logp, torch.tensor([-1200.0, -30_000.0, -1000.0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_distribution_gives_nan(value: float, impl: str) -> None:
    batch = random_batch(5)
    batch["target_ids_T"] = batch["target_ids_T"].clamp(min=0)
    clean = scores_of(batch["logits_TV"], batch["target_ids_T"], impl)
    batch["logits_TV"][2, 9] = value
    batch["logits_TV"][4] = -math.inf
    for ours_T, clean_T in zip(
        scores_of(batch["logits_TV"], batch["target_ids_T"], impl)[:2], clean[:2], strict=True
    ):
        assert ours_T[[2, 4]].isnan().all()
        assert torch.equal(ours_T[[0, 1, 3]], clean_T[[0, 1, 3]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_are_deterministic_and_rows_do_not_see_each_other(dtype: torch.dtype) -> None:
    batch = random_batch(6, vocab=9000)
    logits, targets = batch["logits_TV"].to(dtype), batch["target_ids_T"].clamp(min=0)
    first = scores_of(logits, targets, "triton")
    assert all(
        torch.equal(a, b) for a, b in zip(first, scores_of(logits, targets, "triton"), strict=True)
    )
    for i in range(6):
        alone = scores_of(logits[i : i + 1], targets[i : i + 1], "triton")
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(first, alone, strict=True))


@pytest.mark.parametrize("vocab", [257, 40_001])
def test_a_row_alone_is_summed_as_among_others(vocab: int, num_threads: int) -> None:
    """To the bit; torch would spread the sum over a long row over its threads."""
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(5)
    among_all = logprobs(logits, targets, impl="torch")
    for row in range(5):
        alone = logprobs(logits[row : row + 1], targets[row : row + 1], impl="torch")
        assert torch.equal(alone.logprob_T[0], among_all.logprob_T[row])
        assert torch.equal(alone.lse_T[0], among_all.lse_T[row])
        assert torch.equal(alone.entropy_T[0], among_all.entropy_T[row])
