"""Inference on rows, for log-probs or hidden states, in a single walk.

T: targets of a row, D: hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from flowkernels import LogProbs
from torch import Tensor
from transformers import PreTrainedModel

from flowtrain.trainer.distributed import World
from flowtrain.trainer.host_copies import copied
from flowtrain.trainer.loss import forward_rows, fused_head, score_row
from flowtrain.trainer.model.experts import replaying
from flowtrain.trainer.packing import PackedRow, empty_row
from flowtrain.trainer.walk import Kind, OpenPath, Pass, passes

T = TypeVar("T")


@torch.no_grad()
def score_walk(
    model: PreTrainedModel, walk: Sequence[Pass], temperature: float, device: torch.device
) -> LogProbs:
    """Return the scores of a walked row's targets in order, with one read of every piece."""
    scores = [score_row(model, row, temperature, path) for row, path in _pieces(walk, device)]
    columns = ([getattr(score, f.name) for score in scores] for f in fields(LogProbs))
    return LogProbs(*(_in_order(walk, parts) for parts in columns))


@torch.no_grad()
def states_of_walk(model: PreTrainedModel, walk: Sequence[Pass], device: torch.device) -> Tensor:
    """Return the hidden states [T, D] that a walked row's targets are predicted by, in the order of
    the row; every piece is read once. The head must be a `FusedLMHead`.
    """
    head, parts = fused_head(model), list[Tensor]()
    assert head is not None
    for row, path in _pieces(walk, device):
        with head.running(lambda hidden, *_: hidden), replaying(model, row.routes_NLC):
            parts.append(forward_rows(model, row, path))
    return _in_order(walk, parts)


def _pieces(walk: Sequence[Pass], device: torch.device) -> Iterator[tuple[PackedRow, OpenPath]]:
    """Yield each piece below its open path; it is read before the next is asked for."""
    path = OpenPath()
    for step in walk:
        if step.kind is Kind.LEAVE:
            path.leave()
            continue
        here = step.to(device)
        path.begin(here)
        yield here.row, path
        if step.kind is Kind.ENTER:
            path.enter()


def _in_order(walk: Sequence[Pass], parts: Sequence[Tensor]) -> Tensor:
    """Join what was read of each piece's targets, in the order of the row."""
    targets = [s.target_M for s in walk if s.kind is not Kind.LEAVE and s.target_M is not None]
    if not targets:
        return parts[0]
    return torch.cat(list(parts))[copied(torch.cat(targets).argsort(), parts[0].device)]


@dataclass(frozen=True, slots=True)
class RowReader:
    """Runs inference on the rows of all ranks in lockstep."""

    world: World
    token_budget: int | None
    temperature: float
    follows_routes: bool
    """Whether rows with routes replay these routes."""

    def followed(self, row: PackedRow) -> PackedRow:
        """Return the row with the routes to follow."""
        return row if self.follows_routes else replace(row, routes_NLC=None)

    def walk(self, row: PackedRow) -> list[Pass]:
        return passes(row, self.token_budget)

    def idle(self, learns: bool) -> Pass:
        """Return an empty pass, for a rank that has none while others have one."""
        row = empty_row().to(self.world.device)
        return Pass(Kind.ONCE, row) if learns else Pass(Kind.ENTER, row, None, row.target_row_T)

    def score(self, model: PreTrainedModel, rows: Sequence[PackedRow]) -> list[LogProbs]:
        """Return the scores of all rows' targets; collective, with any number of rows per rank."""
        device = self.world.device
        return self._each(
            model, rows, lambda walk: score_walk(model, walk, self.temperature, device)
        )

    def states(self, model: PreTrainedModel, rows: Sequence[PackedRow]) -> list[Tensor]:
        """Return the hidden states of every row's targets, [T, D] each; collective likewise."""
        return self._each(model, rows, lambda walk: states_of_walk(model, walk, self.world.device))

    def _each(
        self,
        model: PreTrainedModel,
        rows: Sequence[PackedRow],
        read: Callable[[Sequence[Pass]], T],
    ) -> list[T]:
        walks = [self.walk(self.followed(row)) for row in rows]
        num_own = sum(step.kind is not Kind.LEAVE for walk in walks for step in walk)
        (most,) = self.world.max([num_own])  # before the passes, for which ranks wait elsewhere
        found = [read(walk) for walk in walks]
        for _ in range(int(most) - num_own):
            score_row(model, self.idle(True).row, self.temperature)
        return found
