"""The language-model head in chunks: logits -> loss, with the logits' gradient in place ->
gradients of hidden states and weight.

Maths: logits = X W^T + b; dX = dlogits W, dW = dlogits^T X, db = sum dlogits. FLOPs: 2 T D V for
each of the three products. Forming the gradient while a chunk's logits are in memory saves a fourth
product, which recomputes the logits elsewhere. Memory: one chunk of logits, and dW. Of several
chunks dW is the sum, in fp32, whose read-modify-write (8 V D bytes per chunk) is why a chunk should
not be small: 4096 rows by default. A single chunk writes dW in the head's own dtype. In 16 bits a
single chunk takes 2 T V + 2 V D bytes and several take 2 C V + 4 V D, so one chunk takes no more
while T <= C + D. T: target tokens, C: rows of a chunk, D: hidden size, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowkernels.arguments import check_head, dtype_of_results
from flowkernels.logprobs import Score, compute_scores, write_gradient
from flowkernels.targets import Slopes, Targets

HEAD = "Tensor hidden, Tensor weight, Tensor? bias"
OPTIONS = "bool fp32_logits, SymInt chunk_rows, SymInt whole_rows, str impl"
"""Hidden states and their head, and how to walk over it, in the schema of an operator."""
DENSE = 0.9
"""Above this share of active rows a chunk is not compacted: the copy would not pay off."""


@dataclass(frozen=True, slots=True)
class LMHead:
    """The layer that turns hidden states into logits, and the size of its chunks."""

    weight_VD: Tensor
    bias_V: Tensor | None
    fp32_logits: bool
    """Keep the products of a 16-bit head in fp32 until the loss has read them."""
    chunk_rows: int
    whole_rows: int
    """Up to so many rows are one chunk."""

    def over(self, num_rows: int) -> LMHead:
        """Return the head for a walk over so many rows in all: in one chunk if they are few."""
        is_whole = self.chunk_rows < num_rows <= self.whole_rows
        return replace(self, chunk_rows=num_rows) if is_whole else self

    def chunks(self, num_rows: int, start: int = 0) -> Iterator[slice]:
        """Return equal chunks of `num_rows` rows from `start` on, rather than a short last one."""
        stop, num_chunks = start + num_rows, max(1, -(-num_rows // self.chunk_rows))
        size = max(1, -(-num_rows // num_chunks))
        return (slice(i, min(i + size, stop)) for i in range(start, stop, size))

    def options(self, impl: str) -> tuple[bool, int, int, str]:
        """Return the values of `OPTIONS`."""
        return self.fp32_logits, self.chunk_rows, self.whole_rows, impl

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Return the logits [C, V], in fp32 if asked for, else in the dtype of the hidden states.
        Rows begin at multiples of 16 bytes: a kernel then sums each alike, whatever its place.
        """
        dtype = dtype_of_results(hidden_CD.dtype) if self.fp32_logits else hidden_CD.dtype
        num_vocab, width = len(self.weight_VD), max(1, 16 // dtype.itemsize)
        stride = -(-num_vocab // width) * width
        padded = hidden_CD.new_empty((len(hidden_CD), stride), dtype=dtype)
        # oneDNN multiplies what lies between rows by zero (torch 2.13 on AMX): NaN, if it was that.
        padded[:, num_vocab:] = 0
        out_CV = padded[:, :num_vocab]
        if self.bias_V is None or dtype != hidden_CD.dtype:
            _product(hidden_CD, self.weight_VD.t(), out_CV)
            return out_CV if self.bias_V is None else out_CV.add_(self.bias_V)
        torch.addmm(self.bias_V, hidden_CD, self.weight_VD.t(), out=out_CV)  # rounds the sum once
        return out_CV


def new_head(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    *,
    fp32_logits: bool,
    memory_budget: int | None,
) -> LMHead:
    """Check the arguments of a head, and choose the size of its chunks."""
    check_head(hidden_TD, weight_VD, bias_V)
    num_vocab, size, is_cuda = len(weight_VD), hidden_TD.element_size(), hidden_TD.is_cuda
    row_bytes = bytes_per_row(num_vocab, size, fp32_logits)
    num_rows, extra_rows = default_rows(num_vocab, is_cuda), 0
    if memory_budget is not None:
        num_rows = memory_budget // row_bytes
    elif weight_VD.requires_grad:
        # One chunk has dW in the head's dtype where several have it in fp32.
        extra_rows = max(0, 4 - size) * weight_VD.numel() // row_bytes
    if num_rows < 1:
        raise ValueError(
            f"memory_budget={memory_budget} bytes must hold at least one row of logits, which "
            f"takes {row_bytes}"
        )
    return LMHead(weight_VD, bias_V, fp32_logits, num_rows, num_rows + extra_rows)


def bytes_per_row(num_vocab: int, size: int, fp32_logits: bool) -> int:
    """Bytes of a row of logits of a head whose numbers have `size` bytes, and of its gradient."""
    return num_vocab * (size if not fp32_logits or size >= 4 else 4 + size)


def default_rows(num_vocab: int, on_gpu: bool) -> int:
    """Return the rows of a chunk where no budget is given."""
    return 4096 if on_gpu else max(16, 2**23 // num_vocab)


@dataclass(slots=True)
class Gradients:
    """Sums of gradients over the chunks; None for a gradient that is not needed. Parts that no
    chunk has written are undefined until `finish`.
    """

    hidden_TD: Tensor | None
    """Chunks write it; whoever leaves rows out says so by `clear_hidden`."""
    bias_V: Tensor | None
    """fp32 (fp64 in fp64)."""
    needs_weight: bool
    weight_VD: Tensor | None = None
    """The first chunk allocates and writes it, later chunks add to it. In the head's own dtype for
    a single chunk, else in fp32 (fp64 in fp64)."""
    num_rows: int = 0
    """Rows that took part in the products."""

    @classmethod
    def empty(cls, hidden_TD: Tensor, head: LMHead, needs: Sequence[bool]) -> Gradients:
        """Make gradients of those of hidden, weight and bias that need one."""
        dtype, device = dtype_of_results(hidden_TD.dtype), hidden_TD.device
        hidden = bias = None
        if needs[0]:
            hidden = torch.empty(hidden_TD.shape, dtype=hidden_TD.dtype, device=device)
        if needs[2]:
            bias = torch.zeros(len(head.weight_VD), dtype=dtype, device=device)
        return cls(hidden, bias, needs[1])

    def clear_hidden(self, row_C: Tensor | slice = slice(None)) -> None:
        """Zero these rows of the hidden states' gradient, as not all will be written."""
        if self.hidden_TD is not None:
            self.hidden_TD[row_C] = 0

    def add(
        self,
        head: LMHead,
        hidden_CD: Tensor,
        dlogits_CV: Tensor,
        row_C: Tensor | slice,
        active_C: Tensor | None,
        is_only: bool,
    ) -> None:
        """Add a chunk. `row_C`: where its rows lie among all, a tensor if not all are walked;
        `active_C`: bool, rows whose dlogits are not all zero; None: unknown, which nobody waits
        for; `is_only`: there are no other chunks.
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
            if isinstance(row_C, slice):
                _product(dlogits_CV, head.weight_VD, self.hidden_TD[row_C])
            else:
                dhidden_CD = torch.empty_like(hidden_CD)
                _product(dlogits_CV, head.weight_VD, dhidden_CD)
                self.hidden_TD[row_C] = dhidden_CD
        if self.weight_VD is not None:
            _accumulate(dlogits_CV.t(), hidden_CD, self.weight_VD)
        elif self.needs_weight:
            # A sum over chunks in 16 bits would round at each of them; one product rounds once.
            dtype = hidden_CD.dtype if is_only else dtype_of_results(hidden_CD.dtype)
            shape = head.weight_VD.shape
            self.weight_VD = torch.empty(shape, dtype=dtype, device=hidden_CD.device)
            _product(dlogits_CV.t(), hidden_CD, self.weight_VD)
        if self.bias_V is not None:
            self.bias_V += dlogits_CV.sum(0, dtype=self.bias_V.dtype)

    def as_outputs(self, head: LMHead) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three gradients in the head's dtype; an empty tensor where none is needed."""
        example, weight_VD = head.weight_VD, self.weight_VD
        if weight_VD is None and self.needs_weight:  # no chunk had a row
            weight_VD = torch.zeros(example.shape, dtype=example.dtype, device=example.device)
        hidden, weight, bias = (
            example.new_empty((0,)) if g is None else g.to(example.dtype)
            for g in (self.hidden_TD, weight_VD, self.bias_V)
        )
        return hidden, weight, bias


def _product(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """Write out = a b, perhaps in fp32 from 16-bit operands; autocast ignores `out` and
    in-place.
    """
    dtype = out_MN.dtype
    if a_MK.dtype == dtype:
        torch.mm(a_MK, b_KN, out=out_MN)
    elif a_MK.is_cuda:
        torch.mm(a_MK, b_KN, out_dtype=dtype, out=out_MN)
    else:
        torch.mm(a_MK.to(dtype), b_KN.to(dtype), out=out_MN)


def _accumulate(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """Add out += a b, likewise: the sum is not rounded to 16 bits."""
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
        """Return the gradient by the logits, in the dtype of the hidden states."""
        out_CV = gradient_buffer(self.logits_CV, dtype)
        write_gradient(
            impl, self.logits_CV, self.targets, scored=self.scored, slopes=slopes, out_TV=out_CV
        )
        return out_CV


def gradient_buffer(logits_CV: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the buffer for dlogits: the logits themselves, or a 16-bit buffer if the logits are
    fp32 and the products are not.
    """
    return logits_CV if logits_CV.dtype == dtype else torch.empty_like(logits_CV, dtype=dtype)


def walk_scores(head: LMHead, hidden_TD: Tensor, targets: Targets, impl: str) -> Tensor:
    """Return `score_3T`; rows with a negative target are not computed."""
    score_3T = targets.temperature_T.new_zeros(Score.NUM, len(targets))
    index_A = (targets.ids_T >= 0).nonzero()[:, 0]
    if len(index_A) < len(targets):
        score_3T[:, index_A] = walk_scores(head, hidden_TD[index_A], targets.at(index_A), impl)
        return score_3T
    head = head.over(len(targets))
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
    head = head.over(len(row_T))
    for chunk in head.chunks(len(row_T)):
        hidden_CD = hidden_TD[chunk]
        scored = ScoredChunk.of(head, hidden_CD, targets[chunk], impl)
        out_CV = scored.gradient(slopes[chunk], hidden_CD.dtype, impl)
        del scored  # logits in fp32 are needed no more
        is_only = len(hidden_CD) == len(row_T)
        gradients.add(head, hidden_CD, out_CV, row_T[chunk], None, is_only)
        del out_CV  # before the next chunk's logits are made
