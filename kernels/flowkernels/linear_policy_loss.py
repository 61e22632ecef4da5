"""Policy losses straight from hidden states; `lm_head.py` has the maths and the walk over chunks.

Three products of 2 T D V FLOPs where the gradient can be formed while a chunk's logits are at hand:
every `LossSpec`, GSPO with its sequences kept within a chunk. A sequence longer than a chunk and a
loss of one's own take the logits twice: four products. T: target tokens, D: hidden size, V:
vocabulary, S: sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowkernels import statistics
from flowkernels.arguments import check_targets, check_token_inputs, resolve_impl
from flowkernels.linear_logprobs import fake_gradients, linear_scores
from flowkernels.lm_head import Gradients, LMHead, LossWalk, new_head
from flowkernels.policy_loss import (
    PolicyLoss,
    add_slopes,
    fake_results,
    scale_op,
    scaled,
    scored_loss,
)
from flowkernels.targets import SamplingMask, Targets, unflatten
from flowkernels.token_loss import LossSpec, TokenInputs, TokenLossFn, decode
from flowkernels.vocab_parallel import VocabParallel


@torch.library.custom_op("flowkernels::linear_policy_loss", mutates_args=())
def _linear_loss_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    softcap: float | None,
    mask_ids: Tensor | None,
    mask_offsets: Tensor | None,
    advantage: Tensor,
    token_weight: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
    cu_seqlens: Tensor | None,
    spec: str,
    needs: Sequence[bool],
    compact: bool,
    fp32_logits: bool,
    chunk_rows: int,
    batch_invariant: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, gradients by hidden, weight and bias or empty tensors, columns, statistics)."""
    head = LMHead(weight, bias, fp32_logits, chunk_rows, batch_invariant)
    gradients = Gradients.empty(hidden, head, needs)
    inputs = TokenInputs(
        advantage_T=advantage,
        weight_T=token_weight,
        old_logprob_T=old,
        ref_logprob_T=ref,
        cu_seqlens_S1=cu_seqlens,
    )
    column_7T = LossWalk(
        head=head,
        hidden_TD=hidden,
        targets=unflatten(targets, temperature, softcap, mask_ids, mask_offsets),
        inputs=inputs,
        spec=decode(spec),
        gradients=gradients if any(needs) else None,
        impl=impl,
        compact=compact,
    ).run()
    loss, stats = statistics.reduce(column_7T, token_weight, targets, impl)
    return loss, *gradients.as_outputs(hidden), column_7T, stats


@_linear_loss_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss, column_7T, stats = fake_results(hidden, hidden.shape[0])
    return loss, *fake_gradients(hidden, weight, arguments[12]), column_7T, stats


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.needs = inputs[14]
    ctx.save_for_backward(*output[1:4])


def _backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Any, ...]:
    found = zip(ctx.saved_tensors, ctx.needs, strict=True)
    return (*(scaled(g, dloss) if need else None for g, need in found), *[None] * 17)


_linear_loss_op.register_autograd(_backward, setup_context=_save_gradients)


