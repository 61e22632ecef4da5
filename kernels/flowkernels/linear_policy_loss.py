"""Policy losses straight from hidden states; `lm_head.py` has the maths and the walk over chunks.

Three products of 2 T D V FLOPs where the gradient can be formed while a chunk's logits are at hand:
every `LossSpec`, GSPO with its sequences kept within a chunk. A sequence longer than a chunk and a
custom loss compute the logits twice: four products. T: target tokens, D: hidden size, V:
vocabulary, S: sequences.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from flowkernels.arguments import check_targets, check_token_inputs
from flowkernels.implementations import resolve_impl
from flowkernels.linear_logprobs import linear_scores
from flowkernels.lm_head import HEAD, OPTIONS, Gradients, LMHead, new_head
from flowkernels.loss_spec import LossSpec
from flowkernels.loss_walk import LossWalk, resolve_compact
from flowkernels.plain_tensors import plain_head
from flowkernels.policy_loss import (
    PolicyLoss,
    add_slopes,
    fake_results,
    register_gradients,
    scored_loss,
)
from flowkernels.targets import TARGETS, SamplingMask, Targets, unflatten
from flowkernels.token_loss import INPUTS, TokenInputs, TokenLossFn, unflatten_inputs


@torch.library.custom_op(
    "flowkernels::linear_policy_loss",
    mutates_args=(),
    schema=f"({HEAD}, {TARGETS}, {INPUTS}, bool[] needs, str compact, {OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _linear_loss_op(hidden: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return (loss, gradients by hidden, weight and bias or empty tensors, columns, statistics)."""
    weight, bias, *flat, needs, compact = arguments[:-4]
    *options, impl = arguments[-4:]
    head, (spec, inputs) = LMHead(weight, bias, *options), unflatten_inputs(*flat[5:])
    walk = LossWalk(head, hidden, unflatten(*flat[:5]), inputs, spec, impl, compact)
    loss, gradients, column_7T, stats = walk.run(needs)
    return loss, *gradients.as_outputs(head), column_7T, stats


@_linear_loss_op.register_fake
def _(hidden: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    weight, bias, *_, needs, _compact = arguments[:-4]
    head = LMHead(weight, bias, *arguments[-4:-1])
    loss, *results = fake_results(hidden)
    return loss, *Gradients.empty(hidden, head, needs).as_outputs(head), *results


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
    sampling_mask: SamplingMask | None = None,
    fp32_logits: bool = False,
    memory_budget: int | None = None,
    compact: bool | Literal["call", "chunks"] = True,
    impl: str = "auto",
) -> PolicyLoss:
    """Return `policy_loss` of the logits hidden @ weight^T + bias, with the gradients of hidden,
    weight and bias formed chunk by chunk.

    Args:
        hidden_TD, weight_VD, bias_V, fp32_logits, memory_budget: as for `linear_logprobs`.
            Gradients that are not needed cost nothing: a frozen head saves the third product. The
            weight's gradient is summed in fp32 and rounded once.
        compact: skip rows without gradient, which leaves the result exact. The host waits for the
            device to learn how many rows remain. "call" waits once and skips ignored rows (weight
            0, a negative target) in all three products. "chunks" waits once more per chunk and also
            skips rows whose gradient turns out to be 0 (clipped, no advantage) in the last two
            products. True: "chunks" on a CPU, "call" elsewhere. False skips no row and never waits,
            so that a CUDA graph can capture the call, except with a function as `spec`, and with
            "gspo" on more tokens than a chunk has rows, which needs the bounds of its sequences.
        Other arguments: as for `policy_loss`.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
        RuntimeError: a second backward pass through one loss, as for `policy_loss`.
    """
    flat_TD, full_VD, full_V = plain_head(hidden_TD, weight_VD, bias_V)
    head = new_head(flat_TD, full_VD, full_V, fp32_logits=fp32_logits, memory_budget=memory_budget)
    targets = check_targets(
        hidden_TD, len(full_VD), target_ids_T, temperature, softcap, sampling_mask
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
    if not isinstance(spec, LossSpec):
        out = _two_passes(head, flat_TD, targets, spec, inputs, impl)
        return out.view(target_ids_T.shape)
    head_tensors = (flat_TD, full_VD, full_V)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in head_tensors]
    flat = (*targets.flat(), *inputs.corrected(spec).flat(), spec.encoded)
    mode = resolve_compact(compact, flat_TD.device)
    results = _linear_loss_op(*head_tensors, *flat, needs, mode, *head.options(impl))
    return PolicyLoss.of(results[0], *results[-2:]).view(target_ids_T.shape)


def _two_passes(
    head: LMHead,
    hidden_TD: Tensor,
    targets: Targets,
    spec: TokenLossFn,
    inputs: TokenInputs,
    impl: str,
) -> PolicyLoss:
    """Return the loss of a function that sees all tokens: scores, their loss in torch, then the
    logits once more for the gradient.
    """
    counts_T = (inputs.weight_T != 0) & (targets.ids_T >= 0)
    targets = replace(targets, ids_T=torch.where(counts_T, targets.ids_T, -1))
    score_3T = linear_scores(head, hidden_TD, targets, impl)
    loss, column_7T, stats, slopes = scored_loss(spec, inputs, score_3T, targets.ids_T)
    loss = add_slopes(loss, score_3T, slopes) if score_3T.requires_grad else loss
    return PolicyLoss.of(loss, column_7T, stats)
