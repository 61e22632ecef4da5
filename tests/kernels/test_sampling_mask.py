"""Log-probabilities over the ids that top-k / top-p left the sampler, as CSR rows, against
softmaxes over these subsets in fp64.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from flowkernels import LossSpec, SamplingMask, logprobs, policy_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_truth import Batch, counted, mask_of, on_device, ours, plain_rows, random_batch, truth
from torch import Tensor

NUM_TOKENS, VOCAB = 16, 23
SPECS = {
    "clip": LossSpec(kl="k2", kl_coef=0.2),
    "nll-entropy": LossSpec("nll", entropy_coef=0.3),
    "gspo": LossSpec("gspo"),
    "gspo-entropy": LossSpec("gspo", entropy_coef=0.3, kl_coef=0.1),
}


def some_sets(batch: Batch, vocab: int = VOCAB, seed: int = 7) -> list[list[int]]:
    """Masks of every kind: none, the target alone, one other id, few, all; with the target and
    without. Ids come in any order.
    """
    rng = torch.Generator().manual_seed(seed)
    subsets: list[list[int]] = []
    for row, target in enumerate(batch["target_ids_T"].tolist()):
        others = [i for i in torch.randperm(vocab, generator=rng).tolist() if i != target]
        at = others[: row % 5 + 2]
        subsets.append(
            [
                [],
                [target % vocab],
                others[:1],
                [*at, target % vocab],
                at,
                [*at[:1], target % vocab, *at[1:]],
            ][row % 6]
        )
    subsets[-1] = list(range(vocab - 1, -1, -1))
    return subsets


def a_batch(subsets_seed: int = 7) -> tuple[Batch, list[list[int]]]:
    """Old log-probs near those over the mask, so that ratios lie on both sides of the clip."""
    batch = random_batch(NUM_TOKENS, VOCAB)
    subsets = some_sets(batch, seed=subsets_seed)
    logp, _, _ = plain_rows(batch["logits_TV"], batch["target_ids_T"].clamp(min=0), subsets=subsets)
    noise = 0.3 * torch.randn(NUM_TOKENS, generator=torch.Generator().manual_seed(9))
    return batch | {"old_logprob_T": logp + noise, "ref_logprob_T": logp - noise}, subsets


def is_in_mask(subsets: list[list[int]], targets: Tensor, vocab: int = VOCAB) -> Tensor:
    """bool [T, V]: the ids that a row's log-probability looks at."""
    mask = torch.zeros(len(subsets), vocab, dtype=torch.bool)
    for row, (ids, target) in enumerate(zip(subsets, targets.tolist(), strict=True)):
        mask[row, sorted({*ids, target}) if ids else slice(None)] = True
    return mask


def check_scores(
    logits: Tensor, targets: Tensor, subsets: list[list[int]], impl: str, **options: Any
) -> None:
    """Log-probs over the subset; entropy and lse over all."""
    arguments = on_device(
        {
            "logits_TV": logits,
            "target_ids_T": targets,
            "sampling_mask": mask_of(subsets),
            **options,
        },
        impl,
    )
    out = logprobs(**arguments, impl=impl)
    rows = targets >= 0
    truth_T = plain_rows(logits.double(), targets.clamp(min=0), subsets=subsets, **options)
    for ours_T, true_T in zip((out.logprob_T, out.entropy_T, out.lse_T), truth_T, strict=True):
        torch.testing.assert_close(
            ours_T.cpu().double(), torch.where(rows, true_T, 0.0), rtol=1e-6, atol=4e-6
        )


def test_a_worked_example(impl: str) -> None:
    """p = (1, 2, 3, 4) / 10: of {1, 3}, then 3 (which joins {0}), then all."""
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0]).log().expand(3, 4).contiguous()
    mask = SamplingMask(torch.tensor([3, 1, 0]), torch.tensor([0, 2, 3, 3]))
    arguments = on_device(
        {"logits_TV": logits, "target_ids_T": torch.tensor([1, 3, 2]), "sampling_mask": mask}, impl
    )
    out = logprobs(**arguments, impl=impl)
    torch.testing.assert_close(out.logprob_T.cpu().exp(), torch.tensor([2 / 6, 4 / 5, 3 / 10]))
    entropy = -sum(p * math.log(p) for p in (0.1, 0.2, 0.3, 0.4))
    torch.testing.assert_close(out.entropy_T.cpu(), torch.full((3,), entropy))


