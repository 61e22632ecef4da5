"""The loss of a head's tokens chunk by chunk; `lm_head.py` has the maths and the sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowkernels.lm_head import Gradients, LMHead, ScoredChunk, gradient_buffer
from flowkernels.logprobs import Score
from flowkernels.policy_loss import run_loss
from flowkernels.statistics import Column, reduce, to_columns
from flowkernels.targets import Targets
from flowkernels.token_loss import LossSpec, TokenInputs, token_loss


@dataclass(frozen=True, slots=True)
class LossWalk:
    """The loss of a `LossSpec` over the chunks of a head."""

    head: LMHead
    hidden_TD: Tensor
    targets: Targets
    inputs: TokenInputs
    spec: LossSpec
    impl: str
    compact: bool
    gradients: Gradients | None = None
    """The gradients are added up here; None: nobody needs one."""
    row_T: Tensor | None = None
    """Positions of these rows among all; None: they are all."""

    def run(
        self, needs: Sequence[bool], weight_grad_VD: Tensor | None = None
    ) -> tuple[Tensor, Gradients, Tensor, Tensor]:
        """(loss, gradients, columns, statistics); see `Gradients.empty` for the arguments."""
        gradients = Gradients.empty(self.hidden_TD, self.head, needs, weight_grad_VD)
        column_7T = replace(self, gradients=gradients if any(needs) else None)._columns()
        loss, stats = reduce(self.impl, column_7T, self.inputs.weight_T, self.targets.ids_T)
        return loss, gradients, column_7T, stats

    def _columns(self) -> Tensor:
        """Return `column_7T`, and add up the gradients."""
        counts_T = (self.inputs.weight_T != 0) & (self.targets.ids_T >= 0)
        index_A = counts_T.nonzero()[:, 0] if self.compact else None
        if index_A is None or len(index_A) == len(counts_T):
            # A row with a negative target is in no sequence either.
            weight_T = torch.where(counts_T, self.inputs.weight_T, 0.0)
            return replace(self, inputs=replace(self.inputs, weight_T=weight_T))._walk()
        column_7T = torch.zeros(Column.NUM, len(counts_T), device=counts_T.device)
        part = replace(
            self,
            hidden_TD=self.hidden_TD[index_A],
            targets=self.targets.at(index_A),
            inputs=self.inputs.at(counts_T, index_A),
            row_T=index_A,
        )
        column_7T[:, index_A] = part._walk()
        return column_7T

    def _walk(self) -> Tensor:
        column_7T = torch.zeros(Column.NUM, len(self.targets), device=self.hidden_TD.device)
        is_fused = self.spec.loss_type != "gspo" and self.head.shard is None
        one_block = self._fused_chunk if is_fused else self._scored_block
        for block in self._blocks():
            column_7T[:, block] = one_block(block)
        return column_7T

    def _blocks(self) -> list[slice]:
        """Chunks; for a loss of whole sequences, runs of sequences that fit a chunk, and longer
        ones alone.
        """
        num_rows, bounds_S1 = len(self.targets), self.inputs.cu_seqlens_S1
        if self.spec.loss_type != "gspo" or bounds_S1 is None:
            return list(self.head.chunks(num_rows))
        blocks: list[slice] = []
        start = previous = 0
        for bound in bounds_S1.tolist()[1:]:
            if bound - start > self.head.chunk_rows and previous > start:
                blocks.append(slice(start, previous))
                start = previous
            previous = bound
        return [*blocks, slice(start, num_rows)] if num_rows > start else blocks

    def _fused_chunk(self, chunk: slice) -> Tensor:
        """One product, the row kernel over its result, two products."""
        hidden_CD = self.hidden_TD[chunk]
        logits_CV = self.head.logits(hidden_CD)
        out_CV = None if self.gradients is None else gradient_buffer(logits_CV, hidden_CD.dtype)
        column_7C = run_loss(
            self.impl, logits_CV, self.targets[chunk], self.spec, self.inputs[chunk], out_CV
        )
        if out_CV is not None:
            self._add(chunk, out_CV, column_7C)
        return column_7C

    def _scored_block(self, block: slice) -> Tensor:
        """The loss of rows that is known only together: scores of all, their loss, then gradients.
        The logits of a block of one chunk are computed once, those of a longer one twice where a
        chunk has rows with a gradient.
        """
        chunks = list(self.head.chunks(block.stop - block.start, block.start))
        only = self._scored(chunks[0]) if len(chunks) == 1 else None
        scores = (self._scored(chunk).scored[0] for chunk in chunks)
        score_3B = torch.cat(list(scores), 1) if only is None else only.scored[0]
        tokens = self.inputs[block].scored(score_3B[Score.LOGPROB], score_3B[Score.ENTROPY])
        token = token_loss(self.spec, tokens)
        column_7B = torch.where(tokens.weight_T != 0, to_columns(token, tokens), 0.0)
        if self.gradients is None:
            return column_7B
        dlogprob_B, dentropy_B = token.weighted_slopes(tokens.weight_T)
        # With a vocab shard never skip a chunk: rounding may make ranks disagree on whether a row
        # is clipped, and all must enter the same collectives.
        skips = self.compact and only is None and self.head.shard is None
        for chunk in chunks:
            inner = slice(chunk.start - block.start, chunk.stop - block.start)
            if skips and not column_7B[Column.HAS_GRADIENT, inner].any():
                continue
            scored = self._scored(chunk) if only is None else only
            slopes = (dlogprob_B[inner], None if dentropy_B is None else dentropy_B[inner])
            out_CV = scored.gradient(slopes, self.hidden_TD.dtype, self.impl)
            self._add(chunk, out_CV, column_7B[:, inner])
            del scored, out_CV  # before the next chunk's logits are made
        return column_7B

    def _scored(self, chunk: slice) -> ScoredChunk:
        return ScoredChunk.of(self.head, self.hidden_TD[chunk], self.targets[chunk], self.impl)

    def _add(self, chunk: slice, dlogits_CV: Tensor, column_7C: Tensor) -> None:
        assert self.gradients is not None
        row_C = chunk if self.row_T is None else self.row_T[chunk]
        active_C = column_7C[Column.HAS_GRADIENT] != 0 if self.compact else None
        self.gradients.add(self.head, self.hidden_TD[chunk], dlogits_CV, row_C, active_C)
