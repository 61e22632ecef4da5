"""A row through the model: its logits, the log-probs of its targets, its loss.

Log-probs and losses are taken within the output layer where the model allows it (`lm_head.py`), so
that logits exist a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from flowkernels import (
    LogProbs,
    LossSpec,
    PolicyLoss,
    TokenInputs,
    TokenLoss,
    TokenLossFn,
    linear_logprobs,
    linear_policy_loss,
    logprobs,
    policy_loss,
    token_loss,
)
from torch import Tensor
from transformers import PreTrainedModel

from flowtrain.trainer.lm_head import forward, fused_head, run_head
from flowtrain.trainer.model.experts import replaying
from flowtrain.trainer.packing import PackedRow
from flowtrain.trainer.walk import OpenPath


def forward_rows(model: PreTrainedModel, row: PackedRow, path: OpenPath | None = None) -> Tensor:
    """Logits [T, V] of the row's targets; the head runs on the target rows alone."""
    # A view whose backward pass, unlike that of [0], copies nothing.
    return forward(model, row, path).squeeze(0)


@torch.no_grad()
def read_row(model: PreTrainedModel, row: PackedRow, path: OpenPath) -> None:
    """Read an inner piece of a walk, for what it leaves to those below."""
    with replaying(model, row.routes_NLC):
        forward(model, replace(row, target_row_T=row.target_row_T[:0]), path)


def score_row(
    model: PreTrainedModel, row: PackedRow, temperature: float, path: OpenPath | None = None
) -> LogProbs:
    """Log-probs, entropies [T] of the row's targets, among what each was sampled from, read along
    the row's routes.
    """
    with replaying(model, row.routes_NLC):
        return _score_row(model, row, temperature, path)


def _score_row(
    model: PreTrainedModel, row: PackedRow, temperature: float, path: OpenPath | None
) -> LogProbs:
    options: dict[str, Any] = {"temperature": temperature, "sampling_mask": row.sampling_mask}
    head = fused_head(model)
    if head is None:
        return logprobs(forward_rows(model, row, path), row.target_ids_T, **options)
    found: list[LogProbs] = []

    def score_at_head(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        ids_T = row.target_ids_T
        every = options | {"fp32_logits": head.fp32_logits}
        found.append(linear_logprobs(hidden_TD, weight_VD, ids_T, bias_V=bias_V, **every))
        return found[0].logprob_T

    logprob_T = run_head(model, head, row, score_at_head, path)
    return replace(found[0], logprob_T=logprob_T)  # as the model returns it: FSDP's hooks are there


def row_loss(
    model: PreTrainedModel,
    row: PackedRow,
    spec: LossSpec | TokenLossFn,
    scale: float,
    temperature: float,
    path: OpenPath | None = None,
) -> PolicyLoss:
    """The loss of a row with its weights times `scale`; logits exist a chunk at a time where the
    model's head allows. It is called, and the loss's gradient taken, within `replaying`.

    `path`: of the walk that the row is a piece of.
    """
    tokens: dict[str, Any] = {
        "spec": spec,
        "advantage_T": row.advantage_T,
        "weight_T": row.loss_weight_T * scale,
        "old_logprob_T": row.old_logprob_T,
        "ref_logprob_T": row.ref_logprob_T,
        "sampler_logprob_T": row.sampler_logprob_T,
        "cu_seqlens_S1": row.cu_targets_S1,
        "temperature": temperature,
        "sampling_mask": row.sampling_mask,
    }
    head = fused_head(model)
    if head is None:
        logits_TV = forward_rows(model, row, path)
        return policy_loss(logits_TV, row.target_ids_T, inplace=True, **tokens)
    found: list[PolicyLoss] = []

    def loss_at_head(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        ids_T = row.target_ids_T
        every = tokens | {"fp32_logits": head.fp32_logits, "compact": _compacts(row, spec)}
        found.append(linear_policy_loss(hidden_TD, weight_VD, ids_T, bias_V=bias_V, **every))
        return found[0].loss

    loss = run_head(model, head, row, loss_at_head, path)
    return replace(found[0], loss=loss)  # as the model returns it: FSDP's hooks are there


def _compacts(row: PackedRow, spec: LossSpec | TokenLossFn) -> bool:
    """Targets without weight, if there may be some, are left out of the products. Without them a
    GPU is not waited for; a CPU leaves those without a gradient out as well.
    """
    drops = isinstance(spec, LossSpec) and spec.mis is not None
    return row.has_idle_targets or drops or row.target_ids_T.device.type == "cpu"


# ---- losses and scores of a row in pieces


def looks_at_sequences(spec: LossSpec | TokenLossFn) -> bool:
    """Whether a token's loss depends on other tokens."""
    return not (isinstance(spec, LossSpec) and spec.is_fused)


def loss_of_scores(
    row: PackedRow, scores: LogProbs, spec: LossSpec | TokenLossFn, scale: float
) -> TokenLoss:
    """The loss of each target of a row and its slopes, given the scores of all."""
    inputs = TokenInputs(
        advantage_T=row.advantage_T,
        weight_T=row.loss_weight_T * scale,
        old_logprob_T=row.old_logprob_T,
        ref_logprob_T=row.ref_logprob_T,
        sampler_logprob_T=row.sampler_logprob_T,
        cu_seqlens_S1=row.cu_targets_S1,
    )
    if isinstance(spec, LossSpec):
        inputs = inputs.corrected(spec)
    tokens = inputs.scored(scores.logprob_T, scores.entropy_T, scores.lse_T)
    return token_loss(spec, tokens) if isinstance(spec, LossSpec) else spec(tokens)


def part_of(whole: TokenLoss, target_M: Tensor | None) -> TokenLossFn:
    """Make a loss of what is known of each target."""
    known = {f.name: getattr(whole, f.name) for f in fields(whole)}
    part: dict[str, Any] = {n: x if x is None else x[target_M] for n, x in known.items()}
    return lambda _tokens: TokenLoss(**part)


def joined(parts: Sequence[tuple[Tensor | None, LogProbs]]) -> LogProbs:
    """Put the scores of pieces together, each with the targets of the whole that they are of."""
    if parts[0][0] is None:
        return parts[0][1]
    order_T = torch.cat([target_M for target_M, _ in parts if target_M is not None]).argsort()
    scores = [score for _, score in parts]
    return LogProbs(
        **{
            f.name: torch.cat([getattr(s, f.name) for s in scores])[order_T]
            for f in fields(LogProbs)
        }
    )
