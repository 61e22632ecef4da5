"""Token trees: many samples in one row of N tokens, without padding, and what they have in common
once.

One int per token carries the structure: token j is visible to token i iff j <= i < subtree_end[j].
Samples whose inputs begin alike, as the turns and rollouts of a question do, share those tokens: a
row is the trie of its samples, depth first. Each token's hidden state depends on the tokens before
it in its own sample alone, so sharing changes nothing but the order of floating-point sums. The
trained tokens are listed apart, so the head runs on them alone.

Suffixes: N packed tokens, T target tokens, S samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from flowkernels import SamplingMask
from torch import Tensor

from flowtrain.records import Sample, SampleId
from flowtrain.utils.prefixes import num_shared as _num_shared

Inputs = tuple[int, ...]
"""Token ids of a sample but the last, which is a target alone."""
_ROW_TOKENS = 512
"""What a row costs beside its tokens, in tokens: it casts and gathers all weights and adds all
gradients up, 46 bytes of traffic per parameter, where a token takes 6 FLOPs per parameter."""
_SHARES = 8
"""Rows that a rank cuts what it has sampled into, or more, where several train."""
_EVENNESS = 0.5
"""How much more of that a full row costs than a short one, so that even rows are preferred. Below
2/3, or two half rows would be."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One packed row. Example: inputs (1, 2, 3), (1, 2, 4) and (5,) give input_ids_N = [1, 2, 3, 4,
    5], subtree_end_N = [4, 4, 3, 4, 5].
    """

    input_ids_N: Tensor
    """int64"""
    position_ids_N: Tensor
    """int64, position within its samples."""
    subtree_end_N: Tensor
    """int64, one past the last token that sees this one."""
    target_row_T: Tensor
    """int64, the token whose hidden state predicts the target; samples that share it have it in
    common."""
    target_ids_T: Tensor
    """int64"""
    old_logprob_T: Tensor
    """fp32, of the policy that the ratio is taken against: the sampler's until the trainer scores
    them itself."""
    sampler_logprob_T: Tensor
    """fp32, as recorded by the sampler."""
    advantage_T: Tensor
    """fp32"""
    loss_weight_T: Tensor
    """fp32, before division by the global sum."""
    cu_targets_S1: Tensor
    """int64, bounds of the samples within the targets: sample s has targets cu_targets[s] to
    cu_targets[s + 1] - 1."""
    num_unshared_tokens: int
    """Tokens that the samples would take without sharing."""
    num_repeated_tokens: int = 0
    """So many of its first tokens are in the row before as well, because a tree was cut there."""
    has_idle_targets: bool = False
    """Some targets have no weight; known on the host, so that nobody waits for a GPU to count."""
    ref_logprob_T: Tensor | None = None
    """fp32, of the reference policy; None until the trainer scores it, and where the loss has no KL
    term."""
    sample_ids: tuple[SampleId, ...] = ()
    """`Sample.sample_id` of each sample; () where they have none."""
    divisor_S: Tensor | None = None
    """fp32, `Sample.divisor` of each sample; None where they have none."""
    mask_ids_K: Tensor | None = None
    """int64, the ids that log-probs are taken among, target after target; None: among all."""
    mask_offsets_T1: Tensor | None = None
    """int64, bounds of each target's ids in `mask_ids_K`; a target without any was sampled from all
    ids."""
    routes_NLC: Tensor | None = None
    """uint8, or int16 of wide `Routes`: the experts that the sampler chose for each token, in each
    layer with a router; of samples that share a token those of the first in the order of packing.
    None where a sample has none: the tokens of the row go where the routers send them."""
    version_T: Tensor | None = None
    """int32, the version of the weights that sampled each target, -1 where it is unknown; None
    where no sample knows its versions."""
    num_route_conflicts: int = 0
    """How often a sample would have had other experts for a token that it shares."""

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """The sampling mask as the kernels take it."""
        if self.mask_ids_K is None or self.mask_offsets_T1 is None:
            return None
        return SamplingMask(self.mask_ids_K, self.mask_offsets_T1)

    def to(self, device: torch.device) -> PackedRow:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        moved: dict[str, Any] = {
            name: x.to(device, non_blocking=True) for name, x in values if isinstance(x, Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens start to end - 1 of the row, each the only child of the one before it."""

    start: int
    end: int
    ancestors: tuple[tuple[int, int], ...]
    """Token ranges from the root of the tree to the parent."""

    @property
    def num_queries(self) -> int:
        return self.end - self.start

    @property
    def num_keys(self) -> int:
        return self.num_queries + sum(end - start for start, end in self.ancestors)


