"""A row's results must not depend on what else is in the batch: neither through the sums over the
vocabulary nor through the products.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flowkernels import LossSpec, linear_logprobs, linear_policy_loss, lm_head
from kernel_truth import Batch, on_device
from rows import HEAD, SPECS, head_batch
from torch import Tensor

NUM_TOKENS, DIM, VOCAB = 300, 40, 501
"""Two chunks of 256, the second of them with 44 rows that count."""
Results = tuple[Tensor, ...]


def batch_of_rows(num_tokens: int, dtype: torch.dtype = torch.float32) -> Batch:
    """Each row counts; a third of them has no gradient, so that chunks are compacted."""
    batch = head_batch(num_tokens, DIM, VOCAB, dtype=dtype)
    kind = torch.arange(num_tokens) % 3
    return {
        **{name: batch[name] for name in (*HEAD, "old_logprob_T")},
        "target_ids_T": batch["target_ids_T"] % VOCAB,
        "advantage_T": torch.where(kind == 0, 0.0, batch["advantage_T"]),
        "weight_T": torch.full((num_tokens,), 0.3),
    }


def results(batch: Batch, row: list[int], spec: Any, impl: str, **options: Any) -> Results:
    """logp, entropy and the gradient of the hidden states of these rows alone, in this order."""
    of_rows = {
        name: value[row] if name.endswith("_T") or name == "hidden_TD" else value
        for name, value in batch.items()
    }
    moved = on_device(of_rows, impl)
    few = {name: moved[name] for name in (*HEAD, "target_ids_T")}
    scores = linear_logprobs(**few, batch_invariant=True, impl=impl, **options)
    hidden = moved["hidden_TD"].requires_grad_()
    out = linear_policy_loss(
        **{**moved, "hidden_TD": hidden}, spec=spec, batch_invariant=True, impl=impl, **options
    )
    out.loss.backward()
    assert hidden.grad is not None
    return (
        out.logprob_T,
        out.entropy_T,
        scores.logprob_T,
        scores.entropy_T,
        scores.lse_T,
        hidden.grad,
    )


@pytest.mark.parametrize(
    ("name", "dtype", "fp32_logits", "num_threads"),
    [
        *(("clip", torch.float32, False, 2), ("clip", torch.float16, True, 1)),
        *(("k3-entropy", torch.float32, True, 2), ("k3-entropy", torch.float16, False, 1)),
        *(("own", torch.bfloat16, True, 2), ("own", torch.bfloat16, False, 1)),
    ],
    indirect=["num_threads"],
)
def test_results_of_a_row_are_batch_invariant(
    name: str, dtype: torch.dtype, fp32_logits: bool, num_threads: int
) -> None:
    """A row alone, among 7, among 100, and in any order."""
    spec = LossSpec(clip_high=0.3, entropy_coef=0.1) if name == "k3-entropy" else SPECS[name]
    batch = batch_of_rows(NUM_TOKENS, dtype)
    options = {"fp32_logits": fp32_logits, "impl": "torch"}
    among_all = results(batch, list(range(NUM_TOKENS)), spec, **options)
    order = torch.randperm(NUM_TOKENS, generator=torch.Generator().manual_seed(0)).tolist()
    for row in ([0], [1], [299], list(range(7)), list(range(200, 300)), order):
        for found, expected in zip(results(batch, row, spec, **options), among_all, strict=True):
            assert torch.equal(found, expected[row]) and found.isfinite().all(), len(row)
    assert (among_all[-1] != 0).any(1).sum() > 100


def test_the_same_bits_from_the_kernels(impl: str) -> None:
    batch = batch_of_rows(20)
    options = {"impl": impl, "memory_budget": 16 * VOCAB * 4}
    among_all = results(batch, list(range(20)), SPECS["clip"], **options)
    for row in ([1], [19], [5, 4, 3], list(range(19, -1, -1))):
        assert all(
            torch.equal(x, y[row])
            for x, y in zip(results(batch, row, SPECS["clip"], **options), among_all, strict=True)
        )


@pytest.mark.parametrize(
    ("budget", "size"), [(None, 256), (16 * VOCAB * 4, 16), (47 * VOCAB * 4, 32), (10**9, 256)]
)
def test_all_products_for_rows_have_one_size(
    budget: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size depends on no number of rows: all, those with a gradient, the last chunk."""
    seen, product = set(), lm_head._product

    def counted(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
        seen.add(len(a_MK))
        product(a_MK, b_KN, out_MN)

    monkeypatch.setattr(lm_head, "_product", counted)
    for num_tokens in (1, 17, NUM_TOKENS):
        results(
            batch_of_rows(num_tokens) | {"bias_V": None},
            list(range(num_tokens)),
            SPECS["clip"],
            "torch",
            memory_budget=budget,
        )
    assert seen == {size}


def test_the_results_are_those_of_the_default() -> None:
    """All gradients, those of weight and bias included."""
    batch, leaves = batch_of_rows(50), []
    for is_invariant in (False, True):
        leaf = {name: batch[name].clone().requires_grad_() for name in HEAD}
        linear_policy_loss(
            **{**batch, **leaf}, spec=SPECS["clip"], batch_invariant=is_invariant
        ).loss.backward()
        leaves.append({name: tensor.grad for name, tensor in leaf.items()})
    torch.testing.assert_close(leaves[1], leaves[0], rtol=1e-5, atol=1e-6)
