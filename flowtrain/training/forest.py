"""Attention over a packed row on a CPU: its segments side by side.

A row of N tokens is a forest (see `tree.py`). It falls into segments, runs of tokens without a
branch; the queries of a segment see the keys of its ancestors and, causally, its own. Segments are
computed in blocks of similar shape padded to the largest of the block, so that no N x N mask exists
and hardly a FLOP is spent on padding or between branches.

S: segments of a block, Q: queries of its longest, K: keys of its longest, H: heads, D: head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flowtrain.training.tree import Segment, segments

_SIMILAR = 4 / 3
"""Lengths in a block differ by less than this factor: more blocks mean less padding and more calls.
"""
_SHORT = 16
"""Queries up to this number count as alike: a block of its own would cost more than their padding.
"""


@dataclass(frozen=True, slots=True)
class Block:
    """Segments of similar shape, side by side."""

    query_SQ: Tensor
    """int64 [S * Q], the token of the row in each slot; padding repeats the segment's first token.
    """
    key_SK: Tensor
    """int64 [S * K]: ancestors, then the segment itself; padding as above."""
    num_before_S: Tensor
    """int64, keys of each segment's ancestors."""
    mask_SQK: Tensor | None
    """bool [S, 1, Q, K]: query sees key. None where no segment has ancestors: padding comes last,
    so plain causal attention will do."""

    @property
    def num_segments(self) -> int:
        return len(self.num_before_S)


@dataclass(frozen=True, slots=True)
class Forest:
    """How a row falls into blocks. Made once per row, used by every layer."""

    blocks: tuple[Block, ...]
    slot_N: Tensor
    """int64, where token i is among the query slots of all blocks, one after another."""

    @classmethod
    def of(cls, subtree_end_N: Tensor, query_step: int = 1, key_step: int = 1) -> Forest:
        """Queries and keys of a block are padded to multiples of the steps."""
        device = subtree_end_N.device
        alike: dict[tuple[bool, int, int], list[Segment]] = {}
        for segment in segments(subtree_end_N.tolist()):
            alike.setdefault(_shape(segment), []).append(segment)
        slots, blocks, num_slots = [0] * len(subtree_end_N), [], 0
        for members in alike.values():
            most = _up(max(segment.num_queries for segment in members), query_step)
            for index, segment in enumerate(members):
                first = num_slots + index * most
                slots[segment.start : segment.end] = range(first, first + segment.num_queries)
            num_slots += len(members) * most
            blocks.append(_block(members, device, most, key_step))
        return cls(tuple(blocks), torch.tensor(slots, dtype=torch.int64, device=device))

    @torch.compiler.disable  # its loop is another one for every row
    def attend(
        self,
        query_1HND: Tensor,
        key_1HND: Tensor,
        value_1HND: Tensor,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """[1, N, H, D]"""
        query_NHD, key_NHD, value_NHD = (
            x[0].transpose(0, 1) for x in (query_1HND, key_1HND, value_1HND)
        )
        outs = []
        for block in self.blocks:
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
            outs.append(out_SHQD.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs).index_select(0, self.slot_N).unsqueeze(0)


def _shape(segment: Segment) -> tuple[bool, int, int]:
    """Segments of one shape go into one block."""
    return (
        bool(segment.ancestors),
        _size_class(max(segment.num_queries, _SHORT)),
        _size_class(segment.num_keys),
    )


def _size_class(length: int) -> int:
    return math.ceil(math.log(length, _SIMILAR))


def _up(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step


def _block(
    members: Sequence[Segment], device: torch.device, most_queries: int, key_step: int
) -> Block:
    most_keys = _up(max(s.num_keys for s in members), key_step)
    queries: list[int] = []
    keys: list[int] = []
    for segment in members:
        own = range(segment.start, segment.end)
        queries += [*own, *[segment.start] * (most_queries - segment.num_queries)]
        for start, end in segment.ancestors:
            keys += range(start, end)
        keys += [*own, *[segment.start] * (most_keys - segment.num_keys)]
    mask_SQK = None
    num_before_S = torch.tensor([s.num_keys - s.num_queries for s in members], device=device)
    if members[0].ancestors:
        place_Q, place_K = (
            torch.arange(most_queries, device=device),
            torch.arange(most_keys, device=device),
        )
        # A query of the padding sees more than its segment has, which nobody reads; one of the
        # segment never sees padding.
        mask_SQK = (place_K <= (num_before_S[:, None] + place_Q)[..., None])[:, None]
    query_SQ, key_SK = (
        torch.tensor(tokens, dtype=torch.int64, device=device) for tokens in (queries, keys)
    )
    return Block(query_SQ, key_SK, num_before_S, mask_SQK)


def _side_by_side(x_NHD: Tensor, token: Tensor, block: Block) -> Tensor:
    """[N, H, D] -> [S, H, Q or K, D]"""
    return (
        x_NHD.index_select(0, token).view(block.num_segments, -1, *x_NHD.shape[1:]).transpose(1, 2)
    )
