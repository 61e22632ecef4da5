"""Distillation from the likeliest tokens that a teacher elsewhere tells, straight from hidden
states.

The outcomes of a token are the K ids that the teacher names and all others as one, "the rest". The
student's rest has the log-sum-exp of the other logits as its logit: the divergence is that of
`linear_distillation` over K + 1 logits, and the rest passes its gradient on to the other logits by
their shares of it. The divergence is at most that over the whole vocabulary, and equal where K = V
or both share the rest out alike.
T: tokens, K: ids of each, V: vocabulary, D: hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from flowkernels.arguments import (
    DTYPES,
    LOGPROB_DTYPES,
    check_tokens,
    checks_values,
    dtype_of_results,
    flat_tokens,
    temperatures,
)
from flowkernels.distillation import (
    HOW,
    Distillation,
    Divergence,
    check_divergence,
    diverge,
    fake_walk,
    needed,
    walk,
)
from flowkernels.implementations import resolve_impl
from flowkernels.lm_head import HEAD, LMHead, new_head
from flowkernels.plain_tensors import flat_rows, plain_head
from flowkernels.policy_loss import register_gradients

LEAST_REST = 2.0**-20
"""Least probability of a teacher's rest: fp32 log-probs that sum to nearly 1 say no more of it."""
_BUFFERS = 4
"""Chunks of numbers [C, V] that are alive at once."""


