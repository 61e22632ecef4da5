"""Attention over packed rows on a GPU: PyTorch's FlexAttention under the mask that `subtree_end`
spells out.

The kernel walks over blocks of 128 x 128 tokens and leaves out those where nobody sees anybody.
Which those are is worked out on the device from the ends of the subtrees, a block at a time: no N x
N mask exists. Rows are filled up to whole blocks with lone tokens, and the kernel is compiled for
any number of blocks, so a new batch compiles nothing. B: blocks of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from flowtrain.training.tree import PackedRow

BLOCK = 128
_TRITON: dict[str, Any] = {"IS_DIVISIBLE": True}
"""Options of the kernels: the compiler does not see that any N is a multiple of BLOCK, and would
check bounds at every access."""
_FLASH: dict[str, Any] = {"BACKEND": "FLASH"}


@dataclass(frozen=True, slots=True)
class FlexTree:
    """The structure of a row, as `forest.Forest`. Made once per row, used by every layer."""

    mask: BlockMask
    flash: bool = False
    """FlashAttention 4's kernels, which the package flash-attn-4 brings."""

    @classmethod
    def of(cls, subtree_end_N: Tensor, flash: bool = False) -> FlexTree:
        """N is a multiple of BLOCK."""
        num_tokens = len(subtree_end_N)
        assert num_tokens % BLOCK == 0, num_tokens
        subtree_end_N = subtree_end_N.int()  # read for every pair of a partial block
        end_BT = subtree_end_N.view(-1, BLOCK)
        start_B = torch.arange(0, num_tokens, BLOCK, device=subtree_end_N.device)
        is_before_BB = start_B < start_B[:, None]
        # In a block before one's own, the token whose subtree reaches furthest is seen by the first
        # query or nobody is by any.
        is_seen_BB = is_before_BB & (end_BT.amax(1) > start_B[:, None])
        is_whole_BB = is_before_BB & (end_BT.amin(1) >= start_B[:, None] + BLOCK)
        is_partial_BB = is_seen_BB & ~is_whole_BB | (start_B == start_B[:, None])

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < subtree_end_N[key])

        lists = (*_lists(is_partial_BB), *_lists(is_whole_BB))
        return cls(
            BlockMask.from_kv_blocks(
                *lists, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(num_tokens, num_tokens)
            ),
            flash,
        )

    @torch.compiler.disable  # a graph of its own, or every compiled layer would hold one
    def attend(
        self,
        query_1HND: Tensor,
        key_1HND: Tensor,
        value_1HND: Tensor,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        assert dropout == 0, "FlexAttention has no dropout"
        on_gpu = query_1HND.is_cuda
        attend: Any = _compiled() if on_gpu else flex_attention
        out: Tensor = attend(
            query_1HND,
            key_1HND,
            value_1HND,
            block_mask=self.mask,
            scale=scaling,
            enable_gqa=query_1HND.shape[1] != key_1HND.shape[1],
            kernel_options=dict(_FLASH if self.flash else _TRITON) if on_gpu else None,
        )
        return out.transpose(1, 2).contiguous()


def padded(row: PackedRow) -> PackedRow:
    """Pad a row to a multiple of BLOCK with lone tokens, which no other token or target reads."""
    num_tokens = len(row.input_ids_N)
    missing = -num_tokens % BLOCK
    own_end = torch.arange(
        num_tokens + 1, num_tokens + missing + 1, device=row.subtree_end_N.device
    )
    return replace(
        row,
        input_ids_N=F.pad(row.input_ids_N, (0, missing)),
        position_ids_N=F.pad(row.position_ids_N, (0, missing)),
        subtree_end_N=torch.cat([row.subtree_end_N, own_end]),
    )


@functools.cache
def _compiled() -> Callable[..., Any]:
    # A whole graph or an error: what is not compiled would build an N x N matrix.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _lists(is_in_BB: Tensor) -> tuple[Tensor, Tensor]:
    """(blocks of keys that each block of queries takes in, [1, 1, B]; which they are, [1, 1, B, B],
    the others behind them)
    """
    order_BB = is_in_BB.int().argsort(dim=1, descending=True, stable=True)
    return is_in_BB.sum(1, dtype=torch.int32)[None, None], order_BB.int()[None, None]