class _Eager(torch.autograd.Function):
    """The loss outside an operator, which can express neither collectives of a group nor a gradient
    that is added to a buffer of the caller's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        walk: LossWalk,
        needs: Sequence[bool],
        weight_grad_VD: Tensor | None,
    ) -> tuple[Tensor, ...]:
        gradients = Gradients.empty(hidden_TD, walk.head, needs, weight_grad_VD)
        # Ranks of a shard must walk the same rows, which they do: all of them know what makes a row
        # active.
        column_7T = replace(walk, gradients=gradients if any(needs) else None).run()
        shard = walk.head.shard
        if shard is not None and gradients.hidden_TD is not None:
            dist.all_reduce(gradients.hidden_TD, group=shard.group)
        loss, stats = statistics.reduce(
            column_7T, walk.inputs.weight_T, walk.targets.ids_T, walk.impl
        )
        ctx.gradients = gradients
        ctx.weight_grad_VD = weight_grad_VD
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
        return (*found, *[None] * 3)


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
    """Return `policy_loss` of the logits hidden @ weight^T + bias, with the gradients of hidden,
    weight and bias formed chunk by chunk.

    Args:
        hidden_TD, weight_VD, bias_V, fp32_logits, memory_budget, batch_invariant, shard: as for
            `linear_logprobs`. A gradient that none of the three tensors needs costs nothing: a
            frozen head spares the third product. The gradient of the weight is summed in fp32. With
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
    head = new_head(
        hidden_TD,
        weight_VD,
        bias_V,
        fp32_logits=fp32_logits,
        memory_budget=memory_budget,
        batch_invariant=batch_invariant,
        shard=shard,
    )
    targets = check_targets(
        hidden_TD, head.num_vocab, target_ids_T, temperature, softcap, sampling_mask
    )
    inputs = TokenInputs(
        advantage_T=advantage_T,
        weight_T=weight_T,
        old_logprob_T=old_logprob_T,
        ref_logprob_T=ref_logprob_T,
        sampler_logprob_T=sampler_logprob_T,
        cu_seqlens_S1=cu_seqlens_S1,
    )
    inputs = check_token_inputs(spec, inputs, targets)
    impl = resolve_impl(impl, hidden_TD.device, hidden_TD.dtype)
    _check_eager(spec, weight_VD, sampling_mask, shard, weight_grad_VD)
    if not isinstance(spec, LossSpec):
        return _two_passes(head, hidden_TD, targets, spec, inputs, impl)
    walk = LossWalk(
        head=head,
        hidden_TD=hidden_TD,
        targets=targets,
        inputs=inputs.corrected(spec),
        spec=spec,
        gradients=None,
        impl=impl,
        compact=compact,
    )
    wanted = (hidden_TD, weight_VD, bias_V)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in wanted]
    if shard is not None or weight_grad_VD is not None:
        loss, column_7T, stats = _Eager.apply(*wanted, walk, needs, weight_grad_VD)
        return PolicyLoss.of(loss, column_7T, stats)
    return _in_operator(walk, needs)


def _in_operator(walk: LossWalk, needs: Sequence[bool]) -> PolicyLoss:
    head, inputs = walk.head, walk.inputs
    of_tokens = (
        inputs.advantage_T,
        inputs.weight_T,
        inputs.old_logprob_T,
        inputs.ref_logprob_T,
        inputs.cu_seqlens_S1,
    )
    options = (head.fp32_logits, head.chunk_rows, head.batch_invariant, walk.impl)
    loss, _, _, _, column_7T, stats = _linear_loss_op(
        walk.hidden_TD,
        head.weight_VD,
        head.bias_V,
        *walk.targets.flat(),
        *of_tokens,
        walk.spec.encoded,
        needs,
        walk.compact,
        *options,
    )
    return PolicyLoss.of(loss, column_7T, stats)


def _two_passes(
    head: LMHead,
    hidden_TD: Tensor,
    targets: Targets,
    spec: TokenLossFn,
    inputs: TokenInputs,
    impl: str,
) -> PolicyLoss:
    """The loss of a function that sees all tokens: scores, their loss in torch, then the logits
    once more for the gradient.
    """
    counts_T = (inputs.weight_T != 0) & (targets.ids_T >= 0)
    targets = replace(targets, ids_T=torch.where(counts_T, targets.ids_T, -1))
    score_3T = linear_scores(head, hidden_TD, targets, impl)
    loss, column_7T, stats, slopes = scored_loss(spec, inputs, score_3T, targets.ids_T)
    loss = add_slopes(loss, score_3T, slopes) if score_3T.requires_grad else loss
    return PolicyLoss.of(loss, column_7T, stats)


def _check_eager(
    spec: LossSpec | TokenLossFn,
    weight_VD: Tensor,
    sampling_mask: SamplingMask | None,
    shard: VocabParallel | None,
    weight_grad_VD: Tensor | None,
) -> None:
    """Check what a shard and a buffer for the gradient do not work with."""
    if shard is not None and sampling_mask is not None:
        raise ValueError("sampling_mask does not work with a shard")
    if not isinstance(spec, LossSpec) and (shard is not None or weight_grad_VD is not None):
        raise ValueError("a loss of one's own works neither with a shard nor with weight_grad_VD")
    if weight_grad_VD is None:
        return
    is_fp32 = weight_grad_VD.dtype == torch.float32
    if weight_grad_VD.shape != weight_VD.shape or not (is_fp32 and weight_grad_VD.is_contiguous()):
        given = f"{weight_grad_VD.dtype} {tuple(weight_grad_VD.shape)}"
        raise ValueError(
            f"weight_grad_VD must be contiguous float32 {list(weight_VD.shape)}, got {given}"
        )
    if not weight_VD.requires_grad:
        raise ValueError(
            "weight_grad_VD needs a weight_VD that requires a gradient, got a frozen one"
        )
