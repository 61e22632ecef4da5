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
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from flowkernels.arguments import check_head
from flowkernels.logprobs import Score, compute_scores, write_gradient
from flowkernels.targets import Slopes, Targets

HEAD = "Tensor hidden, Tensor weight, Tensor? bias"
OPTIONS = "bool fp32_logits, SymInt chunk_rows, bool batch_invariant, str impl"
"""Hidden states and their head, and how to walk over it, in the schema of an operator."""
DENSE = 0.9
"""A chunk with a larger share of active rows is not compacted: copying would cost more than it
spares."""
INVARIANT_STEP = 16
"""Products of fewer rows sum in an order that depends on where a row stands (seen in MKL with 3 and
5 rows)."""


@dataclass(frozen=True, slots=True)
class LMHead:
    """The layer that turns hidden states into logits, and the size of its chunks."""

    weight_VD: Tensor
    bias_V: Tensor | None
    fp32_logits: bool
    """Keep the products of a 16-bit head in fp32 until the loss has read them."""
    chunk_rows: int
    batch_invariant: bool = False
    """All products that a row's results come from have `chunk_rows` rows, whatever the number of
    those that count."""

    def chunks(self, num_rows: int, start: int = 0) -> Iterator[slice]:
        """Chunks of `num_rows` rows from `start` on."""
        size, stop = self.chunk_rows, start + num_rows
        return (slice(i, min(i + size, stop)) for i in range(start, stop, size))

    def options(self, impl: str) -> tuple[bool, int, bool, str]:
        """The values of `OPTIONS`."""
        return self.fp32_logits, self.chunk_rows, self.batch_invariant, impl

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """[C, V], in fp32 if asked for, else in the dtype of the hidden states. Rows begin at
        multiples of 16 bytes: a kernel then sums each alike, whatever its place.
        """
        num_rows, hidden_CD = len(hidden_CD), self.padded(hidden_CD)
        dtype = accumulator_dtype(hidden_CD.dtype) if self.fp32_logits else hidden_CD.dtype
        num_vocab, width = len(self.weight_VD), max(1, 16 // dtype.itemsize)
        stride = -(-num_vocab // width) * width
        out_CV = hidden_CD.new_empty((len(hidden_CD), stride), dtype=dtype)[:, :num_vocab]
        if self.bias_V is None or dtype != hidden_CD.dtype:
            _product(hidden_CD, self.weight_VD.t(), out_CV)
            return out_CV[:num_rows] if self.bias_V is None else out_CV[:num_rows].add_(self.bias_V)
        torch.addmm(self.bias_V, hidden_CD, self.weight_VD.t(), out=out_CV)  # rounds the sum once
        return out_CV[:num_rows]

    def padded(self, rows_CX: Tensor) -> Tensor:
        """Add rows of zeros up to `chunk_rows` if the head is batch-invariant: a library picks its
        kernel, and with it the order in which it sums, by the shape.
        """
        missing = self.chunk_rows - len(rows_CX)
        if self.batch_invariant and (missing or not rows_CX.is_contiguous()):
            return pad(rows_CX, (0, 0, 0, missing))
        return rows_CX


def new_head(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    *,
    fp32_logits: bool,
    memory_budget: int | None,
    batch_invariant: bool,
) -> LMHead:
    """Check the arguments of a head, and choose the size of its chunks."""
    check_head(hidden_TD, weight_VD, bias_V)
    if batch_invariant and hidden_TD.dtype == torch.float64:
        raise ValueError(
            "batch_invariant works with float32, bfloat16 and float16, got hidden_TD of float64"
        )
    num_vocab, size = len(weight_VD), hidden_TD.element_size()
    row_bytes = num_vocab * (size if not fp32_logits or size >= 4 else 4 + size)
    num_rows = 4096 if hidden_TD.is_cuda else max(16, 2**23 // num_vocab)
    if memory_budget is not None:
        num_rows = memory_budget // row_bytes
    if batch_invariant and num_rows < INVARIANT_STEP:
        raise ValueError(
            f"memory_budget={memory_budget} bytes must hold at least {INVARIANT_STEP} rows of "
            f"logits for batch_invariant, which take {INVARIANT_STEP * row_bytes}"
        )
    if num_rows < 1:
        raise ValueError(
            f"memory_budget={memory_budget} bytes must hold at least one row of logits, which "
            f"takes {row_bytes}"
        )
    if batch_invariant:
        num_rows = min(num_rows, 4096 if hidden_TD.is_cuda else 256)
        num_rows -= num_rows % INVARIANT_STEP
    return LMHead(weight_VD, bias_V, fp32_logits, num_rows, batch_invariant)


@dataclass(slots=True)
class Gradients:
    """Sums over the chunks; None for a gradient that nobody needs. What no chunk has written yet
    holds anything until `finish`.
    """

    hidden_TD: Tensor | None
    """Chunks write it; whoever leaves rows out says so by `clear_hidden`."""
    weight_VD: Tensor | None
    """fp32 (fp64 in fp64), whatever the head's own dtype."""
    bias_V: Tensor | None
    is_weight_unwritten: bool = True
    """The first chunk writes the weight's gradient, the others add to it."""
    num_rows: int = 0
    """Rows that took part in the products."""

    @classmethod
    def empty(cls, hidden_TD: Tensor, head: LMHead, needs: Sequence[bool]) -> Gradients:
        """Memory for each of hidden, weight and bias that needs a gradient."""
        dtype, device = accumulator_dtype(hidden_TD.dtype), hidden_TD.device
        hidden = weight = bias = None
        if needs[0]:
            hidden = torch.empty(hidden_TD.shape, dtype=hidden_TD.dtype, device=device)
        if needs[1]:
            weight = torch.empty(head.weight_VD.shape, dtype=dtype, device=device)
        if needs[2]:
            bias = torch.zeros(len(head.weight_VD), dtype=dtype, device=device)
        return cls(hidden, weight, bias)

    def clear_hidden(self, row_C: Tensor | slice = slice(None)) -> None:
        """Rows of which not all will be written."""
        if self.hidden_TD is not None:
            self.hidden_TD[row_C] = 0

    def finish(self) -> None:
        """No more chunks will come."""
        if self.weight_VD is not None and self.is_weight_unwritten:
            self.weight_VD.zero_()

    def add(
        self,
        head: LMHead,
        hidden_CD: Tensor,
        dlogits_CV: Tensor,
        row_C: Tensor | slice,
        active_C: Tensor | None,
    ) -> None:
        """Add a chunk. `row_C`: where its rows lie among all, a tensor if not all are walked;
        `active_C`: bool, rows whose dlogits are not all zero; None: unknown, which nobody waits
        for.
        """
        if active_C is not None:
            index_A = active_C.nonzero()[:, 0]
            if len(index_A) <= DENSE * len(active_C):
                hidden_CD, dlogits_CV = hidden_CD[index_A], dlogits_CV[index_A]
                if isinstance(row_C, slice):
                    self.clear_hidden(row_C)
                    row_C = index_A + row_C.start
                else:
                    row_C = row_C[index_A]
        self.num_rows += len(hidden_CD)
        if len(hidden_CD) == 0:
            return
        if self.hidden_TD is not None:
            self._add_hidden(self.hidden_TD, head, dlogits_CV, row_C)
        if self.weight_VD is not None:
            # Filling it with zeros first would write 4 V D bytes for nothing, and read them again.
            add = _product if self.is_weight_unwritten else _accumulate
            add(dlogits_CV.t(), hidden_CD, self.weight_VD)
            self.is_weight_unwritten = False
        if self.bias_V is not None:
            self.bias_V += dlogits_CV.sum(0, dtype=self.bias_V.dtype)

    def _add_hidden(
        self, total_TD: Tensor, head: LMHead, dlogits_CV: Tensor, row_C: Tensor | slice
    ) -> None:
        if isinstance(row_C, slice) and not head.batch_invariant:
            _product(dlogits_CV, head.weight_VD, total_TD[row_C])
            return
        padded_CV = head.padded(dlogits_CV)
        dhidden_CD = total_TD.new_empty(len(padded_CV), total_TD.shape[1])
        _product(padded_CV, head.weight_VD, dhidden_CD)
        total_TD[row_C] = dhidden_CD[: len(dlogits_CV)]

    def as_outputs(self, example: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three gradients; an empty tensor for each that is not needed."""
        found = (self.hidden_TD, self.weight_VD, self.bias_V)
        hidden, weight, bias = (example.new_empty((0,)) if g is None else g for g in found)
        return hidden, weight, bias


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _product(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """out = a b; 16-bit operands may give an fp32 result. Autocast has no say where `out` is given,
    nor in place.
    """
    dtype = out_MN.dtype
    if a_MK.dtype == dtype:
        torch.mm(a_MK, b_KN, out=out_MN)
    elif a_MK.is_cuda:
        torch.mm(a_MK, b_KN, out_dtype=dtype, out=out_MN)
    else:
        torch.mm(a_MK.to(dtype), b_KN.to(dtype), out=out_MN)


def _accumulate(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """out += a b, likewise: the sum is not rounded to 16 bits."""
    dtype = out_MN.dtype
    if a_MK.dtype == dtype:
        out_MN.addmm_(a_MK, b_KN)
    elif a_MK.is_cuda:
        torch.addmm(out_MN, a_MK, b_KN, out_dtype=dtype, out=out_MN)
    else:
        out_MN.addmm_(a_MK.to(dtype), b_KN.to(dtype))


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A chunk whose logits are at hand."""

    logits_CV: Tensor
    targets: Targets
    scored: tuple[Tensor, Tensor]
    """`score_3C` and `state_4C`."""

    @classmethod
    def of(cls, head: LMHead, hidden_CD: Tensor, targets: Targets, impl: str) -> ScoredChunk:
        logits_CV = head.logits(hidden_CD)
        return cls(logits_CV, targets, compute_scores(impl, logits_CV, targets))

    def gradient(self, slopes: Slopes, dtype: torch.dtype, impl: str) -> Tensor:
        """The gradient by the logits, in the dtype of the hidden states."""
        out_CV = gradient_buffer(self.logits_CV, dtype)
        write_gradient(
            impl, self.logits_CV, self.targets, scored=self.scored, slopes=slopes, out_TV=out_CV
        )
        return out_CV


def gradient_buffer(logits_CV: Tensor, dtype: torch.dtype) -> Tensor:
    """The logits themselves for dlogits to go over, or a 16-bit buffer where the logits are fp32
    and the products are not.
    """
    return logits_CV if logits_CV.dtype == dtype else torch.empty_like(logits_CV, dtype=dtype)


def walk_scores(head: LMHead, hidden_TD: Tensor, targets: Targets, impl: str) -> Tensor:
    """`score_3T`; rows with a negative target are not computed."""
    score_3T = torch.zeros(Score.NUM, len(targets), device=hidden_TD.device)
    index_A = (targets.ids_T >= 0).nonzero()[:, 0]
    if len(index_A) < len(targets):
        score_3T[:, index_A] = walk_scores(head, hidden_TD[index_A], targets.at(index_A), impl)
        return score_3T
    for chunk in head.chunks(len(targets)):
        chunk_targets = targets[chunk]
        score_3T[:, chunk] = ScoredChunk.of(head, hidden_TD[chunk], chunk_targets, impl).scored[0]
    return score_3T


def walk_gradient(
    head: LMHead,
    hidden_TD: Tensor,
    targets: Targets,
    slopes: Slopes,
    *,
    gradients: Gradients,
    impl: str,
) -> None:
    """Add the gradient for any upstream gradient of the scores, from logits computed once more;
    rows without one are left out.
    """
    has_slope_T = slopes.logprob_T != 0
    for slope_T in (slopes.entropy_T, slopes.lse_T):
        has_slope_T = has_slope_T if slope_T is None else has_slope_T | (slope_T != 0)
    row_T = (has_slope_T & (targets.ids_T >= 0)).nonzero()[:, 0]
    if len(row_T) < len(targets):
        gradients.clear_hidden()
    hidden_TD, targets, slopes = hidden_TD[row_T], targets.at(row_T), slopes[row_T]
    for chunk in head.chunks(len(row_T)):
        hidden_CD = hidden_TD[chunk]
        scored = ScoredChunk.of(head, hidden_CD, targets[chunk], impl)
        out_CV = scored.gradient(slopes[chunk], hidden_CD.dtype, impl)
        gradients.add(head, hidden_CD, out_CV, row_T[chunk], None)
        del scored, out_CV  # before the next chunk's logits are made
    gradients.finish()
