"""The loss of a head's tokens chunk by chunk; `lm_head.py` has the maths and the sizes.

Rows without a gradient are left out of the products. Which rows do not count is known before the
first product; which are clipped, only after it, chunk by chunk. The host must learn how many rows
are left, and so waits for the device. `Compact` says how often: "no", "call" (one read, of all that
the call must know) or "chunks" (one more for each chunk, which spares clipped rows two products of
three).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from flowkernels.lm_head import Gradients, LMHead, ScoredChunk, gradient_buffer
from flowkernels.loss_spec import LossSpec
from flowkernels.policy_loss import run_loss
from flowkernels.statistics import Column, reduce, to_columns
from flowkernels.targets import Targets
from flowkernels.token_loss import TokenInputs, token_loss

Compact = Literal["no", "call", "chunks"]


def resolve_compact(compact: bool | str, device: torch.device) -> Compact:
    """True is "chunks" on a CPU, where a read costs nothing, and "call" elsewhere."""
    if isinstance(compact, bool):
        return ("chunks" if device.type == "cpu" else "call") if compact else "no"
    if compact not in ("call", "chunks"):
        raise ValueError(f"compact={compact!r} must be True, False, 'call' or 'chunks'")
    return "call" if compact == "call" else "chunks"


@dataclass(frozen=True, slots=True)
class LossWalk:
    """The loss of a `LossSpec` over the chunks of a head."""

    head: LMHead
    hidden_TD: Tensor
    targets: Targets
    inputs: TokenInputs
    spec: LossSpec
    impl: str
    compact: Compact
    gradients: Gradients | None = None
    """The gradients are added up here; None: nobody needs one."""
    row_T: Tensor | None = None
    """Positions of these rows among all; None: they are all."""
    bounds: Sequence[int] = ()
    """Bounds of the sequences where chunks are cut there."""

    def run(self, needs: Sequence[bool]) -> tuple[Tensor, Gradients, Tensor, Tensor]:
        """Return (loss, gradients, columns, statistics); see `Gradients.empty` for the argument."""
        gradients = Gradients.empty(self.hidden_TD, self.head, needs)
        column_7T = replace(self, gradients=gradients if any(needs) else None)._columns()
        loss, stats = reduce(self.impl, column_7T, self.inputs.weight_T, self.targets.ids_T)
        return loss, gradients, column_7T, stats

    def _columns(self) -> Tensor:
        """Return `column_7T`, and add up the gradients."""
        counts_T = (self.inputs.weight_T != 0) & (self.targets.ids_T >= 0)
        is_walked_T = torch.ones_like(counts_T) if self.compact == "no" else counts_T
        num_rows, num_mask_ids, bounds = len(counts_T), 0, []
        if self.compact != "no" or self._is_cut_at_sequences():
            num_rows, num_mask_ids, *bounds = self._numbers(is_walked_T).tolist()
        if num_rows == len(counts_T):
            # A row with a negative target is in no sequence either.
            weight_T = torch.where(counts_T, self.inputs.weight_T, 0.0)
            inputs = replace(self.inputs, weight_T=weight_T)
            return replace(self, inputs=inputs, bounds=bounds)._walk()
        # The size is known: `nonzero` would make the host wait once more.
        index_A = torch.nonzero_static(counts_T, size=num_rows)[:, 0]
        if self.gradients is not None:
            self.gradients.clear_hidden()
        compacted = replace(
            self,
            hidden_TD=self.hidden_TD[index_A],
            targets=self.targets.at(index_A, num_mask_ids),
            inputs=self.inputs.at(counts_T, index_A),
            row_T=index_A,
            bounds=bounds,
        )
        column_7T = self.inputs.weight_T.new_zeros(Column.NUM, len(counts_T))
        column_7T[:, index_A] = compacted._walk()
        return column_7T

    def _is_cut_at_sequences(self) -> bool:
        return self.spec.loss_type == "gspo" and len(self.targets) > self.head.whole_rows

    def _numbers(self, is_walked_T: Tensor) -> Tensor:
        """Put what the host must know into one tensor: the number of rows to walk, that of the ids
        of their sampling masks, and where their sequences begin and end if chunks are cut there.
        """
        before_T1 = pad(is_walked_T.cumsum(0), (1, 0))
        numbers = [before_T1[-1:], torch.zeros_like(before_T1[-1:])]
        if self.targets.mask is not None:
            num_ids_T = self.targets.mask.offsets_T1.diff()
            numbers[1] = torch.where(is_walked_T, num_ids_T, 0).sum(0, keepdim=True)
        if self._is_cut_at_sequences() and self.inputs.cu_seqlens_S1 is not None:
            numbers.append(before_T1[self.inputs.cu_seqlens_S1.long()])
        return torch.cat(numbers)

    def _walk(self) -> Tensor:
        column_7T = self.inputs.weight_T.new_zeros(Column.NUM, len(self.targets))
        walk = replace(self, head=self.head.over(len(self.targets)))
        compute = walk._fused_chunk if self.spec.is_fused else walk._scored_block
        for block in walk._blocks():
            column_7T[:, block] = compute(block)
        return column_7T

    def _blocks(self) -> list[slice]:
        """Return the chunks; for a loss of whole sequences, runs of sequences that fit a chunk, and
        longer ones alone.
        """
        num_rows = len(self.targets)
        if not self.bounds:
            return list(self.head.chunks(num_rows))
        blocks: list[slice] = []
        start = previous = 0
        for bound in self.bounds[1:]:
            if bound - start > self.head.chunk_rows and previous > start:
                blocks.append(slice(start, previous))
                start = previous
            previous = bound
        return [*blocks, slice(start, num_rows)] if num_rows > start else blocks

    def _fused_chunk(self, chunk: slice) -> Tensor:
        """Compute a chunk: one product, the row kernel over its result, two products."""
        hidden_CD = self.hidden_TD[chunk]
        logits_CV = self.head.logits(hidden_CD)
        out_CV = None if self.gradients is None else gradient_buffer(logits_CV, hidden_CD.dtype)
        column_7C = run_loss(
            self.impl, logits_CV, self.targets[chunk], self.spec, self.inputs[chunk], out_CV
        )
        del logits_CV  # in fp32 they are needed no more
        if out_CV is not None:
            self._add(chunk, out_CV, column_7C)
        return column_7C

    def _scored_block(self, block: slice) -> Tensor:
        """Compute the loss of rows that is known only together: scores of all, their loss, then
        gradients. The logits of a block of one chunk are computed once, those of a longer one twice
        where a chunk has rows with a gradient.
        """
        chunks = list(self.head.chunks(block.stop - block.start, block.start))
        single = self._scored(chunks[0]) if len(chunks) == 1 else None
        scores = (self._scored(chunk).scored[0] for chunk in chunks)
        score_3B = torch.cat(list(scores), 1) if single is None else single.scored[0]
        tokens = self.inputs[block].scored(*score_3B)
        token = token_loss(self.spec, tokens)
        column_7B = torch.where(tokens.weight_T != 0, to_columns(token, tokens), 0.0)
        if self.gradients is None:
            return column_7B
        slopes = token.weighted_slopes(tokens.weight_T)
        skips = self.compact == "chunks" and single is None
        for chunk in chunks:
            rows = slice(chunk.start - block.start, chunk.stop - block.start)
            if skips and not column_7B[Column.HAS_GRADIENT, rows].any():
                self.gradients.clear_hidden(self._row_index(chunk))
                continue
            scored = self._scored(chunk) if single is None else single
            out_CV = scored.gradient(slopes[rows], self.hidden_TD.dtype, self.impl)
            single = None  # or it would hold the logits
            del scored  # logits in fp32 are needed no more
            self._add(chunk, out_CV, column_7B[:, rows])
            del out_CV  # before the next chunk's logits are made
        return column_7B

    def _scored(self, chunk: slice) -> ScoredChunk:
        return ScoredChunk.of(self.head, self.hidden_TD[chunk], self.targets[chunk], self.impl)

    def _add(self, chunk: slice, dlogits_CV: Tensor, column_7C: Tensor) -> None:
        assert self.gradients is not None
        active_C = column_7C[Column.HAS_GRADIENT] != 0 if self.compact == "chunks" else None
        row_C, hidden_CD = self._row_index(chunk), self.hidden_TD[chunk]
        is_only = len(hidden_CD) == len(self.hidden_TD)
        self.gradients.add(self.head, hidden_CD, dlogits_CV, row_C, active_C, is_only)

    def _row_index(self, chunk: slice) -> Tensor | slice:
        return chunk if self.row_T is None else self.row_T[chunk]
