"""Log-probabilities and policy losses straight from hidden states: the public functions.

Three products of 2 T D V FLOPs where the gradient can be formed while a chunk's logits are at hand:
every `LossSpec`, GSPO with its sequences kept within a chunk. A sequence longer than a chunk, a
loss of one's own, and `linear_logprobs(differentiable=True)` take the logits twice: four products.
T: target tokens, D: hidden size, V: vocabulary, S: sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowkernels import statistics
from flowkernels.arguments import (
    check_head,
    check_targets,
    check_token_inputs,
    chunk_rows,
    resolve_impl,
)
from flowkernels.head import Gradients, Head
from flowkernels.linear_ops import LossWalk, linear_loss_op, linear_scores_op, walk_scores
from flowkernels.policy_loss import LogProbs, PolicyLoss, add_slopes, evaluate
from flowkernels.row_loss import scale_op
from flowkernels.rows import Rows, SamplingMask
from flowkernels.shards import VocabParallel
from flowkernels.token_loss import LossSpec, TokenLossFn, Tokens, correct_for_sampler


def linear_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_ids_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    sampling_mask: SamplingMask | None = None,
    fp32_logits: bool = False,
    memory_budget: int | None = None,
    batch_invariant: bool = False,
    shard: VocabParallel | None = None,
    differentiable: bool = False,
    impl: str = "auto",
) -> LogProbs:
    """`logprobs` of the logits hidden @ weight^T + bias, of which no more than a chunk exists at a
    time.

    Args:
        hidden_TD: [T, D] fp32, bf16, fp16 or fp64.
        weight_VD: [V, D] of the same dtype; with `shard`, this rank's part of it.
        bias_V: [V] of the same dtype.
        fp32_logits: keep the logits of a 16-bit head in fp32: log-probs then carry the rounding of
            the operands alone.
        memory_budget: bytes for logits (of the whole vocabulary, also with a shard); by default
            4096 rows on a GPU and 32 MB on a CPU.
        batch_invariant: a row's results shall depend neither on the other rows nor on how many
            there are. Each product then takes a chunk of one size, filled up with zeros: 4096 rows
            on a GPU, 256 on a CPU, or the fewer that `memory_budget` holds; a row alone pays for
            all of them. Compare only what was computed with one budget and one number of threads.
            It holds as far as the library's order of summation goes by the shape and not by where
            in it a row stands. Found so of fp32, bf16 and fp16 with MKL and oneDNN on x86; not of
            fp64, which is refused; not measured on a GPU. What is summed over rows (the loss, the
            gradients of weight and bias) does depend on the batch, and sums over a `shard` go by
            their library.
        shard: the head is spread over a process group; collective, and the same on all ranks but
            for the part of the weight.
        differentiable: let gradients of `logprob_T` and `entropy_T` reach hidden, weight and bias,
            by computing the logits once more.
        target_ids_T, temperature, softcap, sampling_mask, impl: as for `logprobs`.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    rows, head, impl = _prepare(
        hidden_TD,
        weight_VD,
        target_ids_T,
        bias_V,
        temperature,
        softcap,
        sampling_mask,
        fp32_logits,
        memory_budget,
        batch_invariant,
        shard,
        impl,
    )
    needs_gradient = differentiable and torch.is_grad_enabled()
    if shard is not None:
        if needs_gradient:
            raise ValueError(
                "differentiable=True does not work with a shard; linear_policy_loss does"
            )
        with torch.no_grad():
            score_3T = walk_scores(head, rows, impl)
    else:
        with torch.set_grad_enabled(needs_gradient):
            score_3T = _scores(rows, head, impl)
    logprob_T, entropy_T, lse_T = score_3T.unbind()
    return LogProbs(logprob_T, entropy_T, lse_T.detach())


