"""The walk over chunks of a head, and its operators. T: target tokens, D: hidden size, V:
vocabulary, C: rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowkernels import statistics
from flowkernels.head import Gradients, Head, accumulator_dtype, chunk_scores, gradient_buffer
from flowkernels.row_loss import NUM_COLUMNS, columns, decode, run_loss, scaled, weighted_slopes
from flowkernels.rows import Rows, make_rows, write_gradient
from flowkernels.token_loss import LossSpec, Tokens, token_loss


def walk_scores(head: Head, source: Rows, impl: str) -> Tensor:
    """[3, T]: logp, entropy, lse; rows with a negative target are not computed."""
    score_3T = torch.zeros(3, len(source.target_ids_T), device=source.target_ids_T.device)
    index_A = (source.target_ids_T >= 0).nonzero()[:, 0]
    if len(index_A) < len(source.target_ids_T):
        score_3T[:, index_A] = walk_scores(head, source.at(index_A), impl)
        return score_3T
    for chunk in head.chunks(len(source.target_ids_T)):
        score_3T[:, chunk] = _chunk_scores(head, source, chunk, impl)[1]
    return score_3T


def _chunk_scores(head: Head, source: Rows, chunk: slice, impl: str) -> tuple[Rows, Tensor, Tensor]:
    return chunk_scores(
        head, replace(source[chunk], logits_TV=head.logits(source.hidden_TD[chunk])), impl
    )


def walk_gradient(
    head: Head,
    source: Rows,
    dlogprob_T: Tensor,
    dentropy_T: Tensor,
    gradients: Gradients,
    impl: str,
) -> None:
    """The gradient for any upstream gradient of logp and entropy, from logits computed once more;
    rows without one are left out.
    """
    row_T = (((dlogprob_T != 0) | (dentropy_T != 0)) & (source.target_ids_T >= 0)).nonzero()[:, 0]
    source, dlogprob_T, dentropy_T = source.at(row_T), dlogprob_T[row_T], dentropy_T[row_T]
    for chunk in head.chunks(len(row_T)):
        rows, score_3C, state_4C = _chunk_scores(head, source, chunk, impl)
        out_CV = gradient_buffer(rows.logits_TV, source.hidden_TD)
        write_gradient(rows, score_3C, state_4C, dlogprob_T[chunk], dentropy_T[chunk], impl, out_CV)
        gradients.add(head, source.hidden_TD[chunk], out_CV, row_T[chunk], None)
        del rows, out_CV  # before the next chunk's logits are made


@dataclass(frozen=True, slots=True)
class LossWalk:
    """Everything that stays the same from chunk to chunk."""

    head: Head
    source: Rows
    tokens: Tokens
    """They need no log-probs yet."""
    spec: LossSpec
    gradients: Gradients | None
    impl: str
    compact: bool
    row_T: Tensor | None = None
    """Where these rows lie among all; None: they are all."""

    def run(self) -> Tensor:
        """Columns [7, T] of `row_loss`; the gradients are added up on the way."""
        counts_T = (self.tokens.weight_T != 0) & (self.source.target_ids_T >= 0)
        column_7T = torch.zeros(NUM_COLUMNS, len(counts_T), device=counts_T.device)
        if self.compact and self.row_T is None:
            index_A = counts_T.nonzero()[:, 0]
            if len(index_A) < len(counts_T):
                part = replace(
                    self,
                    source=self.source.at(index_A),
                    tokens=_at(self.tokens, index_A, counts_T),
                    row_T=index_A,
                )
                column_7T[:, index_A] = part.run()
                return column_7T
        if self.row_T is None:  # a row with a negative target is in no sequence either
            return replace(
                self,
                tokens=replace(
                    self.tokens, weight_T=torch.where(counts_T, self.tokens.weight_T, 0.0)
                ),
            )._walk(column_7T)
        return self._walk(column_7T)

    def _walk(self, column_7T: Tensor) -> Tensor:
        one_kernel = self.spec.loss_type != "gspo" and self.head.shard is None
        for block in _blocks(self.head, column_7T.shape[1], self.spec, self.tokens.cu_seqlens_S1):
            column_7T[:, block] = (
                self._fused_chunk(block) if one_kernel else self._scored_block(block)
            )
        return column_7T

    def _fused_chunk(self, chunk: slice) -> Tensor:
        """Product, row kernel over the product, two products."""
        hidden_CD = self.source.hidden_TD[chunk]
        rows = replace(self.source[chunk], logits_TV=self.head.logits(hidden_CD))
        part = _part(self.tokens, chunk)
        out_CV = None if self.gradients is None else gradient_buffer(rows.logits_TV, hidden_CD)
        column_7C = run_loss(
            rows,
            self.spec,
            part.advantage_T,
            part.weight_T,
            part.old_logprob_T,
            part.ref_logprob_T,
            out_CV,
            self.impl,
        )
        self._add(chunk, out_CV, column_7C)
        return column_7C

    def _scored_block(self, block: slice) -> Tensor:
        """Rows whose loss is known only together: scores of all, their loss, then gradients. The
        logits of a block of one chunk are computed once, those of a longer one twice where a chunk
        has rows with a gradient.
        """
        chunks = [
            slice(block.start + c.start, block.start + c.stop)
            for c in self.head.chunks(block.stop - block.start)
        ]
        scored = [self._scores(chunk) for chunk in chunks] if len(chunks) == 1 else []
        score_3B = torch.cat(
            [s[1] for s in scored] or [self._scores(chunk)[1] for chunk in chunks], 1
        )
        part = replace(_part(self.tokens, block), logprob_T=score_3B[0], entropy_T=score_3B[1])
        token = token_loss(self.spec, part)
        column_7B = torch.where(part.weight_T != 0, columns(token, part), 0.0)
        if self.gradients is None:
            return column_7B
        dlogprob_B, dentropy_B = weighted_slopes(token, part.weight_T)
        # Of a shard all ranks must come to the collectives, though rounding may let them differ
        # over a row at the edge of the clip.
        skips = self.compact and not scored and self.head.shard is None
        for chunk in chunks:
            inner = slice(chunk.start - block.start, chunk.stop - block.start)
            if skips and not column_7B[6, inner].any():
                continue  # no row of it has a gradient
            rows, score_3C, state_4C = scored.pop() if scored else self._scores(chunk)
            out_CV = gradient_buffer(rows.logits_TV, self.source.hidden_TD)
            dentropy_C = None if dentropy_B is None else dentropy_B[inner]
            write_gradient(
                rows, score_3C, state_4C, dlogprob_B[inner], dentropy_C, self.impl, out_CV
            )
            self._add(chunk, out_CV, column_7B[:, inner])
            del rows, out_CV  # before the next chunk's logits are made
        return column_7B

    def _scores(self, chunk: slice) -> tuple[Rows, Tensor, Tensor]:
        return _chunk_scores(self.head, self.source, chunk, self.impl)

    def _add(self, chunk: slice, dlogits_CV: Tensor | None, column_7C: Tensor) -> None:
        if self.gradients is not None and dlogits_CV is not None:
            row_C = chunk if self.row_T is None else self.row_T[chunk]
            active_C = column_7C[6] != 0 if self.compact else None
            self.gradients.add(self.head, self.source.hidden_TD[chunk], dlogits_CV, row_C, active_C)


def _blocks(head: Head, num_rows: int, spec: LossSpec, cu_seqlens_S1: Tensor | None) -> list[slice]:
    """Chunks; for a loss of whole sequences, runs of sequences that fit a chunk, and longer ones
    alone.
    """
    if spec.loss_type != "gspo" or cu_seqlens_S1 is None:
        return list(head.chunks(num_rows))
    blocks: list[slice] = []
    start = previous = 0
    for bound in cu_seqlens_S1.tolist()[1:]:
        if bound - start > head.chunk_rows and previous > start:
            blocks.append(slice(start, previous))
            start = previous
        previous = bound
    return [*blocks, slice(start, num_rows)] if num_rows > start else blocks


def _part(tokens: Tokens, block: slice) -> Tokens:
    """The tokens of a block, with the bounds of its sequences."""
    cu_seqlens = tokens.cu_seqlens_S1
    if cu_seqlens is not None:
        # Sequences outside the block become empty ones, which takes no look at the values.
        cu_seqlens = cu_seqlens.clamp(block.start, block.stop) - block.start
    old_T, ref_T = (
        None if x is None else x[block] for x in (tokens.old_logprob_T, tokens.ref_logprob_T)
    )
    weight_T = tokens.weight_T[block]
    return Tokens(
        weight_T, weight_T, tokens.advantage_T[block], weight_T, old_T, ref_T, None, cu_seqlens
    )


def _at(tokens: Tokens, index_A: Tensor, counts_T: Tensor) -> Tokens:
    """Tokens that count; their sequences shrink accordingly."""
    cu_seqlens = tokens.cu_seqlens_S1
    if cu_seqlens is not None:
        num_before = torch.cat([counts_T.new_zeros(1, dtype=torch.int64), counts_T.cumsum(0)])
        cu_seqlens = num_before[cu_seqlens.long()]
    old_T, ref_T = (
        None if x is None else x[index_A] for x in (tokens.old_logprob_T, tokens.ref_logprob_T)
    )
    weight_T = tokens.weight_T[index_A]
    return Tokens(
        weight_T, weight_T, tokens.advantage_T[index_A], weight_T, old_T, ref_T, None, cu_seqlens
    )


@torch.library.custom_op("flowkernels::linear_scores", mutates_args=())
def linear_scores_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    softcap: float,
    kept_ids: Tensor | None,
    kept_offsets: Tensor | None,
    fp32_logits: bool,
    chunk_rows: int,
    batch_invariant: bool,
    impl: str,
) -> Tensor:
    """[3, T]; differentiable by hidden, weight and bias in the first two."""
    head = Head(weight, bias, fp32_logits, chunk_rows, batch_invariant)
    return walk_scores(
        head, make_rows(hidden, targets, temperature, softcap, kept_ids, kept_offsets), impl
    )


@linear_scores_op.register_fake
def _(hidden: Tensor, *_: Any) -> Tensor:
    return hidden.new_empty((3, hidden.shape[0]), dtype=torch.float32)


def _save_scores(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    (
        hidden,
        weight,
        bias,
        targets,
        temperature,
        ctx.softcap,
        kept_ids,
        kept_offsets,
        *ctx.options,
    ) = inputs
    ctx.save_for_backward(hidden, weight, bias, targets, temperature, kept_ids, kept_offsets)


def _scores_backward(ctx: Any, dscore_3T: Tensor) -> tuple[Any, ...]:
    hidden, weight, bias, targets, temperature, kept_ids, kept_offsets = ctx.saved_tensors
    needs = [bool(need) for need in ctx.needs_input_grad[:3]]
    found = linear_gradient_op(
        hidden,
        weight,
        bias,
        targets,
        temperature,
        ctx.softcap,
        kept_ids,
        kept_offsets,
        dscore_3T.contiguous(),
        needs,
        *ctx.options,
    )
    return (*(g if need else None for g, need in zip(found, needs, strict=True)), *[None] * 9)


linear_scores_op.register_autograd(_scores_backward, setup_context=_save_scores)


@torch.library.custom_op("flowkernels::linear_gradient", mutates_args=())
def linear_gradient_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    softcap: float,
    kept_ids: Tensor | None,
    kept_offsets: Tensor | None,
    dscore: Tensor,
    needs: Sequence[bool],
    fp32_logits: bool,
    chunk_rows: int,
    batch_invariant: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by hidden, weight and bias; an empty tensor for each that is not needed."""
    head = Head(weight, bias, fp32_logits, chunk_rows, batch_invariant)
    gradients = Gradients.empty(hidden, head, needs)
    rows = make_rows(hidden, targets, temperature, softcap, kept_ids, kept_offsets)
    walk_gradient(head, rows, dscore[0], dscore[1], gradients, impl)
    return as_outputs(gradients, hidden)


