"""Log-probabilities straight from hidden states; `lm_head.py` has the maths and the walk over
chunks.

The forward pass takes one product of 2 T D V FLOPs; with `differentiable=True` the gradient
computes the logits once more: four products in all. T: target tokens, D: hidden size, V:
vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowkernels.arguments import check_targets, dtype_of_results
from flowkernels.implementations import resolve_impl
from flowkernels.lm_head import (
    HEAD,
    OPTIONS,
    Gradients,
    LMHead,
    new_head,
    walk_gradient,
    walk_scores,
)
from flowkernels.logprobs import LogProbs, Score, to_logprobs
from flowkernels.plain_tensors import plain_head
from flowkernels.targets import TARGETS, SamplingMask, Slopes, Targets, unflatten


@torch.library.custom_op(
    "flowkernels::linear_scores",
    mutates_args=(),
    schema=f"({HEAD}, {TARGETS}, {OPTIONS}) -> Tensor",
)
def _linear_scores_op(hidden: Tensor, *arguments: Any) -> Tensor:
    """Return `score_3T`, differentiable by hidden, weight and bias in log-prob and entropy."""
    weight, bias, *flat, impl = arguments
    head = LMHead(weight, bias, *flat[5:])
    return walk_scores(head, hidden, unflatten(*flat[:5]), impl)


@_linear_scores_op.register_fake
def _(hidden: Tensor, *_: Any) -> Tensor:
    return hidden.new_empty((Score.NUM, hidden.shape[0]), dtype=dtype_of_results(hidden.dtype))


def _save_scores(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.softcap, mask_ids, mask_offsets = inputs[:8]
    ctx.options = inputs[8:]
    ctx.save_for_backward(*tensors, mask_ids, mask_offsets)


def _scores_backward(ctx: Any, dscore_3T: Tensor) -> tuple[Any, ...]:
    *tensors, mask_ids, mask_offsets = ctx.saved_tensors
    needs = [bool(need) for need in ctx.needs_input_grad[:3]]
    flat = (*tensors, ctx.softcap, mask_ids, mask_offsets)
    gradients = _linear_gradient_op(*flat, dscore_3T.contiguous(), needs, *ctx.options)
    return (*(g if need else None for g, need in zip(gradients, needs, strict=True)), *[None] * 9)


_linear_scores_op.register_autograd(_scores_backward, setup_context=_save_scores)


@torch.library.custom_op(
    "flowkernels::linear_gradient",
    mutates_args=(),
    schema=f"({HEAD}, {TARGETS}, Tensor dscore, bool[] needs, {OPTIONS})"
    " -> (Tensor, Tensor, Tensor)",
)
def _linear_gradient_op(hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by hidden, weight and bias; an empty tensor where none is needed."""
    weight, bias, *flat, dscore, needs = arguments[:-4]
    head, impl = LMHead(weight, bias, *arguments[-4:-1]), arguments[-1]
    gradients = Gradients.empty(hidden, head, needs)
    slopes = Slopes(*dscore.unbind())
    walk_gradient(head, hidden, unflatten(*flat), slopes, gradients=gradients, impl=impl)
    return gradients.as_outputs(head)


@_linear_gradient_op.register_fake
def _(hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    weight, bias, *_, needs = arguments[:-4]
    head = LMHead(weight, bias, *arguments[-4:-1])
    return Gradients.empty(hidden, head, needs).as_outputs(head)


def linear_scores(head: LMHead, hidden_TD: Tensor, targets: Targets, impl: str) -> Tensor:
    """Call `walk_scores` as an operator."""
    score_3T: Tensor = _linear_scores_op(
        hidden_TD, head.weight_VD, head.bias_V, *targets.flat(), *head.options(impl)
    )
    return score_3T


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
    differentiable: bool = False,
    impl: str = "auto",
) -> LogProbs:
    """Return `logprobs` of the logits hidden @ weight^T + bias, with at most one chunk of logits in
    memory.

    Args:
        hidden_TD: [T, D] fp32, bf16, fp16 or fp64; a batch [B, L, D] takes [B, L] for every [T].
        weight_VD: [V, D] of the same dtype. Under torch.autocast, tensors of unlike dtypes are cast
            to autocast's, and gradients back to theirs; tensors of equal dtypes are not cast. All
            ranks of a DTensor gather it, and its gradient is their mean, as in FSDP2.
        bias_V: [V] of the same dtype, or a DTensor too.
        fp32_logits: keep the logits of a 16-bit head in fp32, so that only the rounding of the
            operands affects the log-probs.
        memory_budget: bytes for logits; by default 4096 rows on a GPU and 2^23 logits on a CPU, or
            all rows if the head is trained and a single chunk takes no more memory.
        differentiable: allow gradients of `logprob_T` and `entropy_T` with respect to hidden,
            weight and bias; the backward pass computes the logits once more.
        target_ids_T, temperature, softcap, sampling_mask, impl: as for `logprobs`.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    flat_TD, weight_VD, bias_V = plain_head(hidden_TD, weight_VD, bias_V)
    head = new_head(
        flat_TD, weight_VD, bias_V, fp32_logits=fp32_logits, memory_budget=memory_budget
    )
    targets = check_targets(
        hidden_TD, len(weight_VD), target_ids_T, temperature, softcap, sampling_mask
    )
    impl = resolve_impl(impl, flat_TD.device, flat_TD.dtype)
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        score_3T = linear_scores(head, flat_TD, targets, impl)
    return to_logprobs(score_3T).view(target_ids_T.shape)