@torch.library.custom_op(
    "flowkernels::linear_topk_distillation",
    mutates_args=(),
    schema=f"({HEAD}, Tensor ids, Tensor teacher, {HOW})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _topk_op(hidden: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the results of `walk`."""
    weight, bias, ids_TK, teacher_TK, scale_T, weight_T, divergence, mix, needs = arguments[:9]
    *options, impl = arguments[9:]
    head, dtype = LMHead(weight, bias, *options), scale_T.dtype

    def diverge_rows(row_C: Tensor, logits_CV: Tensor, out_CV: Tensor | None) -> Tensor:
        ids_CK, scale_C1 = ids_TK[row_C], scale_T[row_C, None]
        scaled_CV = logits_CV.to(dtype).mul_(scale_C1)
        named_CK = scaled_CV.gather(1, ids_CK)
        rest_CV = scaled_CV.scatter_(1, ids_CK, -torch.inf)
        rest_C1 = rest_CV.logsumexp(1, keepdim=True)
        student_CO = torch.cat([named_CK, rest_C1], 1)
        teacher_CO = _with_rest(teacher_TK[row_C], has_rest=ids_CK.shape[1] < rest_CV.shape[1])
        slope_CO = None if out_CV is None else torch.empty_like(student_CO)
        factors = torch.ones_like(scale_C1[:, 0]), weight_T[row_C] * scale_C1[:, 0]
        found_C = diverge(impl, student_CO, teacher_CO, *factors, divergence, mix, slope_CO)
        if out_CV is not None and slope_CO is not None:
            # An empty rest has no shares: -inf less the least number is -inf.
            rest_CV.sub_(rest_C1.clamp(min=torch.finfo(dtype).min)).exp_()
            rest_CV.mul_(slope_CO[:, -1:]).scatter_(1, ids_CK, slope_CO[:, :-1])
            out_CV.copy_(rest_CV)
        return found_C

    return walk(hidden, head, weight_T, needs, diverge_rows)


_topk_op.register_fake(fake_walk)
register_gradients(_topk_op, num_results=1)


def _with_rest(logprob_CK: Tensor, has_rest: bool) -> Tensor:
    """Add the log-prob of the rest to those of the named ids."""
    rest_C1 = 1 - logprob_CK.exp().sum(1, keepdim=True)
    rest_C1 = rest_C1.clamp(min=LEAST_REST) if has_rest else torch.zeros_like(rest_C1)
    return torch.cat([logprob_CK, rest_C1.log()], 1)


def linear_topk_distillation(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    teacher_ids_TK: Tensor,
    teacher_logprob_TK: Tensor,
    *,
    weight_T: Tensor,
    bias_V: Tensor | None = None,
    divergence: Divergence = "reverse_kl",
    mix: float = 0.5,
    temperature: float | Tensor = 1.0,
    fp32_logits: bool = False,
    memory_budget: int | None = None,
    impl: str = "auto",
) -> Distillation:
    """Return how far a student's distributions are from a teacher's over K ids and the rest, with
    the gradients of the student's hidden states, weight and bias formed chunk by chunk.

    Args:
        hidden_TD, weight_VD, bias_V, weight_T, divergence, mix, fp32_logits: as for
            `linear_distillation`, and so are batches.
        teacher_ids_TK: [T, K] int64 or int32 in [0, V), those of a row different from each other.
        teacher_logprob_TK: [T, K] fp32 or fp64, their log-probs, <= 0 but for rounding. What their
            sum leaves is the rest's, at least 2^-20; with K = V there is none.
        temperature: divides the student's logits alone; > 0, a number or [T].
        memory_budget: bytes for logits; by default as for `linear_logprobs`.
        impl: as for `linear_distillation`, for the K + 1 outcomes; products, gather and log-sum-exp
            are torch's.

    Raises:
        ValueError: an argument that does not fit, with its name and value; values of ids are
            checked as those of targets are.
        RuntimeError: a second backward pass through one loss, as for `policy_loss`.
    """
    check_divergence(divergence, mix)
    shape, device = hidden_TD.shape[:-1], hidden_TD.device
    tensors = plain_head(hidden_TD, weight_VD, bias_V)
    dtype = dtype_of_results(tensors[0].dtype)
    head = new_head(*tensors, fp32_logits=fp32_logits, memory_budget=memory_budget)
    num_rows = max(1, head.chunk_rows // _BUFFERS)
    head = replace(head, chunk_rows=num_rows, whole_rows=num_rows)
    ids_TK = _flat_ids(teacher_ids_TK, shape, len(head.weight_VD), device)
    whole = (*shape, ids_TK.shape[1])
    check_tokens("teacher_logprob_TK", teacher_logprob_TK, whole, LOGPROB_DTYPES, device)
    logprob_TK = flat_rows("teacher_logprob_TK", teacher_logprob_TK.detach().to(dtype))
    impl = resolve_impl(impl, device, tensors[0].dtype)
    flat_weight_T = flat_tokens("weight_T", weight_T, shape, DTYPES, device, dtype)
    scale_T = temperatures(temperature, shape, dtype, device).reciprocal().contiguous()
    how = scale_T, flat_weight_T, divergence, mix, needed(*tensors), *head.options(impl)
    loss, *_, divergence_T = _topk_op(*tensors, ids_TK, logprob_TK, *how)
    return Distillation(loss, cast(Tensor, divergence_T).view(shape))


def _flat_ids(ids: Tensor, shape: torch.Size, num_vocab: int, device: torch.device) -> Tensor:
    """Return the ids of [..., K] as int64 [T, K]."""
    num_ids = ids.shape[-1] if ids.dim() else 0
    if not 0 < num_ids <= num_vocab:
        raise ValueError(
            f"teacher_ids_TK must name 1 to V={num_vocab} ids of each token, got {num_ids}"
        )
    check_tokens("teacher_ids_TK", ids, (*shape, num_ids), (torch.int64, torch.int32), device)
    flat_TK = flat_rows("teacher_ids_TK", ids).long()
    if checks_values(device) and len(flat_TK):
        lowest, highest = int(flat_TK.min()), int(flat_TK.max())
        if lowest < 0 or highest >= num_vocab:
            raise ValueError(
                f"teacher_ids_TK must be in [0, V={num_vocab}), got {lowest} to {highest}"
            )
        if bool((flat_TK.sort(1).values.diff(dim=1) == 0).any()):
            raise ValueError("teacher_ids_TK must name each id of a token once")
    return flat_TK
