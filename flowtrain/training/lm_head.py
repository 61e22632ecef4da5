"""The model's output layer, made to give the loss where it would have given logits.

FSDP gathers the head's weight for the forward pass of the whole model and for no longer. So the
loss is taken in there: the output layer runs a task on the hidden states of the target rows, and
the model returns what the task returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flowtrain.training import attention
from flowtrain.training.attention import Forest
from flowtrain.training.flex import FlexTree, padded
from flowtrain.training.tree import PackedRow, empty_row

Task = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(hidden states [T, D], weight [V, D], bias [V] or None) -> anything; it comes back in the place
of the logits."""


class TaskHead(nn.Linear):
    """A linear output layer that runs the task it is given, and is itself without one."""

    task: Task | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        return (
            super().forward(hidden)
            if self.task is None
            else self.task(hidden.squeeze(0), self.weight, self.bias)
        )

    @contextmanager
    def running(self, task: Task) -> Iterator[None]:
        self.task = task
        try:
            yield
        finally:
            self.task = None


def equip(model: PreTrainedModel) -> None:
    """Make the output layer a `TaskHead` where logits are its product and nothing more; before the
    model is sharded.

    A model that does something to its logits afterwards (caps or scales them) keeps its layer, and
    `task_head` gives None for it: a loss taken within would go through that as well.
    """
    if type(model.get_output_embeddings()) is not nn.Linear:
        return
    model.get_output_embeddings().__class__ = (
        TaskHead  # in place: a tied weight stays tied, and names stay the same
    )
    head = task_head(model)
    assert head is not None
    with torch.no_grad():
        given = run_head(
            model, head, empty_row(), lambda hidden, weight, bias: torch.full_like(hidden, 100.0)
        )
    if not bool((given == 100).all()):
        model.get_output_embeddings().__class__ = nn.Linear


def task_head(model: PreTrainedModel) -> TaskHead | None:
    head = model.get_output_embeddings()
    return head if isinstance(head, TaskHead) else None


def run_head(model: PreTrainedModel, head: TaskHead, row: PackedRow, task: Task) -> Tensor:
    """What the task makes of the hidden states of the row's targets."""
    with head.running(task):
        return forward(model, row)


def forward(model: PreTrainedModel, row: PackedRow) -> Tensor:
    """The model's output for the row's targets: logits [1, T, V], or what the head's task returns."""
    assert model.config._attn_implementation == attention.NAME, (
        "any other attention would build an N x N mask"
    )
    on_gpu = row.input_ids_N.is_cuda
    row = padded(row) if on_gpu else row
    output: Tensor = model(
        input_ids=row.input_ids_N[None],
        position_ids=row.position_ids_N[None],
        use_cache=False,
        logits_to_keep=row.target_row_T,
        forest=(FlexTree if on_gpu else Forest).of(row.subtree_end_N),
    ).logits
    return output
