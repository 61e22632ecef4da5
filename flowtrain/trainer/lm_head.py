"""The model's output layer, made to give the loss where it would have given logits.

FSDP gathers the head's weight for the forward pass of the whole model and for no longer. So the
loss is taken in there: the output layer calls a function on the hidden states of the target rows,
and the model returns the function's result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.attention.flex import padded
from flowtrain.trainer.model import delta_net
from flowtrain.trainer.packing import PackedRow
from flowtrain.trainer.walk import OpenPath

HeadFn = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(hidden states [T, D], weight [V, D], bias [V] or None) -> anything; it comes back in the place
of the logits."""


class FusedLMHead(nn.Linear):
    """A linear output layer that calls the function it is given in place of its product."""

    head_fn: HeadFn | None = None
    fp32_logits = False
    """Logits of a 16-bit head are not rounded to 16 bits before they are read."""

    def forward(self, hidden: Tensor) -> Tensor:
        return (
            super().forward(hidden)
            if self.head_fn is None
            else self.head_fn(hidden.squeeze(0), self.weight, self.bias)
        )

    @contextmanager
    def running(self, head_fn: HeadFn) -> Iterator[None]:
        self.head_fn = head_fn
        try:
            yield
        finally:
            self.head_fn = None


def equip(model: PreTrainedModel, fp32_logits: bool = False) -> None:
    """Make the output layer a `FusedLMHead` where logits are just its product; before the
    model is sharded, whether or not it has weights yet.

    A model that does something to its logits afterwards (caps or scales them) keeps its layer, and
    `fused_head` gives None for it: a loss taken within would go through that as well.
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


def run_head(
    model: PreTrainedModel,
    head: FusedLMHead,
    row: PackedRow,
    head_fn: HeadFn,
    path: OpenPath | None = None,
) -> Tensor:
    """Call the function on the hidden states of the row's targets."""
    with head.running(head_fn):
        return forward(model, row, path)


def forward(model: PreTrainedModel, row: PackedRow, path: OpenPath | None = None) -> Tensor:
    """The model's output for the row's targets: logits [1, T, V], or the head function's result.

    `path`: of the walk that the row is a piece of.
    """
    row = padded(row) if row.input_ids_N.is_cuda else row
    path = path if path is not None and path.matters else None
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
    return output
