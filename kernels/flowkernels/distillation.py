"""Distillation over the whole vocabulary, straight from hidden states: student and teacher have a
chunk of logits each at a time, and the student's gradient goes over its own.

p is the student's distribution of a token, q the teacher's, both at the temperature; m = b q + (1 -
b) p. By the name of the divergence D, with its slope f by p (up to a constant):

    reverse_kl   KL(p || q)                          log p - log q
    forward_kl   KL(q || p)                          -q / p
    jsd          b KL(q || m) + (1 - b) KL(p || m)   (1 - b) (log p - log m)

The gradient by the student's logits is p (f - sum p f) / temperature; of forward_kl (p - q) /
temperature. The sum over tokens of weight * D is the loss; jsd is that of GKD (arXiv 2306.13649).
Of a teacher elsewhere the K likeliest tokens may be all that is known: the outcomes are these and
all others as one, "the rest", whose logit is the log-sum-exp of the other logits. The rest passes
its gradient on to them by their shares of it.
T: tokens, V: vocabulary, D: hidden size of the student, E: that of the teacher, O: outcomes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from flowkernels.arguments import (
    DTYPES,
    INTEGERS,
    LOGPROB_DTYPES,
    check_head,
    check_tokens,
    checks_values,
    dtype_of_results,
    flat_tokens,
    temperatures,
)
from flowkernels.implementations import resolve_impl, with_launcher
from flowkernels.lm_head import HEAD, OPTIONS, Gradients, LMHead, gradient_buffer, new_head
from flowkernels.plain_tensors import Head, flat_rows, plain_head
from flowkernels.policy_loss import register_gradients

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)
_BUFFERS = {"triton": 2, "torch": 6}
"""Chunks of numbers [C, V] that are alive at once: the logits of both, and what torch makes of
them."""
_LEAST_REST = 2.0**-20
"""Least probability of a teacher's rest: fp32 log-probs that sum to nearly 1 say no more of it."""


@dataclass(frozen=True, slots=True)
class Distillation:
    """The result of a distillation, fp32 (fp64 in fp64). Only `loss` carries a gradient."""

    loss: Tensor
    """0-d: sum_T weight * divergence."""
    divergence_T: Tensor
    """In nats; 0 in rows of weight 0, which are not read."""


@with_launcher("flowkernels.distillation_triton")
def diverge(
    logits_CV: Tensor,
    teacher_CV: Tensor,
    scale_C: Tensor,
    weight_C: Tensor,
    divergence: str,
    mix: float,
    out_CV: Tensor | None,
) -> Tensor:
    """Return the divergence of each row [C], and write the gradient by the logits, times the
    weight, into `out_CV` unless that is None; it may be the logits.

    Args:
        scale_C: 1 / temperature.
        mix: b.
    """
    dtype = dtype_of_results(logits_CV.dtype)
    log_p, log_q = (
        (x.to(dtype) * scale_C[:, None]).log_softmax(1) for x in (logits_CV, teacher_CV)
    )
    p = log_p.exp()
    slope_CV, divergence_C = None, torch.zeros_like(scale_C)
    if divergence == "reverse_kl":
        slope_CV = log_p - log_q
        divergence_C = _mean(p, slope_CV)
    elif divergence == "forward_kl":
        divergence_C = _mean(log_q.exp(), log_q - log_p)
    else:
        log_m = torch.logaddexp(log_q + math.log(mix), log_p + math.log1p(-mix))
        divergence_C = mix * _mean(log_q.exp(), log_q - log_m)
        slope_CV = (log_p - log_m).mul_(1 - mix)
        divergence_C += _mean(p, slope_CV)
    if out_CV is not None:
        factor_C1 = (weight_C * scale_C)[:, None]
        if slope_CV is None:
            out_CV.copy_((p - log_q.exp_()).mul_(factor_C1))
        else:
            inner_C1 = _mean(p, slope_CV)[:, None]
            gradient_CV = slope_CV.sub_(inner_C1).mul_(p).mul_(factor_C1)
            out_CV.copy_(gradient_CV.masked_fill_(p == 0, 0.0))
    return divergence_C


