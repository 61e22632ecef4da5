"""A teacher, and the loss that brings the policy's distributions at trained tokens near to it.

The teacher reads each token of a row's tree once, under its own prompts where a hint tells it more,
and keeps the hidden states of the targets alone. Its logits exist beside the policy's, a chunk at a
time. One behind an endpoint has told its likeliest tokens before. T: targets of a row, M: of a
pass, E: the teacher's hidden size, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from flowkernels import (
    Distillation,
    Divergence,
    PolicyLoss,
    linear_distillation,
    linear_topk_distillation,
)
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from flowtrain.records import UserError
from flowtrain.trainer.host_copies import copied
from flowtrain.trainer.loss import FusedLMHead
from flowtrain.trainer.packing import PackedRow
from flowtrain.trainer.reading import RowReader
from flowtrain.trainer.walk import Pass


@dataclass(frozen=True, slots=True)
class DistillSpec:
    """How a policy learns from its teacher."""

    divergence: Divergence
    mix: float
    """b of "jsd"."""
    teacher: Literal["policy", "reference", "endpoint"]
    """The policy itself, as it is before an optimizer step; the reference; or a model elsewhere, of
    which rows have the likeliest tokens."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """The words of a teacher about targets."""

    compare: Callable[..., Distillation]
    """One of the functions of flowkernels, from a policy's head and `said_T` to the divergence."""
    said_T: Sequence[Tensor]

    def of_targets(self, target_M: Tensor | None) -> Lesson:
        """Return the lesson of a pass; None: of all targets."""
        if target_M is None:
            return self
        return replace(self, said_T=[x[copied(target_M, x.device)] for x in self.said_T])

    def beside(
        self,
        policy_loss: Callable[..., PolicyLoss],
        weight_T: Tensor,
        temperature: float,
        fp32_logits: bool,
    ) -> Callable[..., PolicyLoss]:
        """Add the divergence from the teacher to a policy's loss, each token by its weight."""

        def both(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> PolicyLoss:
            out = policy_loss(hidden_TD, weight_VD, bias_V=bias_V)
            learnt = self.compare(
                hidden_TD,
                weight_VD,
                *(copied(x, hidden_TD.device) for x in self.said_T),
                weight_T=weight_T,
                bias_V=bias_V,
                temperature=temperature,
                fp32_logits=fp32_logits,
            )
            stats = {**out.stats, "divergence_sum": learnt.divergence_T.sum()}
            return replace(out, loss=out.loss + learnt.loss, stats=stats)

        return both


def lessons(
    spec: DistillSpec,
    teacher: PreTrainedModel | None,
    reader: RowReader,
    rows: Sequence[PackedRow],
    walks: Sequence[Sequence[Pass]],
) -> list[Lesson | None]:
    """Return what a teacher says of the targets of each pass that learns in the walks through the
    rows; collective. Without a `teacher` the rows hold its likeliest tokens.
    """
    how: dict[str, Any] = {"divergence": spec.divergence, "mix": spec.mix}
    said: list[Sequence[Tensor]] = []
    if teacher is None:
        compare = partial(linear_topk_distillation, **how)
        said += [row.likeliest for row in rows]
    else:
        weight_VE, bias_V = head_of(teacher)
        states = reader.states(teacher, [row.teacher or row for row in rows])
        if states:  # once, in the dtype of its passes
            weight_VE = weight_VE.to(states[0].dtype)
            bias_V = None if bias_V is None else bias_V.to(states[0].dtype)
        how |= {"teacher_weight_VE": weight_VE, "teacher_bias_V": bias_V}
        compare = partial(linear_distillation, **how)
        said += [[state_TE] for state_TE in states]
    return [
        Lesson(compare, said_T).of_targets(step.target_M)
        for said_T, walk in zip(said, walks, strict=True)
        for step in walk
        if step.learns
    ]


@torch.no_grad()
def head_of(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias of a model's head, whole on every rank; collective. They may
    be the model's own, which an optimizer step changes.
    """
    head = model.get_output_embeddings()

    def whole(tensor: Tensor) -> Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()

    bias = getattr(head, "bias", None)
    return whole(head.weight), None if bias is None else whole(bias)


def check_teacher(policy: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Raise UserError for heads that cannot be compared word by word."""
    heads = [model.get_output_embeddings() for model in (policy, teacher)]
    if not all(isinstance(head, FusedLMHead) for head in heads):
        raise UserError(
            "a policy and its teacher must have plain linear heads; one caps its logits"
        )
    sizes = [len(head.weight) for head in heads]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"distill.teacher has a head of {sizes[1]} words and the policy one of {sizes[0]}: "
            "both must have one vocabulary"
        )
