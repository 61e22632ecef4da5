"""Log-probabilities over the ids that top-k / top-p left the sampler, as CSR rows, against
softmaxes over these subsets in fp64. (`test_logprobs.py` and `test_row_losses.py` have masks among
their settings.)
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from flowkernels import LossSpec, SamplingMask, logprobs
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_truth import IMPLS, Batch, mask_of, on_device, plain_rows, random_batch, subsets_of
from rows import FORMS, SPECS, batch_of, ours, truth

LOGITS = ("logits", "inplace")


def check_scores(batch: Batch, impl: str) -> None:
    """Log-probs over the subset; entropy and lse over all."""
    names = ("logits_TV", "target_ids_T", "sampling_mask")
    out = logprobs(**on_device({name: batch[name] for name in names}, impl), impl=impl)
    rows, ids = batch["target_ids_T"] >= 0, batch["target_ids_T"].clamp(min=0)
    subsets = subsets_of(batch["sampling_mask"])
    true = plain_rows(batch["logits_TV"].double(), ids, subsets=subsets)
    for found_T, true_T in zip((out.logprob_T, out.entropy_T, out.lse_T), true, strict=True):
        expected = torch.where(rows, true_T, 0.0)
        torch.testing.assert_close(found_T.cpu().double(), expected, rtol=1e-6, atol=4e-6)


def test_a_worked_example(impl: str) -> None:
    """p = (1, 2, 3, 4) / 10: of {1, 3}, then 3 (which joins {0}), then all."""
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0]).log().expand(3, 4).contiguous()
    mask = SamplingMask(torch.tensor([3, 1, 0]), torch.tensor([0, 2, 3, 3]))
    batch = {"logits_TV": logits, "target_ids_T": torch.tensor([1, 3, 2]), "sampling_mask": mask}
    out = logprobs(**on_device(batch, impl), impl=impl)
    torch.testing.assert_close(out.logprob_T.cpu().exp(), torch.tensor([2 / 6, 4 / 5, 3 / 10]))
    entropy = -sum(p * math.log(p) for p in (0.1, 0.2, 0.3, 0.4))
    torch.testing.assert_close(out.entropy_T.cpu(), torch.full((3,), entropy))


@pytest.mark.parametrize("form", LOGITS)
def test_a_row_without_ids_was_not_truncated(impl: str, form: str) -> None:
    batch = batch_of(form)
    empty = {**batch, "sampling_mask": mask_of([[] for _ in range(20)])}
    (out, gradient), (plain, same) = (
        ours(SPECS["clip"], x, impl, **FORMS[form]) for x in (empty, batch)
    )
    assert out.loss.item() == plain.loss.item() != 0
    assert torch.equal(gradient["logits_TV"], same["logits_TV"])
    assert torch.equal(out.logprob_T, plain.logprob_T)


@pytest.mark.parametrize(("name", "dtype"), [("clip", torch.float32), ("gspo-all", torch.bfloat16)])
def test_masks_larger_than_a_block_of_a_kernel(name: str, dtype: torch.dtype, impl: str) -> None:
    """Kernels take 2048 ids at a time; sets are at both ends of the CSR."""
    vocab, batch = 5000, random_batch(6, 5000)
    batch["weight_T"] = torch.tensor([1.0, -0.5, 2.0, 1.0, 0.7, 1.5])
    batch |= {"logits_TV": batch["logits_TV"].to(dtype), "cu_seqlens_S1": torch.tensor([0, 6])}
    batch["target_ids_T"] = batch["target_ids_T"].clamp(min=0)
    rng = torch.Generator().manual_seed(3)
    sizes = [4500, 2047, 0, 2048, 3, 2049]
    subsets = [torch.randperm(vocab, generator=rng)[:size].tolist() for size in sizes]
    logp, _, _ = plain_rows(batch["logits_TV"].float(), batch["target_ids_T"], subsets=subsets)
    old = {f"{x}_logprob_T": logp + y for x, y in (("old", 0.1), ("ref", -0.1), ("sampler", 0))}
    batch |= {**old, "sampling_mask": mask_of(subsets)}
    check_scores(batch, impl)
    _, gradients = ours(SPECS[name], batch, impl, inplace=True)
    rtol, atol = (2e-4, 1e-7) if dtype == torch.float32 else (2**-6, 1e-6)
    true = truth(SPECS[name], batch)[1]["logits_TV"]
    torch.testing.assert_close(gradients["logits_TV"].double(), true, rtol=rtol, atol=atol)


@pytest.mark.parametrize("form", LOGITS)
@pytest.mark.parametrize("name", ["all", "gspo-all", "nll"])
def test_chunks_of_rows_have_their_own_masks(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference takes a few rows at a time: three here, all 20 otherwise."""
    batch = batch_of(form, masked=True)
    whole, gradient = ours(SPECS[name], batch, "torch", **FORMS[form])
    module = sys.modules["flowkernels.logprobs"]  # the package has a function of this name
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 3 * 17 + 1)
    parts, same = ours(SPECS[name], batch, "torch", **FORMS[form])
    assert torch.equal(parts.logprob_T, whole.logprob_T)
    assert torch.equal(same["logits_TV"], gradient["logits_TV"]) and gradient["logits_TV"].any()


def check_any_sets(sets: Any, entropy_coef: float, inplace: bool, impl: str) -> None:
    batch = random_batch(len(sets), 11)
    batch["target_ids_T"] = torch.tensor([target for target, _ in sets])
    batch["sampling_mask"] = mask_of([list(ids) for _, ids in sets])
    rng = torch.Generator().manual_seed(len(sets))
    batch["weight_T"] = torch.randn(len(sets), generator=rng)
    spec = LossSpec("nll", entropy_coef=entropy_coef)
    check_scores(batch, impl)
    found, true = ours(spec, batch, impl, inplace=inplace)[1], truth(spec, batch)[1]
    torch.testing.assert_close(found["logits_TV"].double(), true["logits_TV"], rtol=1e-4, atol=2e-6)


SETS = st.lists(st.tuples(st.integers(-1, 10), st.sets(st.integers(0, 10))), min_size=1, max_size=6)


@settings(max_examples=60)
@given(sets=SETS, entropy_coef=st.sampled_from([0.0, 0.4]), inplace=st.booleans())
def test_any_sets(sets: Any, entropy_coef: float, inplace: bool) -> None:
    check_any_sets(sets, entropy_coef, inplace, "torch")


@pytest.mark.skipif("triton" not in IMPLS, reason="needs numpy")
@settings(max_examples=8)
@given(sets=SETS, entropy_coef=st.sampled_from([0.0, 0.4]), inplace=st.booleans())
def test_any_sets_in_kernels(sets: Any, entropy_coef: float, inplace: bool) -> None:
    check_any_sets(sets, entropy_coef, inplace, "triton")


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
        assert subsets_of(found) == wanted
        assert torch.equal(found.token_ids_K, mask_of(wanted).token_ids_K)