def _diverge_named(
    impl: str, logits_CV: Tensor, ids_CK: Tensor, teacher_CK: Tensor, *how: Any
) -> Tensor:
    """Do as `diverge`, whose other arguments follow, over the named ids and the rest, given the
    teacher's log-probs of the ids; the logits are lost.
    """
    scale_C, weight_C, divergence, mix, out_CV = how
    scaled_CV = logits_CV.to(scale_C.dtype).mul_(scale_C[:, None])
    named_CK = scaled_CV.gather(1, ids_CK)
    rest_CV = scaled_CV.scatter_(1, ids_CK, -torch.inf)
    rest_C1 = rest_CV.logsumexp(1, keepdim=True)
    student_CO = torch.cat([named_CK, rest_C1], 1)
    left_C1 = (1 - teacher_CK.exp().sum(1, keepdim=True)).clamp(min=_LEAST_REST)
    if ids_CK.shape[1] == rest_CV.shape[1]:
        left_C1.zero_()
    teacher_CO = torch.cat([teacher_CK, left_C1.log()], 1)
    slope_CO = None if out_CV is None else torch.empty_like(student_CO)
    factors = torch.ones_like(scale_C), weight_C * scale_C
    found_C = diverge(impl, student_CO, teacher_CO, *factors, divergence, mix, slope_CO)
    if out_CV is not None and slope_CO is not None:
        # An empty rest has no shares: -inf less the least number is -inf.
        rest_CV.sub_(rest_C1.clamp(min=torch.finfo(rest_CV.dtype).min)).exp_()
        out_CV.copy_(rest_CV.mul_(slope_CO[:, -1:]).scatter_(1, ids_CK, slope_CO[:, :-1]))
    return found_C


def _mean(p_CV: Tensor, x_CV: Tensor) -> Tensor:
    """The mean of x under p, whose zeros count nothing whatever x is."""
    return torch.where(p_CV > 0, p_CV * x_CV, 0.0).sum(1)


