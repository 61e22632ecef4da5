"""Rows that begin anywhere in memory: kernels read and write 16 bytes at a time in their middle."""

from __future__ import annotations

import pytest
import torch
from flowkernels import LossSpec, logprobs, policy_loss
from flowkernels.logprobs import empty_rows
from kernel_truth import device_of, on_device, random_batch
from torch import Tensor

BLOCK = 4 * 256 * 8
"""Elements of a block of 16-bit logits."""
VOCABS = (1, 7, 64, BLOCK + 3)
PLACES = [(0, 0), (1, 0), (0, 5), (3, 2)]
"""(elements before the first row, elements between rows)"""


def rows_at(values: Tensor, begin: int, gap: int) -> tuple[Tensor, Tensor]:
    """(the values in a larger buffer, the buffer), which holds 99 elsewhere."""
    num_rows, vocab = values.shape
    buffer = torch.full((begin + num_rows * (vocab + gap) + 16,), 99.0, dtype=values.dtype)
    buffer = buffer.to(device_of("triton"))
    rows = buffer.as_strided((num_rows, vocab), (vocab + gap, 1), begin)
    rows.copy_(values)
    return rows, buffer


CELLS = [
    (vocab, *place, (torch.bfloat16, torch.float32)[(i + j) % 2], (None, 6.0)[(i + j // 2) % 2])
    for i, vocab in enumerate(VOCABS)
    for j, place in enumerate(PLACES)
]
"""Each vocabulary at each place, in dtypes and softcaps by turns."""


@pytest.mark.parametrize(("vocab", "begin", "gap", "dtype", "softcap"), CELLS)
def test_rows_anywhere_have_the_scores_and_gradients_of_the_reference(
    vocab: int, begin: int, gap: int, dtype: torch.dtype, softcap: float | None
) -> None:
    rng = torch.Generator().manual_seed(vocab)
    values = (3 * torch.randn(3, vocab, generator=rng)).to(dtype)
    targets = torch.randint(vocab, (3,), generator=rng)
    found = []
    for impl in ("torch", "triton"):
        rows, _ = rows_at(values, begin, gap)
        rows = (rows if impl == "triton" else rows.cpu()).detach().requires_grad_()
        out = logprobs(
            rows, targets.to(rows.device), softcap=softcap, differentiable=True, impl=impl
        )
        slopes = torch.tensor([1.0, -2.0, 0.5], device=rows.device)
        (slopes * (out.logprob_T + 0.1 * out.entropy_T)).sum().backward()
        found.append([x.detach().cpu() for x in (out.logprob_T, out.entropy_T, rows.grad)])
    for ours, theirs in zip(*found, strict=True):
        rounding = 2**-7 if ours.dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(theirs, ours, rtol=rounding, atol=rounding / 4)


@pytest.mark.parametrize(("begin", "gap"), PLACES)
def test_a_gradient_in_place_leaves_what_lies_between_rows(begin: int, gap: int) -> None:
    """Rows of weight 0 too, which are filled with zeros."""
    batch = random_batch(num_tokens=6, vocab=BLOCK + 3)
    true = batch["logits_TV"].clone().requires_grad_()
    (3 * policy_loss(**batch | {"logits_TV": true}, spec=LossSpec(), impl="torch").loss).backward()
    rows, buffer = rows_at(batch["logits_TV"], begin, gap)
    leaf = rows.detach().requires_grad_()
    moved = on_device(batch, "triton") | {"logits_TV": leaf}
    (3 * policy_loss(**moved, spec=LossSpec(), inplace=True, impl="triton").loss).backward()
    torch.testing.assert_close(leaf.grad.cpu(), true.grad, rtol=1e-5, atol=1e-6)
    is_row = torch.zeros_like(buffer, dtype=torch.bool)
    is_row.as_strided(rows.shape, rows.stride(), begin).fill_(True)
    assert (buffer[~is_row] == 99).all()


@pytest.mark.parametrize(
    ("dtype", "gap", "stride"),
    [
        (torch.bfloat16, 0, 9),
        (torch.bfloat16, 8, 9),
        (torch.bfloat16, 3, 12),
        (torch.float32, 6, 11),
    ],
)
def test_rows_of_a_result_begin_where_those_of_the_logits_do(
    dtype: torch.dtype, gap: int, stride: int
) -> None:
    rows, _ = rows_at(torch.zeros(3, 9, dtype=dtype), 0, gap)
    out = empty_rows(rows)
    assert out.stride() == (stride, 1)
    width = 16 // dtype.itemsize
    assert (out.stride(0) - rows.stride(0)) % width == 0


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_gradient_of_odd_rows_is_scaled_by_what_follows_the_loss(factor: float) -> None:
    batch = random_batch(num_tokens=6, vocab=19)
    gradients = []
    for impl in ("torch", "triton"):
        rows, _ = rows_at(batch["logits_TV"], 0, 5)
        leaf = (rows if impl == "triton" else rows.cpu()).detach().requires_grad_()
        moved = on_device(batch, impl) | {"logits_TV": leaf}
        (factor * policy_loss(**moved, spec=LossSpec(), impl=impl).loss).backward()
        gradients.append(leaf.grad.cpu())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)
