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
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from flowkernels import SamplingMask
from torch import Tensor

from flowtrain.records import Sample, SampleId
from flowtrain.trainer.host_copies import copied
from flowtrain.trainer.tree_shape import heaviest_first, subtree_ends
from flowtrain.utils.prefixes import num_shared as _num_shared

Inputs = tuple[int, ...]
"""Token ids of a sample but the last, which is a target alone."""
_SHARES = 8
"""Rows that each of several ranks lays out, so that all can train as much."""


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
    """So many of its tokens are in the row before as well: what questions have in common."""
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
    """int32, the ids that log-probs are taken among, target after target; None: among all."""
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
    teacher: PackedRow | None = None
    """What a teacher reads in its place, with the same targets; None: the row itself."""
    likeliest_TK: Tensor | None = None
    """int32, the ids of the `Sample.likeliest` of each target; None where a sample has none."""
    likeliest_logprob_TK: Tensor | None = None
    """fp32"""
    num_route_conflicts: int = 0
    """How often a sample would have had other experts for a token that it shares."""

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """The sampling mask as the kernels take it."""
        if self.mask_ids_K is None or self.mask_offsets_T1 is None:
            return None
        return SamplingMask(self.mask_ids_K, self.mask_offsets_T1)

    @property
    def likeliest(self) -> tuple[Tensor, Tensor]:
        """A teacher's likeliest tokens and their log-probs."""
        assert self.likeliest_TK is not None and self.likeliest_logprob_TK is not None
        return self.likeliest_TK, self.likeliest_logprob_TK

    def to(self, device: torch.device) -> PackedRow:
        """Copy the row to a device; a teacher's row stays where it is."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        moved: dict[str, Any] = {n: copied(x, device) for n, x in values if isinstance(x, Tensor)}
        return replace(self, **moved)


def pack(
    samples: Sequence[Sample], num_minibatches: int, num_takers: int = 1
) -> list[list[PackedRow]]:
    """Return the rows of each optimizer step of a batch, for so many ranks that train: a single
    one, which repeats nothing, for one rank.
    """
    num_rows = 1 if num_takers == 1 else _SHARES
    return [
        pack_rows([s for s in samples if s.minibatch == index], num_rows)
        for index in range(num_minibatches)
    ]


def pack_rows(samples: Sequence[Sample], num_rows: int) -> list[PackedRow]:
    """Pack samples into about so many rows of like size, for ranks to share.

    All of a question are in one row, however long that is; a sample without an id is a question of
    its own. Rows repeat the common prefixes of questions, and questions with long ones share a row.
    """
    if num_rows == 1:
        return [pack_row(samples)] if samples else []
    inputs = [_inputs(sample) for sample in samples]
    order = _packing_order(inputs)
    questions: dict[Hashable, list[int]] = defaultdict(list)  # places in the order
    for place, index in enumerate(order):
        sample_id = samples[index].sample_id
        questions[("none", index) if sample_id is None else sample_id.group].append(place)

    def size(places: Sequence[int]) -> int:
        own = [inputs[order[place]] for place in places]
        return sum(map(len, own)) - sum(_shared_with_previous(own))

    sizes = [size(places) for places in questions.values()]
    limit = math.ceil(sum(sizes) / num_rows)
    rows, room = list[list[int]](), 0
    for places, num_tokens in zip(questions.values(), sizes, strict=True):
        if num_tokens > room:
            rows.append([])
            room = limit
        rows[-1] += places
        room -= num_tokens
    packed, last = list[PackedRow](), tuple[int, ...]()
    for places in rows:
        members = [order[place] for place in sorted(places)]
        own = [inputs[index] for index in members]
        layout = list(enumerate(_shared_with_previous(own)))
        row = _pack_row([samples[index] for index in members], own, layout)
        packed.append(replace(row, num_repeated_tokens=_num_shared(last, own[0])))
        last = own[-1]
    return packed


def pack_row(samples: Sequence[Sample], share: bool = True) -> PackedRow:
    """The trie of the samples' inputs, depth first, the largest of siblings first; targets are in
    the order of the samples.
    """
    inputs = [_inputs(sample) for sample in samples]
    order = _packing_order(inputs)
    shared = _shared_with_previous([inputs[index] for index in order], share)
    return _pack_row(samples, inputs, list(zip(order, shared, strict=True)))


def _shared_with_previous(inputs: Sequence[Inputs], share: bool = True) -> list[int]:
    """Count for each sequence the tokens that it begins with as the one before it."""
    return [_num_shared(a, b) if share else 0 for a, b in pairwise([(), *inputs])]


def _packing_order(inputs: Sequence[Inputs]) -> list[int]:
    """Sort the samples by their tokens, so that equal prefixes are adjacent."""
    return sorted(range(len(inputs)), key=inputs.__getitem__)


def _pack_row(
    samples: Sequence[Sample],
    inputs: Sequence[Inputs],
    layout: Sequence[tuple[int, int]],
) -> PackedRow:
    """`layout`: each sample in the order of packing, and how many tokens it shares with the one
    before; both take long to find where much is shared.
    """
    input_ids: list[int] = []
    position_ids: list[int] = []
    tokens_of: dict[int, list[int]] = {}
    path: list[int] = []  # where the tokens of the sequence before are
    for index, num_shared in layout:
        sequence = inputs[index]
        del path[num_shared:]
        path += range(len(input_ids), len(input_ids) + len(sequence) - num_shared)
        input_ids += sequence[num_shared:]
        position_ids += range(num_shared, len(sequence))
        tokens_of[index] = path[len(samples[index].prompt_ids) - 1 :]

    tokens_of_T = [token for index in range(len(samples)) for token in tokens_of[index]]
    order_N = heaviest_first(subtree_ends(position_ids))
    place_N = order_N.argsort()
    position_ids_N = torch.tensor(position_ids, dtype=torch.int64)[order_N]

    def targets(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)

    has_ref = bool(samples) and all(s.ref_logprobs for s in samples)
    sample_ids = tuple(s.sample_id for s in samples if s.sample_id is not None)
    assert len(sample_ids) in (0, len(samples)), "all samples of a row have an id, or none has"
    divisors = [s.divisor for s in samples if s.divisor is not None]
    assert len(divisors) in (0, len(samples)), "all samples of a row have a divisor, or none has"
    mask_ids_K, mask_offsets_T1 = _mask_tensors(samples)
    routes_NLC, num_route_conflicts = _routes(samples, layout)
    likeliest_TK, likeliest_logprob_TK = _likeliest(samples)
    return PackedRow(
        input_ids_N=torch.tensor(input_ids, dtype=torch.int64)[order_N],
        position_ids_N=position_ids_N,
        subtree_end_N=torch.tensor(subtree_ends(position_ids_N.tolist()), dtype=torch.int64),
        target_row_T=place_N[torch.tensor(tokens_of_T, dtype=torch.int64)],
        target_ids_T=torch.tensor([x for s in samples for x in s.response_ids], dtype=torch.int64),
        old_logprob_T=targets([x for s in samples for x in s.old_logprobs or s.logprobs]),
        sampler_logprob_T=targets([x for s in samples for x in s.logprobs]),
        advantage_T=targets([x for s in samples for x in s.advantages]),
        loss_weight_T=targets([x for s in samples for x in s.loss_weights]),
        cu_targets_S1=torch.tensor(
            [0, *accumulate(len(s.response_ids) for s in samples)], dtype=torch.int64
        ),
        num_unshared_tokens=sum(map(len, inputs)),
        has_idle_targets=any(0.0 in s.loss_weights for s in samples),
        ref_logprob_T=targets([x for s in samples for x in s.ref_logprobs]) if has_ref else None,
        sample_ids=sample_ids,
        divisor_S=targets(divisors) if divisors else None,
        mask_ids_K=mask_ids_K,
        mask_offsets_T1=mask_offsets_T1,
        routes_NLC=None if routes_NLC is None else routes_NLC[order_N],
        version_T=_versions(samples),
        teacher=_of_teacher(samples),
        likeliest_TK=likeliest_TK,
        likeliest_logprob_TK=likeliest_logprob_TK,
        num_route_conflicts=num_route_conflicts,
    )


def _of_teacher(samples: Sequence[Sample]) -> PackedRow | None:
    """The row of prompts that only a teacher reads; None where there are none."""
    if not any(sample.teacher_prompt_ids for sample in samples):
        return None
    return pack_row(
        [
            replace(
                sample,
                prompt_ids=sample.teacher_prompt_ids or sample.prompt_ids,
                teacher_prompt_ids=(),
                routes=None,
            )
            for sample in samples
        ]
    )


def _likeliest(samples: Sequence[Sample]) -> tuple[Tensor | None, Tensor | None]:
    """A teacher's likeliest tokens at all targets, and their log-probs."""
    found = [(len(s.response_ids), s.likeliest) for s in samples if s.likeliest is not None]
    if not found or len(found) < len(samples):
        return None, None
    ids = [torch.frombuffer(x.ids, dtype=torch.int32).view(num, -1) for num, x in found]
    logprobs = [torch.frombuffer(x.logprobs, dtype=torch.float32).view(num, -1) for num, x in found]
    return torch.cat(ids), torch.cat(logprobs)


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
    found = [torch.tensor(mask.ids, dtype=torch.int32) for mask in masks if mask is not None]
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


def _inputs(sample: Sample) -> Inputs:
    return sample.prompt_ids + sample.response_ids[:-1]