def _fake_gradients(
    hidden: Tensor, weight: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulator_dtype(hidden.dtype)
    empty = hidden.new_empty((0,))
    return (
        torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs[0] else empty,
        weight.new_empty(weight.shape, dtype=dtype) if needs[1] else empty.clone(),
        weight.new_empty((weight.shape[0],), dtype=dtype) if needs[2] else empty.clone(),
    )


@linear_gradient_op.register_fake
def _(hidden: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_gradients(hidden, weight, arguments[7])


@torch.library.custom_op("flowkernels::linear_policy_loss", mutates_args=())
def linear_loss_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    advantage: Tensor,
    token_weight: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
    cu_seqlens: Tensor | None,
    temperature: Tensor,
    softcap: float,
    kept_ids: Tensor | None,
    kept_offsets: Tensor | None,
    spec: str,
    needs: Sequence[bool],
    compact: bool,
    fp32_logits: bool,
    chunk_rows: int,
    batch_invariant: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, gradients by hidden, weight and bias or empty tensors, columns, statistics)."""
    head = Head(weight, bias, fp32_logits, chunk_rows, batch_invariant)
    gradients = Gradients.empty(hidden, head, needs)
    rows = make_rows(hidden, targets, temperature, softcap, kept_ids, kept_offsets)
    tokens = Tokens(token_weight, token_weight, advantage, token_weight, old, ref, None, cu_seqlens)
    column_7T = LossWalk(
        head, rows, tokens, decode(spec), gradients if any(needs) else None, impl, compact
    ).run()
    loss, stats = statistics.reduce(column_7T, token_weight, targets, impl)
    return loss, *as_outputs(gradients, hidden), column_7T, stats


@linear_loss_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((), dtype=torch.float32)
    column_7T = hidden.new_empty((NUM_COLUMNS, hidden.shape[0]), dtype=torch.float32)
    stats = hidden.new_empty((statistics.NUM_STATISTICS,), dtype=torch.float32)
    return loss, *_fake_gradients(hidden, weight, arguments[12]), column_7T, stats


def _save_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.needs = inputs[14]
    ctx.save_for_backward(*output[1:4])


def _loss_backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Any, ...]:
    found = [
        scaled(gradient, dloss) if need else None
        for gradient, need in zip(ctx.saved_tensors, ctx.needs, strict=True)
    ]
    return (*found, *[None] * 17)


linear_loss_op.register_autograd(_loss_backward, setup_context=_save_loss)


def as_outputs(gradients: Gradients, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found = (gradients.hidden_TD, gradients.weight_VD, gradients.bias_V)
    hidden_g, weight_g, bias_g = (hidden.new_empty((0,)) if g is None else g for g in found)
    return hidden_g, weight_g, bias_g
