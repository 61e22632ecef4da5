"""Attention over a packed row on a CPU: its segments side by side.

A row of N tokens is a forest (see `packing.py`). A row consists of segments, runs of tokens without
a branch; the queries of a segment see the keys of its ancestors and, causally, its own. Segments
are computed in blocks of similar shape padded to the largest of the block, so that no N x N mask
exists and hardly a FLOP is spent on padding or between branches.

Under a window of W a token sees itself and the W - 1 before it on its path. Segments are then cut
into pieces of at most W tokens, and of a piece's ancestors the last W - 1 are left. A sink is a
score that joins a head's softmax without a value: one token more, which everybody sees.

S: segments of a block, Q: queries of its longest, K: keys of its longest, H: heads, D: head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from flowtrain.trainer.attention.rectangles import attend_below
from flowtrain.trainer.tree_shape import Segment, segments

_SIMILAR = 4 / 3
"""Lengths in a block differ by less than this factor: more blocks mean less padding and more calls.
"""
_SHORT = 16
"""Queries up to this number count as alike: a block of its own would cost more than their padding.
"""
_SINK_CHANNELS = 8
"""Channels that a sink adds: it takes one, and kernels on a GPU want multiples of this."""


@dataclass(frozen=True, slots=True)
class Block:
    """Segments of similar shape, side by side."""

    query_SQ: Tensor
    """int64 [S * Q], the token of the row in each slot; padding repeats the segment's first token.
    """
    key_SK: Tensor
    """int64 [S * K]: ancestors, then the segment itself; padding as above. Last comes the sink, if
    there is one: token N."""
    mask_SQK: Tensor | None
    """bool [S, 1, Q, K]: query sees key. None where no segment has ancestors or a sink: padding
    comes last, so plain causal attention will do."""
    num_segments: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a row falls into blocks under one window."""

    blocks: tuple[Block, ...]
    slot_N: Tensor
    """int64, where token i is among the query slots of all blocks, one after another."""