def pack(
    samples: Sequence[Sample], num_minibatches: int, token_budget: int, num_takers: int = 1
) -> list[list[PackedRow]]:
    """Return the rows of each optimizer step of a batch, for so many ranks that train.

    One rank walks through a single row, which repeats nothing. Several share rows that spread
    evenly, cut where little is repeated.
    """
    num_rows = 1 if num_takers == 1 else _SHARES
    return [
        pack_rows([s for s in samples if s.minibatch == index], token_budget, num_rows=num_rows)
        for index in range(num_minibatches)
    ]


def pack_rows(
    samples: Sequence[Sample],
    token_budget: int,
    share: bool = True,
    num_rows: int | None = None,
) -> list[PackedRow]:
    """Pack samples into rows of at most `token_budget` tokens, in the order of their tokens, which
    puts beside each other what is alike.

    A sample longer than the budget gets a row of its own. The last response token is a target but
    never an input, so a sample takes len(prompt) + len(response) - 1 tokens, less what it shares
    with the one before it. A row repeats what its first sample shares with the one before, so trees
    are cut where that is little: between rollouts rather than within.

    Args:
        share: False is for comparison.
        num_rows: rows may have more tokens than the budget where so many rows hold all.
    """
    inputs = [_inputs(sample) for sample in samples]
    order = _packing_order(inputs)
    ordered = [inputs[index] for index in order]
    shared = _shared_with_previous(ordered, share)
    if num_rows is not None:
        num_tokens = sum(map(len, ordered)) - sum(shared)
        token_budget = max(token_budget, math.ceil(num_tokens / num_rows))
    starts = _row_starts(list(map(len, ordered)), shared, token_budget)
    return [
        _pack_row(
            [samples[index] for index in order[start:end]],
            ordered[start:end],
            list(enumerate([0, *shared[start + 1 : end]])),
            num_repeated_tokens=shared[start],
        )
        for start, end in pairwise([*starts, len(order)])
    ]


def _row_starts(lengths: Sequence[int], shared: Sequence[int], token_budget: int) -> list[int]:
    """Choose the samples that begin a row, so that rows repeat few tokens, are few, and even.

    Minimises the cost of all rows: by sample, over the rows that can end with it.

    Args:
        lengths: tokens of each sample, in the order of packing.
        shared: tokens that each has in common with the one before.
    """
    if sum(lengths) - sum(shared) <= token_budget:  # one row, which costs least
        return [0] if lengths else []
    # A row from sample a to b has ends[b] + offset_S[a] tokens, the fewer the later it begins.
    ends = list(accumulate(length - num for length, num in zip(lengths, shared, strict=True)))
    offset_S = torch.tensor(lengths) - torch.tensor(ends)
    offsets, shared_S = offset_S.tolist(), torch.tensor(shared)
    cost_S1 = torch.zeros(len(ends) + 1, dtype=torch.float64)
    starts: list[int] = []
    first = 0
    for last, end in enumerate(ends):
        while first < last and end + offsets[first] > token_budget:
            first += 1
        row = slice(first, last + 1)
        fill = (end + offset_S[row]).double() / token_budget
        costs = cost_S1[row] + shared_S[row] + _ROW_TOKENS * (1 + _EVENNESS * fill**2)
        cost_S1[last + 1] = costs.min()
        starts.append(first + int((costs == costs.min()).nonzero()[0]))  # of equals the first
    path = [len(starts)]
    while path[-1]:
        path.append(starts[path[-1] - 1])
    return path[:0:-1]


