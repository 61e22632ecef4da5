"""Attention over packed rows, for any Hugging Face decoder through its attention interface.

A row of N tokens is a forest (see `tree.py`). It falls into segments, runs of tokens without a
branch; the queries of a segment see the keys of its ancestors and, causally, its own. Attention
alone is computed on segments side by side, in blocks of similar shape padded to the largest of the
block, so that no N x N mask exists and hardly a FLOP is spent on padding or between branches;
everything else in the model runs on the row as it is. That is the way on a CPU; `flex.py` has the
one on a GPU.

S: segments of a block, Q: queries of its longest, K: keys of its longest, H: heads, D: head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from flowtrain.training.flex import FlexTree

NAME = "flowtrain_forest"
_SIMILAR = 4 / 3
"""Lengths in a block differ by less than this factor: more blocks mean less padding and more calls.
"""
_SHORT = 16
"""Queries up to this number count as alike: a block of its own would cost more than their padding.
"""


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

    @property
    def shape(self) -> tuple[bool, int, int]:
        """Segments of one shape go into one block."""
        return (
            bool(self.ancestors),
            _size_class(max(self.num_queries, _SHORT)),
            _size_class(self.num_keys),
        )


@dataclass(frozen=True, slots=True)
class Block:
    """Segments of similar shape, side by side."""

    query_SQ: Tensor
    """int64 [S * Q], the token of the row in each slot; padding repeats the segment's first token.
    """
    key_SK: Tensor
    """int64 [S * K]: ancestors, then the segment itself; padding as above."""
    num_segments: int
    mask_SQK: Tensor | None
    """bool [S, 1, Q, K]: query sees key. None where no segment has ancestors: padding comes last,
    so plain causal attention will do."""


@dataclass(frozen=True, slots=True)
class Forest:
    """How a row falls into blocks. Made once per row, used by every layer."""

    blocks: tuple[Block, ...]
    slot_N: Tensor
    """int64, where token i is among the query slots of all blocks, one after another."""

    @classmethod
    def of(cls, subtree_end_N: Tensor) -> Forest:
        device = subtree_end_N.device
        alike: dict[tuple[bool, int, int], list[Segment]] = {}
        for segment in segments(subtree_end_N.tolist()):
            alike.setdefault(segment.shape, []).append(segment)
        slots, blocks, num_slots = [0] * len(subtree_end_N), [], 0
        for members in alike.values():
            most = max(segment.num_queries for segment in members)
            for index, segment in enumerate(members):
                first = num_slots + index * most
                slots[segment.start : segment.end] = range(first, first + segment.num_queries)
            num_slots += len(members) * most
            blocks.append(_block(members, device))
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


def _size_class(length: int) -> int:
    return math.ceil(math.log(length, _SIMILAR))


def _block(members: Sequence[Segment], device: torch.device) -> Block:
    most_queries, most_keys = max(s.num_queries for s in members), max(s.num_keys for s in members)
    queries: list[int] = []
    keys: list[int] = []
    for segment in members:
        own = range(segment.start, segment.end)
        queries += [*own, *[segment.start] * (most_queries - segment.num_queries)]
        for start, end in segment.ancestors:
            keys += range(start, end)
        keys += [*own, *[segment.start] * (most_keys - segment.num_keys)]
    mask_SQK = None
    if members[0].ancestors:
        num_before_S = torch.tensor([s.num_keys - s.num_queries for s in members], device=device)
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
    return Block(query_SQ, key_SK, len(members), mask_SQK)


def forest_attention(
    module: nn.Module,
    query_1HND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    attention_mask: Tensor | None,
    *,
    forest: Forest | FlexTree,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function that Hugging Face calls in every layer; returns [1, N, H, D]."""
    assert attention_mask is None, "packed rows carry their structure in `forest`"
    return forest.attend(query_1HND, key_1HND, value_1HND, scaling=scaling, dropout=dropout), None


def _side_by_side(x_NHD: Tensor, token: Tensor, block: Block) -> Tensor:
    """[N, H, D] -> [S, H, Q or K, D]"""
    return (
        x_NHD.index_select(0, token).view(block.num_segments, -1, *x_NHD.shape[1:]).transpose(1, 2)
    )


AttentionInterface.register(NAME, forest_attention)