@pytest.mark.parametrize(
    ("temperature", "softcap", "dtype"),
    [
        *((1.0, None, torch.bfloat16), (0.3, None, torch.float32)),
        *((2.0, 1.5, torch.float32), (2.0, 1.5, torch.bfloat16)),
    ],
)
def test_log_probs_are_over_the_subset(
    temperature: float, softcap: float | None, dtype: torch.dtype, impl: str
) -> None:
    batch, subsets = a_batch()
    check_scores(
        batch["logits_TV"].to(dtype),
        batch["target_ids_T"],
        subsets,
        impl,
        temperature=temperature,
        softcap=softcap,
    )


@pytest.mark.parametrize("name", SPECS)
def test_losses_and_gradients_match_fp64_autograd(name: str, impl: str, inplace: bool) -> None:
    batch, subsets = a_batch()
    out, gradient = ours(SPECS[name], batch, impl, inplace=inplace, sampling_mask=mask_of(subsets))
    true_loss, true_gradient = truth(SPECS[name], batch, subsets=subsets)
    assert out.loss.item() == pytest.approx(true_loss.item(), rel=1e-5)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-4, atol=2e-6)
    assert (true_gradient - truth(SPECS[name], batch)[1]).abs().max() > 0.01, (
        "the sets are to make a difference"
    )


@pytest.mark.parametrize("name", SPECS)
def test_the_gradient_stays_on_the_set_unless_the_entropy_is_trained(
    name: str, impl: str, inplace: bool
) -> None:
    batch, subsets = a_batch()
    _, gradient = ours(SPECS[name], batch, impl, inplace=inplace, sampling_mask=mask_of(subsets))
    rows = counted(batch)
    outside = ~is_in_mask(subsets, batch["target_ids_T"])[rows]
    assert (gradient[~rows] == 0).all() and outside.sum() > 100
    if SPECS[name].entropy_coef:
        assert (gradient[rows] != 0).all()
    else:
        assert (gradient[rows][outside] == 0).all() and (gradient[rows] != 0).any()


def test_a_row_without_ids_was_not_truncated(impl: str, inplace: bool) -> None:
    batch, _ = a_batch()
    empty = mask_of([[] for _ in range(NUM_TOKENS)])
    out, gradient = ours(SPECS["clip"], batch, impl, inplace=inplace, sampling_mask=empty)
    plain, same_gradient = ours(SPECS["clip"], batch, impl, inplace=inplace)
    assert out.loss.item() == plain.loss.item() != 0
    assert torch.equal(gradient, same_gradient) and torch.equal(out.logprob_T, plain.logprob_T)


def test_rows_left_out_may_hold_nan(impl: str, inplace: bool) -> None:
    """Rows without weight give none, though the mask has ids for them."""
    batch, subsets = a_batch()
    rows = counted(batch)
    _, expected = ours(SPECS["nll-entropy"], batch, impl, sampling_mask=mask_of(subsets))
    assert any(subsets[row] for row in (~rows).nonzero()[:, 0].tolist())
    batch["logits_TV"][~rows] = math.nan
    for spec in (SPECS["nll-entropy"], SPECS["gspo-entropy"]):
        out, gradient = ours(spec, batch, impl, inplace=inplace, sampling_mask=mask_of(subsets))
        assert out.loss.isfinite() and (gradient[~rows] == 0).all() and gradient.isfinite().all()
        assert (out.logprob_T.cpu()[~rows] == 0).all()
    _, gradient = ours(
        SPECS["nll-entropy"], batch, impl, inplace=inplace, sampling_mask=mask_of(subsets)
    )
    assert torch.equal(gradient, expected)