def _packing_order(inputs: Sequence[Inputs]) -> list[int]:
    """The samples in the order of their targets over all rows of `pack_rows`."""
    return sorted(range(len(inputs)), key=inputs.__getitem__)


def in_order(samples: Sequence[Sample], parts: Sequence[Tensor]) -> list[Tensor]:
    """Cut values of the targets of all rows of `pack_rows`, [T] each, into one tensor per sample,
    in the order of the samples.
    """
    order = _packing_order([_inputs(sample) for sample in samples])
    if not order:
        return []
    lengths = [len(samples[index].response_ids) for index in order]
    by_index = dict(zip(order, torch.cat(list(parts)).split(lengths), strict=True))
    return [by_index[index] for index in range(len(samples))]


def pack_row(samples: Sequence[Sample], share: bool = True) -> PackedRow:
    """The trie of the samples' inputs, depth first; targets are in the order of the samples."""
    inputs = [_inputs(sample) for sample in samples]
    order = _packing_order(inputs)
    shared = _shared_with_previous([inputs[index] for index in order], share)
    return _pack_row(samples, inputs, list(zip(order, shared, strict=True)))


def _shared_with_previous(inputs: Sequence[Inputs], share: bool) -> list[int]:
    """Count for each sequence the tokens that it begins with as the one before it."""
    return [_num_shared(a, b) if share else 0 for a, b in pairwise([(), *inputs])]


def _pack_row(
    samples: Sequence[Sample],
    inputs: Sequence[Inputs],
    layout: Sequence[tuple[int, int]],
    num_repeated_tokens: int = 0,
) -> PackedRow:
    """`layout`: each sample in the order of packing, and how many tokens it shares with the one
    before; both take long to find where much is shared.
    """
    input_ids: list[int] = []
    position_ids: list[int] = []
    rows_of: dict[int, list[int]] = {}
    path: list[int] = []  # where the tokens of the sequence before are
    for index, num_shared in layout:
        sequence = inputs[index]
        del path[num_shared:]
        path += range(len(input_ids), len(input_ids) + len(sequence) - num_shared)
        input_ids += sequence[num_shared:]
        position_ids += range(num_shared, len(sequence))
        rows_of[index] = path[len(samples[index].prompt_ids) - 1 :]

    def targets(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)

    has_ref = bool(samples) and all(s.ref_logprobs for s in samples)
    sample_ids = tuple(s.sample_id for s in samples if s.sample_id is not None)
    assert len(sample_ids) in (0, len(samples)), "all samples of a row have an id, or none has"
    divisors = [s.divisor for s in samples if s.divisor is not None]
    assert len(divisors) in (0, len(samples)), "all samples of a row have a divisor, or none has"
    mask_ids_K, mask_offsets_T1 = _mask_tensors(samples)
    routes_NLC, num_route_conflicts = _routes(samples, layout)
    return PackedRow(
        input_ids_N=torch.tensor(input_ids, dtype=torch.int64),
        position_ids_N=torch.tensor(position_ids, dtype=torch.int64),
        subtree_end_N=torch.tensor(_subtree_ends(position_ids), dtype=torch.int64),
        target_row_T=torch.tensor(
            [row for index in range(len(samples)) for row in rows_of[index]], dtype=torch.int64
        ),
        target_ids_T=torch.tensor([x for s in samples for x in s.response_ids], dtype=torch.int64),
        old_logprob_T=targets([x for s in samples for x in s.old_logprobs or s.logprobs]),
        sampler_logprob_T=targets([x for s in samples for x in s.logprobs]),
        advantage_T=targets([x for s in samples for x in s.advantages]),
        loss_weight_T=targets([x for s in samples for x in s.loss_weights]),
        cu_targets_S1=torch.tensor(
            [0, *accumulate(len(s.response_ids) for s in samples)], dtype=torch.int64
        ),
        num_unshared_tokens=sum(map(len, inputs)),
        num_repeated_tokens=num_repeated_tokens,
        has_idle_targets=any(0.0 in s.loss_weights for s in samples),
        ref_logprob_T=targets([x for s in samples for x in s.ref_logprobs]) if has_ref else None,
        sample_ids=sample_ids,
        divisor_S=targets(divisors) if divisors else None,
        mask_ids_K=mask_ids_K,
        mask_offsets_T1=mask_offsets_T1,
        routes_NLC=routes_NLC,
        version_T=_versions(samples),
        num_route_conflicts=num_route_conflicts,
    )


