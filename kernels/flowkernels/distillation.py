"""Distillation over the whole vocabulary, straight from hidden states: student and teacher have a
chunk of logits each at a time, and the student's gradient goes over its own.

p is the student's distribution of a token, q the teacher's, both at the temperature; m = b q + (1 -
b) p. By the name of the divergence D, with its slope f by p (up to a constant):

    reverse_kl   KL(p || q)                          log p - log q
    forward_kl   KL(q || p)                          -q / p
    jsd          b KL(q || m) + (1 - b) KL(p || m)   (1 - b) (log p - log m)

The gradient by the student's logits is p (f - sum p f) / temperature; of forward_kl (p - q) /
temperature. The sum over tokens of weight * D is the loss; jsd is that of GKD (arXiv 2306.13649).
T: tokens, V: vocabulary, D: hidden size of the student, E: that of the teacher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from flowkernels.arguments import DTYPES, check_head, dtype_of_results, flat_tokens, temperatures
from flowkernels.implementations import resolve_impl, with_launcher
from flowkernels.lm_head import HEAD, OPTIONS, Gradients, LMHead, gradient_buffer, new_head
from flowkernels.plain_tensors import plain_head
from flowkernels.policy_loss import register_gradients

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)
HOW = "Tensor scale, Tensor token_weight, str divergence, float mix, bool[] needs, " + OPTIONS
"""How a student is compared with its teacher, in the schema of an operator."""
_BUFFERS = {"triton": 2, "torch": 6}
"""Chunks of numbers [C, V] that are alive at once: the logits of both, and what torch makes of
them."""


@dataclass(frozen=True, slots=True)
class Distillation:
    """The result of `linear_distillation`, fp32 (fp64 in fp64). Only `loss` carries a gradient."""

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


def _mean(p_CV: Tensor, x_CV: Tensor) -> Tensor:
    """The mean of x under p, whose zeros count nothing whatever x is."""
    return torch.where(p_CV > 0, p_CV * x_CV, 0.0).sum(1)


def walk(
    hidden: Tensor,
    head: LMHead,
    weight_T: Tensor,
    needs: Sequence[bool],
    diverge_rows: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> tuple[Tensor, ...]:
    """Return (loss, gradients by hidden, weight and bias or empty tensors, divergences).

    `diverge_rows`: from rows, their logits and a buffer, or None, to their divergences, with the
    weighted gradient by the logits in the buffer, which may be the logits.
    """
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
        divergence_T[row_C] = diverge_rows(row_C, logits_CV, out_CV)
        del logits_CV
        if out_CV is not None:
            gradients.add(head, hidden_CD, out_CV, row_C, None, is_only)
            del out_CV  # before the next chunk's logits are made
    loss = torch.where(weight_T != 0, weight_T * divergence_T, 0.0).sum()
    return loss, *gradients.as_outputs(head), divergence_T


@torch.library.custom_op(
    "flowkernels::linear_distillation",
    mutates_args=(),
    schema=f"({HEAD}, Tensor teacher, Tensor teacher_weight, Tensor? teacher_bias, {HOW})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _distillation_op(hidden: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the results of `walk`."""
    weight, bias, teacher, teacher_weight, teacher_bias, scale_T, weight_T = arguments[:7]
    divergence, mix, needs, *options, impl = arguments[7:]
    head = LMHead(weight, bias, *options)
    of_teacher = replace(head, weight_VD=teacher_weight, bias_V=teacher_bias)

    def diverge_rows(row_C: Tensor, logits_CV: Tensor, out_CV: Tensor | None) -> Tensor:
        teacher_CV, factors = of_teacher.logits(teacher[row_C]), (scale_T[row_C], weight_T[row_C])
        return diverge(impl, logits_CV, teacher_CV, *factors, divergence, mix, out_CV)

    return walk(hidden, head, weight_T, needs, diverge_rows)


def fake_walk(hidden: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The shapes of the results of `walk`, from the arguments of an operator that ends in `HOW`."""
    weight, bias = arguments[:2]
    weight_T, _, _, needs, *options, _ = arguments[-8:]
    head = LMHead(weight, bias, *options)
    gradients = Gradients.empty(hidden, head, needs).as_outputs(head)
    return weight_T.new_empty(()), *gradients, torch.empty_like(weight_T)


_distillation_op.register_fake(fake_walk)
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
    check_divergence(divergence, mix)
    shape, device = hidden_TD.shape[:-1], hidden_TD.device
    flat_TD, full_VD, full_V = plain_head(hidden_TD, weight_VD, bias_V)
    with torch.no_grad():
        teacher = plain_head(teacher_TE.detach(), teacher_weight_VE, teacher_bias_V)
    check_head(*teacher)
    if teacher[0].dtype != flat_TD.dtype or teacher[0].shape[:1] != flat_TD.shape[:1]:
        raise ValueError(
            f"teacher_TE must be {flat_TD.dtype} [T={len(flat_TD)}, E], as hidden_TD, got "
            f"{teacher[0].dtype} {tuple(teacher_TE.shape)}"
        )
    if len(teacher[1]) != len(full_VD):
        raise ValueError(
            f"teacher_weight_VE must have V={len(full_VD)} rows, as weight_VD, got "
            f"{len(teacher[1])}: the vocabularies differ"
        )
    impl = resolve_impl(impl, device, flat_TD.dtype)
    dtype = dtype_of_results(flat_TD.dtype)
    flat_weight_T = flat_tokens("weight_T", weight_T, shape, DTYPES, device, dtype)
    scale_T = temperatures(temperature, shape, dtype, device).reciprocal().contiguous()
    head = new_head(flat_TD, full_VD, full_V, fp32_logits=fp32_logits, memory_budget=memory_budget)
    num_rows = max(1, head.chunk_rows // _BUFFERS[impl])
    head = replace(head, chunk_rows=num_rows, whole_rows=num_rows)
    tensors = (flat_TD, full_VD, full_V)
    how = scale_T, flat_weight_T, divergence, mix, needed(*tensors), *head.options(impl)
    loss, *_, divergence_T = _distillation_op(*tensors, *teacher, *how)
    return Distillation(loss, cast(Tensor, divergence_T).view(shape))


def check_divergence(divergence: str, mix: float) -> None:
    if divergence not in DIVERGENCES:
        names = ", ".join(map(repr, DIVERGENCES))
        raise ValueError(f"divergence={divergence!r} must be one of {names}")
    if not 0 < mix < 1:
        raise ValueError(f"mix={mix} must be between 0 and 1")


def needed(*tensors: Tensor | None) -> list[bool]:
    """Tell which of the tensors get a gradient."""
    return [torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors]
