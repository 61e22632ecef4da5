"""The forward pass of a row: logits, log-probs of its targets, and loss.

If the model allows it, the output layer computes log-probs and losses, so that only a chunk of
logits exists at a time. FSDP gathers the head's weight only during the model's forward pass.
Therefore the output layer calls a function on the hidden states of the target rows, and the model
returns the function's tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

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
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.attention.flex import padded
from flowtrain.trainer.host_copies import copied
from flowtrain.trainer.model import delta_net
from flowtrain.trainer.model.experts import replaying
from flowtrain.trainer.packing import PackedRow
from flowtrain.trainer.walk import OpenPath

if TYPE_CHECKING:
    from flowtrain.trainer.distillation import Lesson

T = TypeVar("T", LogProbs, PolicyLoss)
HeadFn = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(hidden states [T, D], weight [V, D], bias [V] or None) -> anything; it comes back in the place
of the logits."""


class FusedLMHead(nn.Linear):
    """A linear output layer that calls a given function instead of computing its product."""

    head_fn: HeadFn | None = None
    fp32_logits = False
    """Whether the logits of a 16-bit head stay in fp32."""

    def forward(self, hidden: Tensor) -> Tensor:
        if self.head_fn is None:
            return super().forward(hidden)
        return self.head_fn(hidden.squeeze(0), self.weight, self.bias)

    @contextmanager
    def running(self, head_fn: HeadFn) -> Iterator[None]:
        self.head_fn = head_fn
        try:
            yield
        finally:
            self.head_fn = None


def equip(model: PreTrainedModel, fp32_logits: bool = False) -> None:
    """Turn the output layer into a `FusedLMHead` if logits are just its product. Call it before
    sharding; the model needs no weights yet.

    A model that caps or scales its logits afterwards keeps its layer, and `fused_head` returns
    None: the cap would also apply to a loss from within the layer.
    """
    if type(model.get_output_embeddings()) is not nn.Linear:
        return
    model.get_output_embeddings().__class__ = (
        FusedLMHead  # in place: a tied weight stays tied, and names stay the same
    )
    head = fused_head(model)
    assert head is not None
    decoder, hidden = model.get_decoder(), torch.zeros(1, 1, model.config.hidden_size)
    with head.running(lambda hidden, weight, bias: torch.full_like(hidden, 100.0)):
        # Not through its layers, which are large, and on the meta device on most ranks.
        decoder.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=hidden)
        try:
            given = model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits
        finally:
            del decoder.forward
    if not bool((given == 100).all()):
        model.get_output_embeddings().__class__ = nn.Linear
        return
    head.fp32_logits = fp32_logits


def fused_head(model: PreTrainedModel) -> FusedLMHead | None:
    head = model.get_output_embeddings()
    return head if isinstance(head, FusedLMHead) else None


def forward_rows(model: PreTrainedModel, row: PackedRow, path: OpenPath | None = None) -> Tensor:
    """Return the logits [T, V] of the row's targets, or the result of the head's function; the head
    runs on the target rows only.

    `path`: the open path, if the row is a piece of a walk.
    """
    path = path if path is not None and path.matters else None
    row = padded(row) if row.input_ids_N.is_cuda else row
    structure = attention.structure_of(
        model.config._attn_implementation, row.subtree_end_N, path.num_tokens if path else 0
    )
    output: Tensor = model(
        input_ids=row.input_ids_N[None],
        position_ids=row.position_ids_N[None],
        use_cache=False,
        logits_to_keep=row.target_row_T,
        forest=structure if path is None else attention.BelowPath(structure, path),
        **delta_net.recurrence_of(model, row.subtree_end_N, path),
    ).logits
    # A view whose backward pass, unlike that of [0], copies nothing.
    return output.squeeze(0) if output.dim() == 3 else output


