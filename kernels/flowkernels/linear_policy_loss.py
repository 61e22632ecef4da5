"""Policy losses straight from hidden states; `lm_head.py` has the maths and the walk over chunks.

Three products of 2 T D V FLOPs where the gradient can be formed while a chunk's logits are at hand:
every `LossSpec`, GSPO with its sequences kept within a chunk. A sequence longer than a chunk and a
loss of one's own take the logits twice: four products. T: target tokens, D: hidden size, V:
vocabulary, S: sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from flowkernels.arguments import check_targets, check_token_inputs
from flowkernels.implementations import resolve_impl
from flowkernels.linear_logprobs import linear_scores
from flowkernels.lm_head import HEAD, OPTIONS, Gradients, LMHead, new_head
from flowkernels.loss_spec import LossSpec
from flowkernels.loss_walk import LossWalk, resolve_compact, without_zero_advantage
from flowkernels.plain_tensors import plain_head
from flowkernels.policy_loss import (
    HandOver,
    PolicyLoss,
    add_slopes,
    fake_results,
    register_gradients,
    scale_,
    scored_loss,
)
from flowkernels.targets import TARGETS, SamplingMask, Targets, unflatten
from flowkernels.token_loss import (
    INPUTS,
    TokenInputs,
    TokenLossFn,
    unflatten_inputs,
)
from flowkernels.vocab_parallel import VocabParallel


@torch.library.custom_op(
    "flowkernels::linear_policy_loss",
    mutates_args=(),
    schema=f"({HEAD}, {TARGETS}, {INPUTS}, bool[] needs, str compact, {OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _linear_loss_op(hidden: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """(loss, gradients by hidden, weight and bias or empty tensors, columns, statistics)."""
    weight, bias, *flat, needs, compact = arguments[:-4]
    *options, impl = arguments[-4:]
    head, (spec, inputs) = LMHead(weight, bias, *options), unflatten_inputs(*flat[5:])
    walk = LossWalk(head, hidden, unflatten(*flat[:5]), inputs, spec, impl, compact)
    loss, gradients, column_7T, stats = walk.run(needs)
    return loss, *gradients.as_outputs(hidden), column_7T, stats


@_linear_loss_op.register_fake
def _(hidden: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    weight, bias, *_, needs, _compact = arguments[:-4]
    head = LMHead(weight, bias, *arguments[-4:-1])
    loss, *results = fake_results(hidden)
    return loss, *Gradients.empty(hidden, head, needs).as_outputs(hidden), *results


register_gradients(_linear_loss_op)


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
    logit_scale: float | None = None,
    sampling_mask: SamplingMask | None = None,
    fp32_logits: bool = False,
    memory_budget: int | None = None,
    batch_invariant: bool = False,
    shard: VocabParallel | None = None,
    weight_grad_VD: Tensor | None = None,
    compact: bool | Literal["call", "chunks"] = True,
    skip_zero_advantage: bool = False,
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
        compact: leave rows without gradient out of the products, which is exact. The host waits
            for the device to learn how many are left. "call": once, and rows that do not count
            (weight 0, a negative target) are left out of all three. "chunks": once more for each
            chunk, and rows that turn out to have none (clipped, no advantage) are left out of the
            last two. True: "chunks" on a CPU, "call" elsewhere. False: no row is left out, and
            nobody waits, so that a CUDA graph can capture the call; but for a function as `spec`,
            and for "gspo" with more tokens than a chunk has rows, which must know its sequences.
        skip_zero_advantage: tokens of advantage 0 count as if their weight were 0 where that leaves
            the loss as it is: no KL and no entropy term, and for "gspo" a whole sequence of such.
            They take part in no product; their log-prob and entropy are 0 and no statistic has
            them.
        The others: as for `policy_loss`.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
        RuntimeError: a second backward pass through one loss, as for `policy_loss`.
    """
    flat_TD, whole_VD, whole_V = plain_head(
        hidden_TD, weight_VD, bias_V, is_shard=shard is not None
    )
    head = new_head(
        flat_TD,
        whole_VD,
        whole_V,
        fp32_logits=fp32_logits,
        memory_budget=memory_budget,
        batch_invariant=batch_invariant,
        shard=shard,
    )
    targets = check_targets(
        hidden_TD, head.num_vocab, target_ids_T, temperature, softcap, logit_scale, sampling_mask
    )
    inputs = TokenInputs(
        advantage_T=advantage_T,
        weight_T=weight_T,
        old_logprob_T=old_logprob_T,
        ref_logprob_T=ref_logprob_T,
        sampler_logprob_T=sampler_logprob_T,
        cu_seqlens_S1=cu_seqlens_S1,
    )
    inputs = check_token_inputs(spec, inputs, targets, target_ids_T.shape)
    impl = resolve_impl(impl, flat_TD.device, flat_TD.dtype)
    _check_eager(spec, weight_VD, sampling_mask, shard, weight_grad_VD)
    if not isinstance(spec, LossSpec):
        if skip_zero_advantage:
            raise ValueError("skip_zero_advantage does not work with a loss of one's own")
        out = _two_passes(head, flat_TD, targets, spec, inputs, impl)
        return out.view(target_ids_T.shape)
    inputs = inputs.corrected(spec)
    if skip_zero_advantage:
        inputs = without_zero_advantage(spec, inputs)
    how = resolve_compact(compact, flat_TD.device)
    out = _run(LossWalk(head, flat_TD, targets, inputs, spec, impl, how), weight_grad_VD)
    return out.view(target_ids_T.shape)


