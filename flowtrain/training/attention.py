"""Attention over packed rows, for any Hugging Face decoder through its attention interface.

A row of N tokens is a forest (see `tree.py`). It falls into segments, runs of tokens without a
branch; the queries of a segment see the keys of its ancestors and, causally, its own. Attention
alone is computed on segments side by side, in blocks of similar shape padded to the largest of the
block, so that no N x N mask exists and hardly a FLOP is spent on padding or between branches;
everything else in the model runs on the row as it is. That is the way on a CPU; `flex.py` has that
on a GPU.

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

from flowtrain.training.exact_attention import KEYS, QUERIES, ExactForest
from flowtrain.training.flex import FlexTree
from flowtrain.training.tree import Segment, segments
from flowtrain.types import UserError

NAMES = {
    "auto": "flowtrain_auto",
    "sdpa": "flowtrain_sdpa",
    "flex": "flowtrain_flex",
    "flash": "flowtrain_fa4",  # transformers takes any name with "flash" in it for its own
    "exact": "flowtrain_exact",
}
"""Kinds of attention, as transformers knows them: on segments by torch's SDPA; by FlexAttention,
with Triton's kernels or with FlashAttention 4's; on segments in fixed blocks (`train.exact`); auto:
"flex" on a GPU, else "sdpa"."""
NAME = NAMES["auto"]
_SIMILAR = 4 / 3
"""Lengths in a block differ by less than this factor: more blocks mean less padding and more calls.
"""
_SHORT = 16
"""Queries up to this number count as alike: a block of its own would cost more than their padding.
"""

_LEFT_OUT = ("sliding_window", "softcap", "s_aux", "position_bias", "alibi")
"""What transformers hands to attention in some models, and trees do not compute."""


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


TreeAttention = Forest | FlexTree | ExactForest


def name_of(kind: str, device: torch.device) -> str:
    """The name of a kind, which must be one for this device."""
    if kind not in ("auto", "sdpa") and device.type != "cuda":
        raise UserError(f"train.attention = {kind!r} needs a GPU, and the model runs on {device}")
    return NAMES[kind]


def structure_of(name: str, subtree_end_N: Tensor) -> TreeAttention:
    """The structure of a row for this attention; on a GPU N is a multiple of `flex.BLOCK`."""
    if name == NAMES["auto"]:
        name = NAMES["flex" if subtree_end_N.is_cuda else "sdpa"]
    if name == NAMES["sdpa"]:
        return Forest.of(subtree_end_N)
    if name == NAMES["exact"]:
        return ExactForest(Forest.of(subtree_end_N, QUERIES, KEYS))
    assert name in NAMES.values(), f"{name}: any other attention would build an N x N mask"
    return FlexTree.of(subtree_end_N, flash=name == NAMES["flash"])


def forest_attention(
    module: nn.Module,
    query_1HND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    attention_mask: Tensor | None,
    *,
    forest: TreeAttention | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: object,
) -> tuple[Tensor, None]:
    """The attention function that Hugging Face calls in every layer; returns [1, N, H, D].

    Raises UserError when the model asks for what trees leave out, or keeps the row's structure.
    """
    asked = [name for name in _LEFT_OUT if others.get(name) is not None]
    if attention_mask is not None:
        asked.append("attention_mask")
    if not (getattr(module, "is_causal", True) and others.get("is_causal", True)):
        asked.append("is_causal=False")
    if asked:
        raise UserError(f"its attention wants {', '.join(asked)}")
    if forest is None:
        raise UserError("it does not hand the structure of a row on to its attention")
    return forest.attend(query_1HND, key_1HND, value_1HND, scaling=scaling, dropout=dropout), None


def _side_by_side(x_NHD: Tensor, token: Tensor, block: Block) -> Tensor:
    """[N, H, D] -> [S, H, Q or K, D]"""
    return (
        x_NHD.index_select(0, token).view(block.num_segments, -1, *x_NHD.shape[1:]).transpose(1, 2)
    )


for _name in NAMES.values():
    AttentionInterface.register(_name, forest_attention)
