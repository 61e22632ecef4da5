"""Factors by which an algorithm multiplies advantages, which may depend on a whole mini-batch under
the weights that its update starts from: on all turns of a rollout, which lie in different rows and
on different ranks, or on how many tokens are left.

Suffixes: T target tokens, S samples; of all ranks where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from safetensors.torch import load, save
from torch import Tensor

from flowtrain.trainer.distributed import World
from flowtrain.trainer.packing import PackedRow

FactorFn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(log-ratio to the old policy [T], advantage [T], weight [T], bounds of sequences [S + 1]) ->
factor [T], on the same device."""


@dataclass(frozen=True, slots=True)
class MinibatchFactor:
    """A factor of advantages that depends on all tokens of a mini-batch."""

    of: FactorFn
    """Computes the factor; receives the samples in the order of their ids."""
    joins_turns: bool
    """The sequences are whole rollouts, their turns one after the other; else they are turns."""

    def scale(
        self, rows: Sequence[PackedRow], logprobs: Sequence[Tensor], world: World
    ) -> list[PackedRow]:
        """Multiply the advantages of this rank's rows; collective.

        Args:
            rows: of one mini-batch; their samples have ids.
            logprobs: [T] of each row, under the weights that the update starts from.
        """
        parts = [load(data) for data in world.gather_bytes(_encode(rows, logprobs))]
        ids_S3, length_S, value_3T = (
            torch.cat([part[name] for part in parts], dim=-1 if name == "value" else 0)
            for name in ("sample_id", "length", "value")
        )
        order = sorted(range(len(ids_S3)), key=ids_S3.tolist().__getitem__)
        lengths = length_S.tolist()
        pieces = value_3T.split(lengths, dim=1)
        sorted_3T = torch.cat([value_3T[:, :0], *(pieces[n] for n in order)], dim=1)
        bounds_S1 = _bounds(ids_S3[order], length_S[order], self.joins_turns)
        log_ratio_T, advantage_T, weight_T = sorted_3T.to(world.device)
        factor_T = self.of(log_ratio_T, advantage_T, weight_T, bounds_S1.to(world.device))
        found = factor_T.cpu().split([lengths[n] for n in order])
        by_id = {tuple(ids_S3[n].tolist()): factor for n, factor in zip(order, found, strict=True)}
        return [
            replace(
                row,
                advantage_T=row.advantage_T * torch.cat([by_id[each] for each in row.sample_ids]),
            )
            for row in rows
        ]


def _encode(rows: Sequence[PackedRow], logprobs: Sequence[Tensor]) -> bytes:
    """Encode the data of this rank's rows that other ranks need."""
    for row in rows:
        assert len(row.sample_ids) == len(row.cu_targets_S1) - 1, "samples of rollouts have ids"
    values = [
        torch.stack([logprob_T - row.old_logprob_T, row.advantage_T, row.loss_weight_T])
        for row, logprob_T in zip(rows, logprobs, strict=True)
    ]
    ids = [each for row in rows for each in row.sample_ids]
    lengths = [row.cu_targets_S1.diff() for row in rows]
    return save(
        {
            "sample_id": torch.tensor(ids, dtype=torch.int64).reshape(-1, 3),
            "length": torch.cat([torch.zeros(0, dtype=torch.int64), *lengths]),
            "value": torch.cat([torch.zeros(3, 0), *(value.float() for value in values)], 1),
        }
    )


def _bounds(ids_S3: Tensor, length_S: Tensor, joins_turns: bool) -> Tensor:
    """Bounds of the turns, or of the rollouts, within the tokens of samples in order."""
    ends = length_S.cumsum(0).tolist()
    if not joins_turns:
        return torch.tensor([0, *ends])
    rollouts = ids_S3[:, :2].tolist()
    last = [
        end
        for end, (mine, after) in zip(ends, pairwise([*rollouts, None]), strict=True)
        if mine != after
    ]
    return torch.tensor([0, *last])