@torch.library.custom_op(
    "flowkernels::linear_distillation",
    mutates_args=(),
    schema=f"({HEAD}, Tensor teacher, Tensor? teacher_weight, Tensor? teacher_bias, Tensor? ids, "
    f"Tensor scale, Tensor token_weight, str divergence, float mix, bool[] needs, {OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _distillation_op(hidden: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return (loss, gradients by hidden, weight and bias or empty tensors, divergences).

    With `ids`, [T, K], the teacher is their log-probs; else its hidden states.
    """
    weight, bias, teacher, teacher_weight, teacher_bias, ids, scale_T, weight_T = arguments[:8]
    divergence, mix, needs, *options, impl = arguments[8:]
    head = LMHead(weight, bias, *options)
    of_teacher = replace(head, weight_VD=teacher_weight, bias_V=teacher_bias)
    gradients = Gradients.empty(hidden, head, needs)
    divergence_T = torch.zeros_like(weight_T)
    row_T = weight_T.nonzero()[:, 0]
    if len(row_T) < len(weight_T):
        gradients.clear_hidden()
    for chunk in head.chunks(len(row_T)):
        row_C = row_T[chunk]
        hidden_CD, is_only = hidden[row_C], len(row_C) == len(row_T)
        logits_CV = head.logits(hidden_CD)
        out_CV = gradient_buffer(logits_CV, hidden.dtype) if any(needs) else None
        how = scale_T[row_C], weight_T[row_C], divergence, mix, out_CV
        if ids is None:
            found_C = diverge(impl, logits_CV, of_teacher.logits(teacher[row_C]), *how)
        else:
            found_C = _diverge_named(impl, logits_CV, ids[row_C], teacher[row_C], *how)
        divergence_T[row_C] = found_C
        del logits_CV
        if out_CV is not None:
            gradients.add(head, hidden_CD, out_CV, row_C, None, is_only)
            del out_CV  # before the next chunk's logits are made
    loss = torch.where(weight_T != 0, weight_T * divergence_T, 0.0).sum()
    return loss, *gradients.as_outputs(head), divergence_T


@_distillation_op.register_fake
def _(hidden: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    weight, bias, *_, weight_T = arguments[:8]
    needs, options = arguments[10], arguments[11:-1]
    head = LMHead(weight, bias, *options)
    gradients = Gradients.empty(hidden, head, needs).as_outputs(head)
    return weight_T.new_empty(()), *gradients, torch.empty_like(weight_T)


register_gradients(_distillation_op, num_results=1)


def linear_distillation(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    teacher_TE: Tensor,
    teacher_weight_VE: Tensor,
    *,
    weight_T: Tensor,
    bias_V: Tensor | None = None,
    teacher_bias_V: Tensor | None = None,
    divergence: Divergence = "reverse_kl",
    mix: float = 0.5,
    temperature: float | Tensor = 1.0,
    fp32_logits: bool = False,
    memory_budget: int | None = None,
    impl: str = "auto",
) -> Distillation:
    """Return how far a student's distributions are from a teacher's, over the whole vocabulary,
    with the gradients of the student's hidden states, weight and bias formed chunk by chunk. No
    more than a chunk of logits of each exists at a time.

    Args:
        hidden_TD: [T, D] fp32, bf16, fp16 or fp64, of the student; a batch [B, L, D] where all
            that is [T] is [B, L].
        weight_VD, bias_V: as for `linear_logprobs`.
        teacher_TE: [T, E], of the teacher for the same tokens, in the dtype of `hidden_TD`; it and
            its head get no gradient.
        teacher_weight_VE, teacher_bias_V: the teacher's head, [V, E] and [V], for the same
            vocabulary.
        weight_T: [T], what each token counts in the loss; rows of weight 0 are not computed, and
            the host waits for the device to learn how many there are.
        divergence: "reverse_kl", "forward_kl" or "jsd".
        mix: b of jsd, between 0 and 1.
        temperature: divides both logits; > 0, a number or [T].
        memory_budget: bytes for logits of both; by default as for `linear_logprobs`.
        fp32_logits, impl: as for `linear_logprobs`.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
        RuntimeError: a second backward pass through one loss, as for `policy_loss`.
    """
    head = plain_head(hidden_TD, weight_VD, bias_V)
    with torch.no_grad():
        teacher = plain_head(teacher_TE.detach(), teacher_weight_VE, teacher_bias_V)
    check_head(*teacher)
    if teacher[0].dtype != head[0].dtype or teacher[0].shape[:1] != head[0].shape[:1]:
        raise ValueError(
            f"teacher_TE must be {head[0].dtype} [T={len(head[0])}, E], as hidden_TD, got "
            f"{teacher[0].dtype} {tuple(teacher_TE.shape)}"
        )
    if len(teacher[1]) != len(head[1]):
        raise ValueError(
            f"teacher_weight_VE must have V={len(head[1])} rows, as weight_VD, got "
            f"{len(teacher[1])}: the vocabularies differ"
        )
    how = weight_T, divergence, mix, temperature, fp32_logits, memory_budget, impl
    return _run(hidden_TD.shape[:-1], head, (*teacher, None), *how)


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
    """Return how far a student's distributions are from a teacher's over K ids and the rest. It is
    at most what `linear_distillation` finds, and as much where K = V or both share the rest out
    alike; gradients and memory are as there.

    Args:
        hidden_TD, weight_VD, bias_V, weight_T, divergence, mix: as for `linear_distillation`.
        teacher_ids_TK: [T, K] int64 or int32 in [0, V), those of a row different from each other.
        teacher_logprob_TK: [T, K] fp32 or fp64, their log-probs; what is left of 1 is the rest's,
            2^-20 at least. With K = V there is none.
        temperature: divides the student's logits alone; > 0, a number or [T].
        fp32_logits, memory_budget: as for `linear_distillation`.
        impl: of the K + 1 outcomes; products, log-sum-exp and gather are torch's.

    Raises as `linear_distillation` does; values of ids are checked as those of targets.
    """
    head, shape = plain_head(hidden_TD, weight_VD, bias_V), hidden_TD.shape[:-1]
    device, dtype = hidden_TD.device, dtype_of_results(head[0].dtype)
    named, num_vocab = (*shape, *teacher_ids_TK.shape[-1:]), len(head[1])
    check_tokens("teacher_ids_TK", teacher_ids_TK, named, INTEGERS, device)
    check_tokens("teacher_logprob_TK", teacher_logprob_TK, named, LOGPROB_DTYPES, device)
    ids_TK = flat_rows("teacher_ids_TK", teacher_ids_TK).long()
    if checks_values(device):
        ends = (ids_TK.new_full((len(ids_TK), 1), end) for end in (-1, num_vocab))
        steps = ids_TK.sort(1).values.diff(1, 1, *ends)
        if bool((steps < 1).any()):
            raise ValueError(f"teacher_ids_TK must be different ids in [0, V={num_vocab})")
    logprob_TK = flat_rows("teacher_logprob_TK", teacher_logprob_TK.detach().to(dtype))
    how = weight_T, divergence, mix, temperature, fp32_logits, memory_budget, impl
    return _run(shape, head, (logprob_TK, None, None, ids_TK), *how)


def _run(
    shape: torch.Size, tensors: Head, teacher: tuple[Tensor | None, ...], *how: Any
) -> Distillation:
    """Distil from a teacher as the operator takes it; the arguments that both forms have follow."""
    weight_T, divergence, mix, temperature, fp32_logits, memory_budget, impl = how
    if divergence not in DIVERGENCES:
        names = ", ".join(map(repr, DIVERGENCES))
        raise ValueError(f"divergence={divergence!r} must be one of {names}")
    if not 0 < mix < 1:
        raise ValueError(f"mix={mix} must be between 0 and 1")
    device, dtype = tensors[0].device, dtype_of_results(tensors[0].dtype)
    impl = resolve_impl(impl, device, tensors[0].dtype)
    flat_weight_T = flat_tokens("weight_T", weight_T, shape, DTYPES, device, dtype)
    scale_T = temperatures(temperature, shape, dtype, device).reciprocal().contiguous()
    head = new_head(*tensors, fp32_logits=fp32_logits, memory_budget=memory_budget)
    num_rows = max(1, head.chunk_rows // _BUFFERS[impl if teacher[-1] is None else "torch"])
    head = replace(head, chunk_rows=num_rows, whole_rows=num_rows)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors]
    factors = scale_T, flat_weight_T, divergence, mix, needs
    loss, *_, divergence_T = _distillation_op(*tensors, *teacher, *factors, *head.options(impl))
    return Distillation(loss, cast(Tensor, divergence_T).view(shape))
