"""Attention over packed rows on a GPU by FlashAttention's variable lengths: each segment of the
tree is a sequence of queries whose keys are those of its ancestors, gathered, and its own.

Pads nothing and compiles nothing, but copies each ancestor's keys for every segment below it, and
FlashAttention works on tiles of 64 or 128 queries: trees of short segments are dearer than under
FlexAttention (`flex.py`), single long chains cheaper. K: keys of all segments together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from flowtrain.training.tree import segments


@dataclass(frozen=True, slots=True)
class VarlenTree:
    """The structure of a row, as `attention.Forest`. Made once per row, used by every layer."""

    key_K: Tensor
    """int64, the tokens whose keys each segment sees, segment after segment."""
    cu_queries_S1: Tensor
    """int32, bounds of the segments among the tokens."""
    cu_keys_S1: Tensor
    """int32, bounds of the segments in `key_K`."""
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, subtree_end_N: Tensor) -> VarlenTree:
        device = subtree_end_N.device
        found = segments(subtree_end_N.tolist())
        keys = [
            torch.arange(start, end)
            for segment in found
            for start, end in (*segment.ancestors, (segment.start, segment.end))
        ]

        def bounds(sizes: list[int]) -> Tensor:
            return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)

        num_queries, num_keys = [s.num_queries for s in found], [s.num_keys for s in found]
        return cls(
            torch.cat(keys).to(device),
            bounds(num_queries),
            bounds(num_keys),
            max(num_queries),
            max(num_keys),
        )

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
        assert dropout == 0, "varlen_attn has no dropout"
        query_NHD = query_1HND[0].transpose(0, 1)
        key_KHD, value_KHD = (
            x[0].transpose(0, 1).index_select(0, self.key_K) for x in (key_1HND, value_1HND)
        )
        out_NHD = varlen_attn(
            query_NHD,
            key_KHD,
            value_KHD,
            self.cu_queries_S1,
            self.cu_keys_S1,
            self.most_queries,
            self.most_keys,
            scale=scaling,
            window_size=(-1, 0),  # causal, the last query beside the last key
        )
        assert isinstance(out_NHD, Tensor)
        return out_NHD[None]