@dataclass(frozen=True, slots=True)
class Forest:
    """The segments of a row, and their layouts. Made once per row, used by every layer."""

    segments: tuple[Segment, ...]
    device: torch.device
    layouts: dict[tuple[int | None, bool, int], Layout] = field(default_factory=dict)
    """By window, whether there is a sink, and tokens that come before the row; those that a layer
    has asked for."""

    @classmethod
    def of(cls, subtree_end_N: Tensor) -> Forest:
        return cls(tuple(segments(subtree_end_N.tolist())), subtree_end_N.device)

    def layout(
        self, window: int | None = None, has_sink: bool = False, num_before: int = 0
    ) -> Layout:
        """Return the layout under a window; under one that hides nothing, that without.

        `num_before`: tokens that all of the row sees. Their keys come before its own, and they ask
        nothing.
        """
        key = (window, has_sink, num_before)
        if key not in self.layouts:
            longest = num_before + max((s.num_keys for s in self.segments), default=0)
            hides = window is None or longest > window
            make = self._layout if hides else self.layout
            self.layouts[key] = make(window if hides else None, has_sink, num_before)
        return self.layouts[key]

    def _layout(self, window: int | None, has_sink: bool, num_before: int) -> Layout:
        runs = [_behind(run, num_before) for run in self.segments] if num_before else self.segments
        num_keys = runs[-1].end if runs else 0
        sink = num_keys if has_sink else None
        alike: dict[tuple[bool, int, int], list[Segment]] = {}
        for segment in runs:
            for piece in [segment] if window is None else _pieces(segment, window):
                alike.setdefault(_shape(piece), []).append(piece)
        slots, blocks, num_slots = [0] * num_keys, [], 0
        for members in alike.values():
            most = max(segment.num_queries for segment in members)
            for index, segment in enumerate(members):
                first = num_slots + index * most
                slots[segment.start : segment.end] = range(first, first + segment.num_queries)
            num_slots += len(members) * most
            most_keys = max(segment.num_keys for segment in members)
            blocks.append(_block(members, self.device, (most, most_keys), window, sink, num_before))
        slot_N = torch.tensor(slots[num_before:], dtype=torch.int64, device=self.device)
        return Layout(tuple(blocks), slot_N)

    @torch.compiler.disable  # its loop is another one for every row
    def attend(
        self,
        query_1HND: Tensor,
        key_1HND: Tensor,
        value_1HND: Tensor,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        window: int | None = None,
        sink_H: Tensor | None = None,
        before: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Tensor:
        """[1, N, H, D]

        Args:
            before: keys and values of tokens of other passes that all of the row sees.
            window: how many tokens of its path one sees, itself among them; None: all.
            sink_H: a score of each head that takes a share of its softmax, and has no value.
        """
        scaling = query_1HND.shape[3] ** -0.5 if scaling is None else scaling
        if before:
            is_plain = window is None and sink_H is None and not dropout
            if is_plain and key_1HND.shape == value_1HND.shape:
                layout, tensors = self.layout(), (query_1HND, key_1HND, value_1HND)
                return attend_below(layout, scaling, *tensors, before)
            pairs = zip(*before, (key_1HND, value_1HND), strict=True)
            key_1HND, value_1HND = (torch.cat(parts, 2) for parts in pairs)
        num_before = key_1HND.shape[2] - query_1HND.shape[2]
        query_NHD, key_NHD, value_NHD = (
            x[0].transpose(0, 1) for x in (query_1HND, key_1HND, value_1HND)
        )
        if sink_H is not None:
            query_NHD, key_NHD, value_NHD = _with_sink(
                query_NHD, key_NHD, value_NHD, sink_H / scaling
            )
        layout, outs = self.layout(window, sink_H is not None, num_before), []
        for block in layout.blocks:
            query = _side_by_side(query_NHD, block.query_SQ, block)
            key, value = (_side_by_side(x, block.key_SK, block) for x in (key_NHD, value_NHD))
            out_SHQD = F.scaled_dot_product_attention(
                query,
                key,
                value,
                block.mask_SQK,
                dropout_p=dropout,
                is_causal=block.mask_SQK is None,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            outs.append(out_SHQD[..., : value_1HND.shape[3]].transpose(1, 2).flatten(0, 1))
        return torch.cat(outs).index_select(0, layout.slot_N).unsqueeze(0)


def _behind(segment: Segment, num_tokens: int) -> Segment:
    """Place a segment below so many tokens."""
    before = ((start + num_tokens, end + num_tokens) for start, end in segment.ancestors)
    start, end = segment.start + num_tokens, segment.end + num_tokens
    return Segment(start, end, ((0, num_tokens), *before))


def _pieces(segment: Segment, window: int) -> Iterator[Segment]:
    """Cut a segment into pieces of at most `window` tokens, each with the ancestors that its first
    token sees.
    """
    num_before = segment.num_keys - segment.num_queries
    for start in range(segment.start, segment.end, window):
        ancestors = (*segment.ancestors, (segment.start, start))
        position = num_before + start - segment.start
        hidden = max(0, position - (window - 1))
        yield Segment(start, min(start + window, segment.end), _without_first(ancestors, hidden))


def _without_first(ranges: Sequence[tuple[int, int]], number: int) -> tuple[tuple[int, int], ...]:
    """Leave off the first tokens of a path."""
    before = accumulate((end - start for start, end in ranges), initial=0)
    cut = [(a + max(0, number - n), b) for (a, b), n in zip(ranges, before, strict=False)]
    return tuple((start, end) for start, end in cut if start < end)


def _with_sink(
    query_NHD: Tensor, key_NHD: Tensor, value_NHD: Tensor, sink_H: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Append token N, whose product with a query is the sink of the query's head and whose value is
    zero: a new channel holds the sinks in queries, 1 in its key and 0 in the others.
    """
    sink_NH1 = sink_H.to(query_NHD.dtype).expand(len(query_NHD), -1)[..., None]
    query = torch.cat([query_NHD, F.pad(sink_NH1, (0, _SINK_CHANNELS - 1))], 2)
    key, value = (F.pad(x, (0, _SINK_CHANNELS, 0, 0, 0, 1)) for x in (key_NHD, value_NHD))
    key[-1, :, key_NHD.shape[2]] = 1.0
    return query, key, value


def _shape(segment: Segment) -> tuple[bool, int, int]:
    """Segments of one shape go into one block."""
    return (
        bool(segment.ancestors),
        _size_class(max(segment.num_queries, _SHORT)),
        _size_class(segment.num_keys),
    )


def _size_class(length: int) -> int:
    return math.ceil(math.log(length, _SIMILAR))


def _block(
    members: Sequence[Segment],
    device: torch.device,
    most: tuple[int, int],
    window: int | None,
    sink: int | None,
    num_before: int,
) -> Block:
    """`most`: queries and keys that each segment is padded to. `sink`: its token."""
    queries: list[int] = []
    keys: list[int] = []
    for segment in members:
        own = range(segment.start, segment.end)
        asks = range(segment.start - num_before, segment.end - num_before)
        queries += [*asks, *[asks.start] * (most[0] - segment.num_queries)]
        for start, end in segment.ancestors:
            keys += range(start, end)
        keys += [*own, *[segment.start] * (most[1] - segment.num_keys)]
        keys += [] if sink is None else [sink]
    mask_SQK = None
    place_Q, place_K = (torch.arange(number, device=device) for number in most)
    num_keys_S, num_queries_S = torch.tensor(
        [(s.num_keys, s.num_queries) for s in members], device=device
    ).T
    if members[0].ancestors or sink is not None:
        # Each query's own place among the keys; padding stays at the last.
        place_SQ = num_keys_S[:, None] - (num_queries_S[:, None] - place_Q).clamp(min=1)
        ahead_SQK = place_SQ[..., None] - place_K
        is_seen_SQK = ahead_SQK >= 0
        if window is not None:
            is_seen_SQK &= ahead_SQK < window
        mask_SQK = is_seen_SQK[:, None]
        mask_SQK = mask_SQK if sink is None else F.pad(mask_SQK, (0, 1), value=True)
    query_SQ, key_SK = (
        torch.tensor(tokens, dtype=torch.int64, device=device) for tokens in (queries, keys)
    )
    return Block(query_SQ, key_SK, mask_SQK, len(members))


def _side_by_side(x_NHD: Tensor, token: Tensor, block: Block) -> Tensor:
    """[N, H, D] -> [S, H, Q or K, D]"""
    return (
        x_NHD.index_select(0, token).view(block.num_segments, -1, *x_NHD.shape[1:]).transpose(1, 2)
    )