def compute(
    model: PreTrainedModel,
    row: PackedRow,
    function: Callable[..., T],
    path: OpenPath | None = None,
) -> T:
    """Return a function's result on the logits of the row's targets or, with a `FusedLMHead`, on
    their hidden states, the head's weight and `bias_V`.
    """
    head, result = fused_head(model), None
    if head is None:
        return function(forward_rows(model, row, path))

    def head_fn(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        nonlocal result
        result = function(hidden_TD, weight_VD, bias_V=bias_V)
        return result.loss if isinstance(result, PolicyLoss) else result.logprob_T

    with head.running(head_fn):
        tensor = forward_rows(model, row, path)
    assert result is not None
    # The tensor as the model returns it: FSDP's hooks are there.
    if isinstance(result, PolicyLoss):
        return replace(result, loss=tensor)
    return replace(result, logprob_T=tensor)


@torch.no_grad()
def read_row(model: PreTrainedModel, row: PackedRow, path: OpenPath) -> None:
    """Read the trunk of an inner piece, whose keys, values and states the passes below need."""
    with replaying(model, row.routes_NLC):
        forward_rows(model, row, path)


def score_row(
    model: PreTrainedModel, row: PackedRow, temperature: float, path: OpenPath | None = None
) -> LogProbs:
    """Return log-probs and entropies [T] of the row's targets, within masks and along routes."""
    head = fused_head(model)
    score = partial(
        partial(logprobs)
        if head is None
        else partial(linear_logprobs, fp32_logits=head.fp32_logits),
        target_ids_T=row.target_ids_T,
        temperature=temperature,
        sampling_mask=row.sampling_mask,
    )
    with replaying(model, row.routes_NLC):
        return compute(model, row, score, path)


def row_loss(
    model: PreTrainedModel,
    row: PackedRow,
    spec: LossSpec | TokenLossFn,
    scale: float,
    temperature: float,
    path: OpenPath | None = None,
    lesson: Lesson | None = None,
) -> PolicyLoss:
    """Return the loss of a row with its weights times `scale`; if the head allows, only a chunk of
    logits exists at a time. Call it and its backward pass within `replaying`.

    Args:
        path: the open path, if the row is a piece of a walk.
        lesson: adds the divergence from a teacher; requires a `FusedLMHead`.
    """
    head, compact = fused_head(model), _compacts(row, spec)
    loss = partial(
        partial(policy_loss, inplace=True)
        if head is None
        else partial(linear_policy_loss, fp32_logits=head.fp32_logits, compact=compact),
        target_ids_T=row.target_ids_T,
        spec=spec,
        advantage_T=row.advantage_T,
        weight_T=row.loss_weight_T * scale,
        old_logprob_T=row.old_logprob_T,
        ref_logprob_T=row.ref_logprob_T,
        sampler_logprob_T=row.sampler_logprob_T,
        cu_seqlens_S1=row.cu_targets_S1,
        temperature=temperature,
        sampling_mask=row.sampling_mask,
    )
    if lesson is None:
        return compute(model, row, loss, path)
    assert head is not None
    weight_T = row.loss_weight_T * scale
    both = lesson.beside(loss, weight_T, temperature, head.fp32_logits)
    return compute(model, row, both, path)


def _compacts(row: PackedRow, spec: LossSpec | TokenLossFn) -> bool:
    """Return whether the products skip targets without weight. A GPU skips them only if there may
    be some, because the host must wait for their number; a CPU also skips those without gradient.
    """
    drops = isinstance(spec, LossSpec) and spec.mis is not None
    return row.has_idle_targets or drops or row.target_ids_T.device.type == "cpu"


# ---- losses of a row in pieces


def looks_at_sequences(spec: LossSpec | TokenLossFn) -> bool:
    """Return whether a token's loss depends on other tokens."""
    return not (isinstance(spec, LossSpec) and spec.is_fused)


def loss_of_scores(
    row: PackedRow, scores: LogProbs, spec: LossSpec | TokenLossFn, scale: float
) -> TokenLoss:
    """Return the loss of each target of a row and its slopes, given the scores of all targets."""
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
    """Make a loss function of the known losses of a row's targets."""
    known = {f.name: getattr(whole, f.name) for f in fields(whole)}
    if target_M is not None:
        target_M = copied(target_M, whole.loss_T.device)
    part: dict[str, Any] = {n: x if x is None else x[target_M] for n, x in known.items()}
    return lambda _tokens: TokenLoss(**part)