def test_differentiable_log_probs(impl: str) -> None:
    batch, subsets = a_batch()
    upstream = torch.randn(2, NUM_TOKENS, generator=torch.Generator().manual_seed(5))
    rows = batch["target_ids_T"] >= 0
    exact = batch["logits_TV"].double().requires_grad_()
    logp, entropy, _ = plain_rows(exact, batch["target_ids_T"].clamp(min=0), 0.8, subsets=subsets)
    (upstream[0] * logp + upstream[1] * entropy)[rows].sum().backward()
    moved = on_device({**batch, "upstream": upstream, "sampling_mask": mask_of(subsets)}, impl)
    leaf = moved["logits_TV"].clone().requires_grad_()
    out = logprobs(
        leaf,
        moved["target_ids_T"],
        temperature=0.8,
        sampling_mask=moved["sampling_mask"],
        differentiable=True,
        impl=impl,
    )
    (moved["upstream"] * torch.stack([out.logprob_T, out.entropy_T])).sum().backward()
    assert leaf.grad is not None and exact.grad is not None
    torch.testing.assert_close(leaf.grad.cpu().double(), exact.grad, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("clip", torch.float32), ("nll-entropy", torch.bfloat16)),
        *(("gspo-entropy", torch.float32), ("gspo-entropy", torch.bfloat16)),
    ],
)
def test_masks_larger_than_a_block_of_a_kernel(name: str, dtype: torch.dtype, impl: str) -> None:
    """Kernels take up to 2048 ids at a time: sets of 2047, 2048, 2049 and 4500 of 5000 ids, at the
    beginning and the end of the CSR.
    """
    vocab, batch = 5000, random_batch(6, 5000)
    batch |= {
        "logits_TV": batch["logits_TV"].to(dtype),
        "weight_T": torch.tensor([1.0, -0.5, 2.0, 1.0, 0.7, 1.5]),
    }
    batch["target_ids_T"] = batch["target_ids_T"].clamp(min=0)
    rng = torch.Generator().manual_seed(3)
    sizes = [4500, 2047, 0, 2048, 3, 2049]
    subsets = [torch.randperm(vocab, generator=rng)[:size].tolist() for size in sizes]
    logp, _, _ = plain_rows(batch["logits_TV"].float(), batch["target_ids_T"], subsets=subsets)
    batch |= {"old_logprob_T": logp + 0.1, "ref_logprob_T": logp - 0.1}
    check_scores(batch["logits_TV"], batch["target_ids_T"], subsets, impl)
    _, gradient = ours(SPECS[name], batch, impl, inplace=True, sampling_mask=mask_of(subsets))
    true_gradient = truth(SPECS[name], batch, subsets=subsets)[1]
    tolerance = (
        {"rtol": 2e-4, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 1e-6}
    )
    torch.testing.assert_close(gradient.double(), true_gradient, **tolerance)


def test_results_do_not_depend_on_the_other_rows(inplace: bool) -> None:
    """Checked for the kernels. An odd vocabulary: a row alone begins elsewhere in memory, which the
    last bit may tell.
    """
    batch, subsets = a_batch()
    together, gradient = ours(
        SPECS["nll-entropy"], batch, "triton", inplace=inplace, sampling_mask=mask_of(subsets)
    )
    for row in (1, 4, 5, 9, NUM_TOKENS - 1):
        few = {name: value[row : row + 1] for name, value in batch.items()} | {
            "cu_seqlens_S1": torch.tensor([0, 1])
        }
        alone, row_gradient = ours(
            SPECS["nll-entropy"],
            few,
            "triton",
            inplace=inplace,
            sampling_mask=mask_of(subsets[row : row + 1]),
        )
        close = {"rtol": 2e-6, "atol": 2e-6}
        torch.testing.assert_close(row_gradient[0], gradient[row], **close)
        torch.testing.assert_close(alone.logprob_T[0], together.logprob_T[row], **close)