def linear_policy_loss(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_ids_T: Tensor,
    *,
    spec: LossSpec | TokenLossFn,
    advantage_T: Tensor,
    weight_T: Tensor,
    bias_V: Tensor | None = None,
    old_logprob_T: Tensor | None = None,
    ref_logprob_T: Tensor | None = None,
    sampler_logprob_T: Tensor | None = None,
    cu_seqlens_S1: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    sampling_mask: SamplingMask | None = None,
    fp32_logits: bool = False,
    memory_budget: int | None = None,
    batch_invariant: bool = False,
    shard: VocabParallel | None = None,
    weight_grad_VD: Tensor | None = None,
    compact: bool = True,
    impl: str = "auto",
) -> PolicyLoss:
    """`policy_loss` of the logits hidden @ weight^T + bias, with the gradients of hidden, weight
    and bias formed chunk by chunk.

    Args:
        hidden_TD, weight_VD, bias_V, fp32_logits, memory_budget, batch_invariant, shard: as for
            `linear_logprobs`. Whichever of the three tensors needs no gradient costs none: a frozen
            head spares the third product. The gradient of the weight is summed in fp32. With
            `shard`, that of hidden is summed over the group.
        weight_grad_VD: fp32 [V, D] that the gradient of the weight, which must require one, is
            added to at once, instead of being handed to autograd; under torch.no_grad nothing is
            added. The loss must then be the end of the graph (an upstream factor of 1); with any
            other the buffer is poisoned with NaN, on a CPU an error.
        compact: leave rows without gradient (weight 0, clipped, no advantage) out of the products.
            Exact; the GPU is waited for once per chunk to learn how many there are.
        The others: as for `policy_loss`.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
        RuntimeError: a second backward pass through one loss.
    """
    rows, head, impl = _prepare(
        hidden_TD,
        weight_VD,
        target_ids_T,
        bias_V,
        temperature,
        softcap,
        sampling_mask,
        fp32_logits,
        memory_budget,
        batch_invariant,
        shard,
        impl,
    )
    tokens = check_token_inputs(
        spec,
        rows,
        advantage_T,
        weight_T,
        old_logprob_T,
        ref_logprob_T,
        sampler_logprob_T,
        cu_seqlens_S1,
    )
    if not isinstance(spec, LossSpec):
        if shard is not None or weight_grad_VD is not None:
            raise ValueError(
                "a loss of one's own works neither with a shard nor with weight_grad_VD"
            )
        return _two_passes(rows, head, spec, tokens, impl)
    advantage_T, weight_T = correct_for_sampler(
        spec, tokens.advantage_T, tokens.weight_T, tokens.old_logprob_T, tokens.sampler_logprob_T
    )
    tokens = Tokens(
        weight_T,
        weight_T,
        advantage_T,
        weight_T,
        tokens.old_logprob_T,
        tokens.ref_logprob_T,
        None,
        tokens.cu_seqlens_S1,
    )
    wanted = (hidden_TD, weight_VD, bias_V)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in wanted]
    if weight_grad_VD is not None:
        _check_weight_grad(weight_grad_VD, weight_VD)
    if shard is not None or weight_grad_VD is not None:
        loss, column_7T, stats = _Eager.apply(
            *wanted, rows, head, spec, tokens, needs, weight_grad_VD, compact, impl
        )
    else:
        kept_ids, kept_offsets = (
            (None, None)
            if sampling_mask is None
            else (sampling_mask.token_ids_K, sampling_mask.offsets_T1)
        )
        of_tokens = (
            rows.target_ids_T,
            advantage_T,
            weight_T,
            tokens.old_logprob_T,
            tokens.ref_logprob_T,
            tokens.cu_seqlens_S1,
        )
        of_rows = (rows.temperature_T, rows.softcap, kept_ids, kept_offsets)
        options = (
            spec.encoded,
            needs,
            compact,
            fp32_logits,
            head.chunk_rows,
            batch_invariant,
            impl,
        )
        loss, _, _, _, column_7T, stats = linear_loss_op(*wanted, *of_tokens, *of_rows, *options)
    return PolicyLoss(
        loss, column_7T[1].detach(), column_7T[2].detach(), statistics.by_name(stats.detach())
    )


def _two_passes(rows: Rows, head: Head, spec: TokenLossFn, tokens: Tokens, impl: str) -> PolicyLoss:
    """A loss that sees all tokens: scores, their loss in torch, then the logits once more for the
    gradient.
    """
    counts_T = (tokens.weight_T != 0) & (rows.target_ids_T >= 0)
    ids_T = torch.where(counts_T, rows.target_ids_T, -1)
    score_3T = _scores(
        Rows(rows.logits_TV, ids_T, rows.temperature_T, rows.softcap, rows.sampling_mask),
        head,
        impl,
    )
    loss, column_7T, stats, slopes = evaluate(spec, tokens, score_3T, ids_T)
    loss = add_slopes(loss, score_3T, slopes) if score_3T.requires_grad else loss
    return PolicyLoss(loss, column_7T[1], column_7T[2], statistics.by_name(stats))


