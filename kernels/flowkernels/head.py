"""The language model's head in chunks: logits -> loss and their gradient in place -> gradients of
hidden states and weight.

Maths: logits = X W^T + b; dX = dlogits W, dW = dlogits^T X, db = sum dlogits. FLOPs: 2 T D V for
each of the three products. Forming the gradient while a chunk's logits are at hand spares the
fourth, which others spend on computing the logits again. Memory: one chunk of logits, and dW in
fp32, whose read-modify-write (8 V D bytes per chunk) is why a chunk should not be small: 4096 rows
by default. T: target tokens, C: rows of a chunk, D: hidden size, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from flowkernels.rows import Rows, compute_scores
from flowkernels.shards import VocabParallel, merge_scores

DENSE = 0.9
"""A chunk with a larger share of active rows is not compacted: copying would cost more than it
spares."""


@dataclass(frozen=True, slots=True)
class Head:
    """What turns hidden states into logits."""

    weight_VD: Tensor
    bias_V: Tensor | None
    fp32_logits: bool
    """Keep the products of a 16-bit head in fp32 until the loss has read them."""
    chunk_rows: int
    batch_invariant: bool = False
    """All products that a row's results come from have `chunk_rows` rows, whatever the number of
    those that count."""
    shard: VocabParallel | None = None

    def chunks(self, num_rows: int) -> Iterator[slice]:
        return (
            slice(i, min(i + self.chunk_rows, num_rows))
            for i in range(0, num_rows, self.chunk_rows)
        )

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """[C, V], in fp32 if asked for, else in the dtype of the hidden states."""
        num_rows, hidden_CD = len(hidden_CD), self.padded(hidden_CD)
        dtype = accumulator_dtype(hidden_CD.dtype) if self.fp32_logits else hidden_CD.dtype
        if self.bias_V is None or dtype != hidden_CD.dtype:
            logits_CV = _product(hidden_CD, self.weight_VD.t(), dtype)[:num_rows]
            return logits_CV if self.bias_V is None else logits_CV.add_(self.bias_V)
        with torch.autocast(hidden_CD.device.type, enabled=False):
            return torch.addmm(self.bias_V, hidden_CD, self.weight_VD.t())[
                :num_rows
            ]  # one rounding of the sum

    def padded(self, rows_CX: Tensor) -> Tensor:
        """With rows of zeros up to `chunk_rows` where that is asked for: a library picks its
        kernel, and with it the order in which it sums, by the shape.
        """
        missing = self.chunk_rows - len(rows_CX)
        return (
            pad(rows_CX, (0, 0, 0, missing))
            if self.batch_invariant and (missing or not rows_CX.is_contiguous())
            else rows_CX
        )


@dataclass(slots=True)
class Gradients:
    """Sums over the chunks; None where nobody wants one."""

    hidden_TD: Tensor | None
    weight_VD: Tensor | None
    """fp32 (fp64 in fp64), whatever the head's own dtype."""
    bias_V: Tensor | None
    num_rows: int = field(default=0)
    """Rows that took part in the products."""

    @classmethod
    def empty(
        cls,
        hidden_TD: Tensor,
        head: Head,
        needs: Sequence[bool],
        weight_grad_VD: Tensor | None = None,
    ) -> Gradients:
        dtype = accumulator_dtype(hidden_TD.dtype)
        hidden_dtype = (
            hidden_TD.dtype if head.shard is None else dtype
        )  # partial sums of shards stay exact until they are added up
        hidden = (
            torch.zeros(hidden_TD.shape, dtype=hidden_dtype, device=hidden_TD.device)
            if needs[0]
            else None
        )
        weight = (
            torch.zeros(head.weight_VD.shape, dtype=dtype, device=hidden_TD.device)
            if needs[1] and weight_grad_VD is None
            else None
        )
        bias = (
            torch.zeros(len(head.weight_VD), dtype=dtype, device=hidden_TD.device)
            if needs[2]
            else None
        )
        return cls(hidden, weight if weight_grad_VD is None else weight_grad_VD, bias)

    def add(
        self,
        head: Head,
        hidden_CD: Tensor,
        dlogits_CV: Tensor,
        row_C: Tensor | slice,
        active_C: Tensor | None,
    ) -> None:
        """Take in a chunk. `row_C`: where its rows lie among all; `active_C`: bool, rows whose
        dlogits are not all zero.
        """
        if active_C is not None:
            index_A = active_C.nonzero()[:, 0]
            if len(index_A) <= DENSE * len(active_C):
                hidden_CD, dlogits_CV = hidden_CD[index_A], dlogits_CV[index_A]
                row_C = index_A + row_C.start if isinstance(row_C, slice) else row_C[index_A]
        self.num_rows += len(hidden_CD)
        if len(hidden_CD) == 0:
            return
        if self.hidden_TD is not None:
            self.hidden_TD[row_C] = _product(
                head.padded(dlogits_CV), head.weight_VD, self.hidden_TD.dtype
            )[: len(dlogits_CV)]
        if self.weight_VD is not None:
            _accumulate(self.weight_VD, dlogits_CV.t(), hidden_CD)
        if self.bias_V is not None:
            self.bias_V += dlogits_CV.sum(0, dtype=self.bias_V.dtype)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunk_scores(head: Head, rows: Rows, impl: str) -> tuple[Rows, Tensor, Tensor]:
    """(the rows as this head's part of the vocabulary sees them, score [3, C] and state [4, C] over
    the whole vocabulary).
    """
    if head.shard is None:
        return rows, *compute_scores(rows, impl)
    rows = replace(rows, target_ids_T=head.shard.local_ids(rows.target_ids_T, len(head.weight_VD)))
    return rows, *merge_scores(head.shard, rows, *compute_scores(rows, impl))


def gradient_buffer(logits_CV: Tensor, hidden_CD: Tensor) -> Tensor:
    """Where dlogits go: over the logits, or into a 16-bit buffer of their own where the logits are
    fp32 and the products are not.
    """
    return (
        logits_CV
        if logits_CV.dtype == hidden_CD.dtype
        else torch.empty(logits_CV.shape, dtype=hidden_CD.dtype, device=logits_CV.device)
    )


def _product(a_MK: Tensor, b_KN: Tensor, dtype: torch.dtype) -> Tensor:
    """a b of that dtype; 16-bit operands may give an fp32 result. Autocast has no say: the
    operands' own dtype is what was asked for.
    """
    with torch.autocast(a_MK.device.type, enabled=False):
        if a_MK.dtype == dtype:
            return a_MK @ b_KN
        return (
            torch.mm(a_MK, b_KN, out_dtype=dtype)
            if a_MK.is_cuda
            else a_MK.to(dtype) @ b_KN.to(dtype)
        )


def _accumulate(total_VD: Tensor, dlogits_VC: Tensor, hidden_CD: Tensor) -> None:
    """total += dlogits^T X without rounding the sum to 16 bits."""
    with torch.autocast(total_VD.device.type, enabled=False):
        if total_VD.dtype == hidden_CD.dtype:
            total_VD.addmm_(dlogits_VC, hidden_CD)
        elif hidden_CD.is_cuda:
            torch.addmm(total_VD, dlogits_VC, hidden_CD, out_dtype=total_VD.dtype, out=total_VD)
        else:
            total_VD.addmm_(dlogits_VC.to(total_VD.dtype), hidden_CD.to(total_VD.dtype))
