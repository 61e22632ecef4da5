"""Packed rows: many samples in one row of N tokens, without padding.

One int per token carries the structure: token j is visible to token i iff j <= i < subtree_end[j]. Packing is a forest of chains (every
token's subtree ends where its sample ends); prefix sharing and branching are the same array with other numbers. The trained tokens are
listed apart, so the head runs on them alone.

Suffixes: N packed tokens, T target tokens, S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from flowtrain.types import Sample


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row. Example: two samples of 3 and 2 input tokens give subtree_end_N = [3, 3, 3, 5, 5]."""

    input_ids_N: Tensor
    """int64"""
    position_ids_N: Tensor
    """int64, position within its own sample."""
    subtree_end_N: Tensor
    """int64, one past the last token that sees this one."""
    target_row_T: Tensor
    """int64, the token whose hidden state predicts the target."""
    target_ids_T: Tensor
    """int64"""
    old_logprob_T: Tensor
    """fp32, of the policy that the ratio is taken against: the sampler's until the trainer scores them itself."""
    sampler_logprob_T: Tensor
    """fp32, as recorded by the sampler."""
    advantage_T: Tensor
    """fp32"""
    weight_T: Tensor
    """fp32, before division by the global sum."""
    cu_targets_S1: Tensor
    """int64, bounds of the samples within the targets: sample s has targets cu_targets[s] to cu_targets[s + 1] - 1."""
    ref_logprob_T: Tensor | None = None
    """fp32, of the reference policy; None until the trainer scores it, and where the loss has no KL term."""

    def to(self, device: torch.device) -> Row:
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: x.to(device, non_blocking=True) for name, x in tensors.items() if x is not None})


def pack(samples: Sequence[Sample], num_minibatches: int, token_budget: int) -> list[list[Row]]:
    """The rows of each optimizer step of a batch."""
    return [pack_rows([s for s in samples if s.minibatch == index], token_budget) for index in range(num_minibatches)]


def pack_rows(samples: Sequence[Sample], token_budget: int) -> list[Row]:
    """Pack samples into rows of at most `token_budget` tokens, longest first, each into the fullest row that still takes it.

    A sample longer than the budget gets a row of its own. The last response token is a target but never an input, so a sample takes
    len(prompt) + len(response) - 1 tokens.
    """
    bins: list[list[Sample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=_num_inputs, reverse=True):
        size = _num_inputs(sample)
        fitting = [i for i, free in enumerate(room) if free >= size]
        if fitting:
            best = min(fitting, key=room.__getitem__)
            bins[best].append(sample)
            room[best] -= size
        else:
            bins.append([sample])
            room.append(token_budget - size)
    return [pack_row(members) for members in bins]


def pack_row(samples: Sequence[Sample]) -> Row:
    """All samples one after another in one row."""
    input_ids: list[int] = []
    position_ids: list[int] = []
    subtree_end: list[int] = []
    target_row: list[int] = []
    for sample in samples:
        start, size, num_targets = len(input_ids), _num_inputs(sample), len(sample.response_ids)
        input_ids += sample.prompt_ids + sample.response_ids[:-1]
        position_ids += range(size)
        subtree_end += [start + size] * size
        target_row += range(start + size - num_targets, start + size)

    def targets(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)

    logprob_T = targets([x for s in samples for x in s.logprobs])
    return Row(
        input_ids_N=torch.tensor(input_ids, dtype=torch.int64),
        position_ids_N=torch.tensor(position_ids, dtype=torch.int64),
        subtree_end_N=torch.tensor(subtree_end, dtype=torch.int64),
        target_row_T=torch.tensor(target_row, dtype=torch.int64),
        target_ids_T=torch.tensor([x for s in samples for x in s.response_ids], dtype=torch.int64),
        old_logprob_T=logprob_T,
        sampler_logprob_T=logprob_T,
        advantage_T=targets([s.advantage for s in samples for _ in s.response_ids]),
        weight_T=targets([x for s in samples for x in s.weights]),
        cu_targets_S1=torch.tensor([0, *accumulate(len(s.response_ids) for s in samples)], dtype=torch.int64),
    )


def empty_row() -> Row:
    """A row that trains nothing, for a rank that has run out of rows while others still run collectives; it fits any loss."""
    row = pack_row([Sample((0,), (0,), (0.0,), 0.0, (0.0,))])
    return replace(row, ref_logprob_T=row.old_logprob_T)


def tree_bounds(subtree_end_N: Tensor) -> list[int]:
    """Edges of the trees of a row: [0, end of the first tree, ..., N]. Tokens of different trees never see each other."""
    ends = subtree_end_N.tolist()
    bounds = [0]
    while bounds[-1] < len(ends):
        bounds.append(ends[bounds[-1]])
    return bounds


def is_valid_tree(subtree_end_N: Tensor) -> bool:
    """Every subtree holds at least its own token and lies within its parent's: the condition for the array to describe a forest."""
    ends = subtree_end_N.tolist()
    open_ends: list[int] = []
    for i, end in enumerate(ends):
        while open_ends and open_ends[-1] <= i:
            open_ends.pop()
        if not i < end <= (open_ends[-1] if open_ends else len(ends)):
            return False
        open_ends.append(end)
    return all(a < b for a, b in pairwise(tree_bounds(subtree_end_N)))


def _num_inputs(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids) - 1
