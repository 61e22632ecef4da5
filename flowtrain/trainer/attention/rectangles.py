"""Attention of a piece of a walk on a CPU: to what comes before it, and to itself, then merged.

Everything in the piece sees all of the open path. So what it sees of an open piece is a dense
rectangle, one plain call of the library, whose keys are read where they lie; what it sees of itself
are the blocks of `forest.py`. A part gives its output and the log-sum-exp (lse) of its scores, and
out = sum_i exp(lse_i - lse) out_i. Backward, a part's call with the merged out and lse gives just
its share of the gradients: its probabilities are exp(score - lse), and dO . out is that of all.

N: tokens of the piece, P: tokens of an open piece, H: heads of queries, K: of keys, D: head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flowtrain.trainer.attention.forest import Block, Layout

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_below(
    layout: Layout,
    scaling: float,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    before: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """Return [1, N, H, D].

    Args:
        layout: of the piece alone.
        before: keys and values [1, K, P, D] of each open piece.
    """
    flat = [tensor for pair in before for tensor in pair]
    out: Tensor = _Attention.apply(layout, scaling, query_1HND, key_1KND, value_1KND, *flat)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layout: Layout,
        scaling: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *before: Tensor,
    ) -> Tensor:
        num_queries = query.shape[1] // key.shape[1]
        outs, lses = [], []
        for block in layout.blocks:
            part = _forward(*_of_block(block, query, key, value), **_how(block, query, scaling))
            outs.append(part[0].transpose(1, 2).flatten(0, 1))
            lses.append(part[1].transpose(1, 2).flatten(0, 1))
        outs_NHD = [torch.cat(outs)[layout.slot_N]]
        lses_NH = [torch.cat(lses)[layout.slot_N]]
        for open_key, open_value in zip(before[::2], before[1::2], strict=True):
            repeated = (x.repeat_interleave(num_queries, 1) for x in (open_key, open_value))
            out_1HND, lse_1HN = _forward(query, *repeated, scale=scaling)
            outs_NHD.append(out_1HND[0].transpose(0, 1))
            lses_NH.append(lse_1HN[0].T)
        lse_NH = torch.stack(lses_NH).logsumexp(0)
        shares_NH = (torch.stack(lses_NH) - lse_NH).exp()  # fp32 in 16-bit passes, as lse is
        parts = zip(outs_NHD, shares_NH, strict=True)
        merged_NHD = torch.stack([out * share[..., None] for out, share in parts]).sum(0)
        out_NHD = merged_NHD.to(query.dtype)
        ctx.layout, ctx.scaling = layout, scaling
        ctx.save_for_backward(query, key, value, out_NHD, lse_NH, *before)
        return out_NHD[None]

    @staticmethod
    def backward(ctx: Any, dout_1NHD: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out_NHD, lse_NH, *before = ctx.saved_tensors
        layout, scaling, dout_NHD = ctx.layout, ctx.scaling, dout_1NHD[0]
        num_keys, num_queries = key.shape[1], query.shape[1] // key.shape[1]

        def of_keys(gradient_SHKD: Tensor) -> Tensor:
            """Sum over the queries of each head of keys."""
            return gradient_SHKD.unflatten(1, (num_keys, num_queries)).sum(2)

        dkey_NKD, dvalue_NKD = (torch.zeros_like(x[0].transpose(0, 1)) for x in (key, value))
        dslots = []
        for block, is_filled in _slots(layout, dout_NHD.device):
            dout, out, lse = (x[block.query_SQ] for x in (dout_NHD, out_NHD, lse_NH))
            dout = dout * is_filled[:, None, None].to(dout.dtype)  # padding asks for nothing
            merged = (
                x.unflatten(0, (block.num_segments, -1)).transpose(1, 2) for x in (dout, out, lse)
            )
            dout_SHQD, out_SHQD, lse_SHQ = merged
            how = _how(block, query, scaling)
            causal, tensors = how.pop("is_causal"), _of_block(block, query, key, value)
            dquery, *dpair = _backward(dout_SHQD, *tensors, out_SHQD, lse_SHQ, 0.0, causal, **how)
            dslots.append(dquery.transpose(1, 2).flatten(0, 1))
            for total, gradient in zip((dkey_NKD, dvalue_NKD), dpair, strict=True):
                total.index_add_(0, block.key_SK, of_keys(gradient).transpose(1, 2).flatten(0, 1))
        dquery_1HND = torch.cat(dslots)[layout.slot_N].transpose(0, 1)[None]
        dout_1HND, out_1HND = (x.transpose(0, 1)[None] for x in (dout_NHD, out_NHD))
        dbefore: list[Tensor] = []
        for pair in zip(before[::2], before[1::2], strict=True):
            tensors = (query, *(x.repeat_interleave(num_queries, 1) for x in pair))
            of_all = (out_1HND, lse_NH.T[None])
            dquery, *dpair = _backward(dout_1HND, *tensors, *of_all, 0.0, False, scale=scaling)
            dquery_1HND = dquery_1HND + dquery
            dbefore += map(of_keys, dpair)
        dpair_1KND = (x.transpose(0, 1)[None] for x in (dkey_NKD, dvalue_NKD))
        return None, None, dquery_1HND, *dpair_1KND, *dbefore


def _of_block(block: Block, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values of a block, [S, H, Q or K, D]."""
    num_queries = query.shape[1] // key.shape[1]

    def side_by_side(x_1HND: Tensor, token: Tensor) -> Tensor:
        return x_1HND[0][:, token].unflatten(1, (block.num_segments, -1)).transpose(0, 1)

    keys = (side_by_side(x, block.key_SK).repeat_interleave(num_queries, 1) for x in (key, value))
    return side_by_side(query, block.query_SQ), *keys


def _how(block: Block, query: Tensor, scaling: float) -> dict[str, Any]:
    mask = block.mask_SQK
    if mask is not None:
        mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    return {"is_causal": mask is None, "attn_mask": mask, "scale": scaling}


def _slots(layout: Layout, device: torch.device) -> Iterator[tuple[Block, Tensor]]:
    """Yield each block, and which of its slots for queries hold a token of their own."""
    sizes = [len(block.query_SQ) for block in layout.blocks]
    is_filled = torch.zeros(sum(sizes), dtype=torch.bool, device=device)
    is_filled[layout.slot_N] = True
    yield from zip(layout.blocks, is_filled.split(sizes), strict=True)