def _run(walk: LossWalk, weight_grad_VD: Tensor | None) -> PolicyLoss:
    """The loss of a `LossSpec`, inside the operator where that can express it."""
    head = walk.head
    wanted = (walk.hidden_TD, head.weight_VD, head.bias_V)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in wanted]
    if head.shard is not None or weight_grad_VD is not None:
        return _outside_operator(walk, needs, weight_grad_VD)
    flat = (*walk.targets.flat(), *walk.inputs.flat(), walk.spec.encoded)
    results = _linear_loss_op(*wanted, *flat, needs, walk.compact, *head.options(walk.impl))
    return PolicyLoss.of(results[0], *results[-2:])


def _outside_operator(
    walk: LossWalk, needs: Sequence[bool], weight_grad_VD: Tensor | None
) -> PolicyLoss:
    """The loss outside an operator, which can express neither collectives of a group nor a gradient
    that is added to a buffer of the caller's.
    """
    head, shard = walk.head, walk.head.shard
    with torch.no_grad():
        # Ranks of a shard must walk the same rows, which they do: all of them know what makes a row
        # active.
        loss, gradients, column_7T, stats = walk.run(needs, weight_grad_VD)
        if shard is not None and gradients.hidden_TD is not None:
            dist.all_reduce(gradients.hidden_TD, group=shard.group)
    weight_VD = gradients.weight_VD if weight_grad_VD is None else None
    found = [gradients.hidden_TD, weight_VD, gradients.bias_V]
    loss = HandOver.apply(loss, found, walk.hidden_TD, head.weight_VD, head.bias_V)
    if weight_grad_VD is not None and loss.requires_grad:
        loss.register_hook(functools.partial(_check_factor, weight_grad_VD))
    return PolicyLoss.of(loss, column_7T, stats)


def _check_factor(weight_grad_VD: Tensor, dloss: Tensor) -> None:
    """Refuse an upstream factor that came too late for what is in the buffer already."""
    if not dloss.is_cuda and float(dloss) != 1.0:
        raise ValueError(f"weight_grad_VD needs an upstream factor of 1, got {float(dloss)}")
    scale_(weight_grad_VD, torch.where(dloss == 1, dloss, torch.nan))


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