@pytest.mark.parametrize("name", SPECS)
def test_chunks_of_rows_have_their_own_masks(
    name: str, inplace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference takes a few rows at a time: three here, all 16 otherwise."""
    batch, subsets = a_batch()
    whole, gradient = ours(
        SPECS[name], batch, "torch", inplace=inplace, sampling_mask=mask_of(subsets)
    )
    module = sys.modules["flowkernels.logprobs"]  # the package has a function of this name
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 3 * VOCAB + 1)
    parts, same_gradient = ours(
        SPECS[name], batch, "torch", inplace=inplace, sampling_mask=mask_of(subsets)
    )
    assert (
        torch.equal(parts.logprob_T, whole.logprob_T)
        and torch.equal(same_gradient, gradient)
        and (gradient != 0).any()
    )


def check_any_sets(
    sets: list[tuple[int, set[int]]], entropy_coef: float, inplace: bool, impl: str
) -> None:
    vocab = 11
    targets, subsets = torch.tensor([target for target, _ in sets]), [list(ids) for _, ids in sets]
    rng = torch.Generator().manual_seed(len(sets))
    batch = random_batch(len(sets), vocab)
    batch |= {"target_ids_T": targets, "weight_T": torch.randn(len(sets), generator=rng)}
    spec = LossSpec("nll", entropy_coef=entropy_coef)
    check_scores(batch["logits_TV"], targets, subsets, impl)
    _, gradient = ours(spec, batch, impl, inplace=inplace, sampling_mask=mask_of(subsets))
    torch.testing.assert_close(
        gradient.double(), truth(spec, batch, subsets=subsets)[1], rtol=1e-4, atol=2e-6
    )


SETS = st.lists(st.tuples(st.integers(-1, 10), st.sets(st.integers(0, 10))), min_size=1, max_size=6)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(sets=SETS, entropy_coef=st.sampled_from([0.0, 0.4]), inplace=st.booleans())
def test_any_sets(sets: Any, entropy_coef: float, inplace: bool) -> None:
    check_any_sets(sets, entropy_coef, inplace, "torch")


@settings(derandomize=True, deadline=None, max_examples=8)
@given(sets=SETS, entropy_coef=st.sampled_from([0.0, 0.4]), inplace=st.booleans())
def test_any_sets_in_kernels(sets: Any, entropy_coef: float, inplace: bool) -> None:
    check_any_sets(sets, entropy_coef, inplace, "triton")


def test_the_sets_are_left_as_they_are(impl: str, inplace: bool) -> None:
    batch, subsets = a_batch()
    moved = on_device({**batch, "sampling_mask": mask_of(subsets)}, impl)
    ids, offsets = (
        moved["sampling_mask"].token_ids_K.clone(),
        moved["sampling_mask"].offsets_T1.clone(),
    )
    moved["logits_TV"] = moved["logits_TV"].clone().requires_grad_()
    policy_loss(**moved, spec=SPECS["clip"], inplace=inplace, impl=impl).loss.backward()
    assert torch.equal(moved["sampling_mask"].token_ids_K, ids) and torch.equal(
        moved["sampling_mask"].offsets_T1, offsets
    )


def test_the_mask_of_some_rows() -> None:
    """Consecutive ones keep all ids until they are trimmed; chosen ones have theirs alone."""
    subsets = [[5, 9], [], [2], [7, 1, 0], [], [3]]
    mask = mask_of(subsets)
    part = mask[2:5]
    assert torch.equal(part.token_ids_K, mask.token_ids_K)
    chosen = torch.tensor([3, 1, 0])
    for found, wanted in (
        (part.trimmed(), subsets[2:5]),
        (part[1:3].trimmed(), subsets[3:5]),
        (mask.at(chosen), [subsets[i] for i in chosen]),
        (part.at(torch.tensor([1, 0]), num_ids=4), [subsets[3], subsets[2]]),
    ):
        expected = mask_of(wanted)
        assert torch.equal(found.token_ids_K, expected.token_ids_K)
        assert torch.equal(found.offsets_T1, expected.offsets_T1)