def _versions(samples: Sequence[Sample]) -> Tensor | None:
    """The versions of all targets."""
    if not any(sample.spans for sample in samples):
        return None
    parts = []
    for sample in samples:
        parts.append(torch.full((len(sample.response_ids),), -1, dtype=torch.int32))
        for span in sample.spans:
            parts[-1][span.start : span.end] = span.version
    return torch.cat(parts)


def _mask_tensors(samples: Sequence[Sample]) -> tuple[Tensor | None, Tensor | None]:
    """The sampling masks of all targets; None where every sample was drawn from all ids."""
    masks = [s.sampling_mask for s in samples]
    found = [torch.tensor(mask.ids, dtype=torch.int64) for mask in masks if mask is not None]
    if not found:
        return None, None
    counts = [
        count
        for s, mask in zip(samples, masks, strict=True)
        for count in ((0,) * len(s.response_ids) if mask is None else mask.counts)
    ]
    return torch.cat(found), torch.tensor([0, *accumulate(counts)], dtype=torch.int64)


def _routes(
    samples: Sequence[Sample], layout: Sequence[tuple[int, int]]
) -> tuple[Tensor | None, int]:
    """The routes of all tokens and their conflicts; None unless every sample has routes. `layout`
    is that of `_pack_row`.
    """
    parts: list[Tensor] = []
    path_NLC = torch.empty(0, 1, 1)
    num_conflicts = 0
    for index, num_shared in layout:
        routes = samples[index].routes
        if routes is None:
            return None, 0
        dtype = torch.int16 if routes.is_wide else torch.uint8
        words = torch.frombuffer(bytearray(routes.experts), dtype=dtype)
        own_NLC = words.view(-1, routes.num_layers, routes.num_chosen)
        assert len(own_NLC) == len(_inputs(samples[index])), "one route per token that is read"
        kept_NLC, other_NLC = path_NLC[:num_shared], own_NLC[:num_shared]
        if num_shared and not torch.equal(kept_NLC, other_NLC):
            # Their order means nothing.
            differs_NLC = kept_NLC.sort(-1).values != other_NLC.sort(-1).values
            num_conflicts += int(differs_NLC.any(2).any(1).sum())
        parts.append(own_NLC[num_shared:])
        path_NLC = torch.cat([kept_NLC, parts[-1]]) if num_shared else own_NLC
    return torch.cat(parts) if parts else None, num_conflicts


def empty_row() -> PackedRow:
    """A row that trains nothing, for a rank that has run out of rows while others still run
    collectives; it fits any loss.
    """
    row = pack_row([Sample((0,), (0,), (0.0,), (0.0,), (0.0,))])
    return replace(row, ref_logprob_T=row.old_logprob_T)


def segments(subtree_end: Sequence[int]) -> list[Segment]:
    """The runs of tokens without a branch, in order: within one, all subtrees end at the same
    place.
    """
    found: list[Segment] = []
    path: list[tuple[int, int]] = []
    start = 0
    for i in range(1, len(subtree_end) + 1):
        if i < len(subtree_end) and subtree_end[i] == subtree_end[start]:
            continue
        while path and subtree_end[path[-1][0]] <= start:
            path.pop()
        found.append(Segment(start, i, tuple(path)))
        path.append((start, i))
        start = i
    return found


def _inputs(sample: Sample) -> Inputs:
    return sample.prompt_ids + sample.response_ids[:-1]


def _subtree_ends(position_ids: Sequence[int]) -> list[int]:
    """Depth first, a token's subtree ends at the next token that is not deeper than it."""
    ends = [len(position_ids)] * len(position_ids)
    still_open: list[int] = []
    for i, depth in enumerate(position_ids):
        while still_open and position_ids[still_open[-1]] >= depth:
            ends[still_open.pop()] = i
        still_open.append(i)
    return ends