def _scores(rows: Rows, head: Head, impl: str) -> Tensor:
    kept_ids, kept_offsets = (
        (None, None)
        if rows.sampling_mask is None
        else (rows.sampling_mask.token_ids_K, rows.sampling_mask.offsets_T1)
    )
    of_rows = (rows.target_ids_T, rows.temperature_T, rows.softcap, kept_ids, kept_offsets)
    options = (head.fp32_logits, head.chunk_rows, head.batch_invariant, impl)
    score_3T: Tensor = linear_scores_op(
        rows.hidden_TD, head.weight_VD, head.bias_V, *of_rows, *options
    )
    return score_3T


class _Eager(torch.autograd.Function):
    """What an operator cannot express: collectives of a group, and a gradient that is added to a
    buffer of the caller's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        rows: Rows,
        head: Head,
        spec: LossSpec,
        tokens: Tokens,
        needs: Sequence[bool],
        weight_grad_VD: Tensor | None,
        compact: bool,
        impl: str,
    ) -> tuple[Tensor, ...]:
        gradients = Gradients.empty(hidden_TD, head, needs, weight_grad_VD)
        # Ranks of a shard must walk the same rows, which they do: what makes a row active is known
        # to all of them.
        column_7T = LossWalk(
            head, rows, tokens, spec, gradients if any(needs) else None, impl, compact
        ).run()
        if head.shard is not None and gradients.hidden_TD is not None:
            dist.all_reduce(gradients.hidden_TD, group=head.shard.group)
        loss, stats = statistics.reduce(column_7T, tokens.weight_T, rows.target_ids_T, impl)
        ctx.gradients, ctx.weight_grad_VD = gradients, weight_grad_VD
        ctx.mark_non_differentiable(column_7T, stats)
        ctx.set_materialize_grads(False)
        return loss, column_7T, stats

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Any, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the gradient of a linear_policy_loss was taken twice; it is handed over at the "
                "first backward pass"
            )
        gradients, ctx.gradients = ctx.gradients, None
        if ctx.weight_grad_VD is not None:
            gradients.weight_VD = None
            if not dloss.is_cuda and float(dloss) != 1.0:
                raise ValueError(
                    f"weight_grad_VD needs an upstream factor of 1, got {float(dloss)}"
                )
            scale_op(ctx.weight_grad_VD, torch.where(dloss == 1, dloss, torch.nan))
        found = [gradients.hidden_TD, gradients.weight_VD, gradients.bias_V]
        for gradient in found:
            if gradient is not None:
                scale_op(gradient, dloss)
        return (*found, *[None] * 8)


def _prepare(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_ids_T: Tensor,
    bias_V: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    sampling_mask: SamplingMask | None,
    fp32_logits: bool,
    memory_budget: int | None,
    batch_invariant: bool,
    shard: VocabParallel | None,
    impl: str,
) -> tuple[Rows, Head, str]:
    """The arguments, checked."""
    check_head(hidden_TD, weight_VD, bias_V)
    if shard is not None and sampling_mask is not None:
        raise ValueError("sampling_mask does not work with a shard")
    num_vocab = len(weight_VD) if shard is None else shard.num_vocab
    rows = check_targets(hidden_TD, num_vocab, target_ids_T, temperature, softcap, sampling_mask)
    size = chunk_rows(
        memory_budget, hidden_TD, num_vocab, fp32_logits, batch_invariant
    )  # the same on all ranks of a shard
    return (
        rows,
        Head(weight_VD, bias_V, fp32_logits, size, batch_invariant, shard),
        resolve_impl(impl, hidden_TD.device, hidden_TD.dtype),
    )


def _check_weight_grad(weight_grad_VD: Tensor, weight_VD: Tensor) -> None:
    if (
        weight_grad_VD.shape != weight_VD.shape
        or weight_grad_VD.dtype != torch.float32
        or not weight_grad_VD.is_contiguous()
    ):
        wanted, given = list(weight_VD.shape), (weight_grad_VD.dtype, tuple(weight_grad_VD.shape))
        raise ValueError(
            f"weight_grad_VD must be contiguous float32 {wanted}, got {given[0]} {given[1]}"
        )
    if not weight_VD.requires_grad:
        raise ValueError(
            "weight_grad_VD needs a weight_VD that requires a gradient, got a frozen one"
        )
