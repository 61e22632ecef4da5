"""Attention in parts: dense rectangles, in which all of the queries see all of the keys, and the
rest, then merged.

Everything in a piece of a walk sees all of the open path, and everything below a tree's root all of
the root. So each is one plain call of a library, whose keys are read where they lie: cuDNN's on a
GPU, torch's own on a CPU. A part gives its output and the log-sum-exp (lse) of its scores, and out
= sum_i exp(lse_i - lse) out_i. Backward, a library's call with the merged out and lse gives just
its share of the gradients: its probabilities are exp(score - lse), and dO . out is that of all.

N: tokens that ask, P: tokens of a rectangle's keys, H: heads of queries, K: of keys, D: head size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flowtrain.trainer.attention.forest import Block, Layout

Pair = tuple[Tensor, Tensor]
"""Keys and values of a rectangle, [1, K, P, D]."""
_aten: Any = torch.ops.aten
_forward = _aten._scaled_dot_product_flash_attention_for_cpu
_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_below(
    layout: Layout,
    scaling: float,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    before: Sequence[Pair],
) -> Tensor:
    """Return the attention of a piece to itself, by the blocks of `forest.py`, and to each open
    piece, on a CPU: [1, N, H, D].

    Args:
        layout: of the piece alone.
        before: of the open pieces.
    """
    flat = [tensor for pair in before for tensor in pair]
    out: Tensor = _Blocks.apply(layout, scaling, query_1HND, key_1KND, value_1KND, *flat)
    return out


def join(
    out_1HND: Tensor, lse_1HN: Tensor, query_1HND: Tensor, pairs: Sequence[Pair], scaling: float
) -> Tensor:
    """Add what queries see in rectangles to what they see besides: [1, H, N, D].

    Args:
        out_1HND: attention to the rest.
        lse_1HN: fp32, of the rest's scores; its gradient is asked for, too.
    """
    flat = [tensor for pair in pairs for tensor in pair]
    out: Tensor = _Joined.apply(scaling, out_1HND, lse_1HN, query_1HND, *flat)
    return out


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scaling: float, rest: Tensor, rest_lse: Tensor, query: Tensor, *flat: Tensor
    ) -> Tensor:
        merge = _on_device(_merged, query)
        out, lse = rest.to(rest_lse.dtype), rest_lse
        ctx.states = []
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            part, part_lse, state = _attend(query, key, value, scaling)
            out, lse = merge(out, lse, part, part_lse)
            ctx.states.append(state)
        out = out.to(query.dtype)
        ctx.scaling = scaling
        ctx.save_for_backward(rest, rest_lse, query, out, lse, *flat)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        rest, rest_lse, query, out, lse, *flat = ctx.saved_tensors
        dout, dquery, dflat = dout.contiguous(), torch.zeros_like(query), list[Tensor]()
        for key, value, state in zip(flat[::2], flat[1::2], ctx.states, strict=True):
            given = dout, query, key, value, out, lse
            dpart, *dpair = _attend_backward(given, state, ctx.scaling)
            dquery += dpart
            dflat += dpair
        drest, drest_lse = _on_device(_share, query)(dout, rest, rest_lse, out, lse)
        return None, drest, drest_lse, dquery, *dflat


def _merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge a part into sums in the dtype of the lse, which is fp32 in 16-bit passes."""
    both = torch.logaddexp(lse, part_lse)
    return torch.lerp(out, part.to(out.dtype), (part_lse - both).exp()[..., None]), both


def _share(
    dout: Tensor, rest: Tensor, rest_lse: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rest's output and of its log-sum-exp."""
    weighted = dout * (rest_lse - lse).exp()[..., None]
    return weighted.to(dout.dtype), (weighted * (rest - out.to(weighted.dtype))).sum(-1)


def _on_device(function: Any, like: Tensor) -> Any:
    """Return a function of elements as it runs on a tensor's device: as one kernel on a GPU."""
    return _compiled(function) if like.is_cuda else function


@functools.cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Any:
    """(out [1, H, N, D], lse [1, H, N], what the backward call takes besides)"""
    if not query.is_cuda:
        return *_forward(query, *_for_queries(query, key, value), scale=scaling), ()
    # The function that chooses would take FlashAttention 2, which is slower on Hopper.
    attend = _aten._scaled_dot_product_cudnn_attention
    out, lse, *state, _ = attend(query, key, value, None, True, scale=scaling)
    return out, lse.view(query.shape[:3]), (lse.shape, *state)


def _attend_backward(given: Sequence[Tensor], state: Any, scaling: float) -> Any:
    """The gradients by queries, keys and values.

    `given`: the output's gradient, queries, keys, values, the merged output and lse.
    """
    dout, query, key, value, out, lse = given
    if not query.is_cuda:
        keys = _for_queries(query, key, value)
        dquery, *dpair = _backward(dout, query, *keys, out, lse, 0.0, False, scale=scaling)
        return dquery, *(_of_keys(x, key.shape[1]) for x in dpair)
    shape, *sequences, seed, offset = state
    backward = _aten._scaled_dot_product_cudnn_attention_backward
    lse = lse.contiguous().view(shape)
    found = dout, query, key, value, out.contiguous(), lse, seed, offset, None
    return backward(*found, *sequences, 0.0, False, scale=scaling)


def _for_queries(query: Tensor, *pair: Tensor) -> Iterator[Tensor]:
    """Keys and values once for each head of queries: torch's call for CPUs has no groups."""
    return (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in pair)


def _of_keys(gradient_SHKD: Tensor, num_heads: int) -> Tensor:
    """Sum over the queries of each head of keys."""
    return gradient_SHKD.unflatten(1, (num_heads, -1)).sum(2)


class _Blocks(torch.autograd.Function):
    """The merge over blocks as well, which have no lse with a gradient."""

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
        outs, lses = [], []
        for block in layout.blocks:
            part = _forward(*_of_block(block, query, key, value), **_how(block, query, scaling))
            outs.append(part[0].transpose(1, 2).flatten(0, 1))
            lses.append(part[1].transpose(1, 2).flatten(0, 1))
        lse = torch.cat(lses)[layout.slot_N].T[None]
        out = torch.cat(outs)[layout.slot_N].transpose(0, 1)[None].to(lse.dtype)
        for pair in zip(before[::2], before[1::2], strict=True):
            part, part_lse, _ = _attend(query, *pair, scaling)
            out, lse = _merged(out, lse, part, part_lse)
        out_NHD = out[0].transpose(0, 1).to(query.dtype)
        ctx.layout, ctx.scaling = layout, scaling
        ctx.save_for_backward(query, key, value, out_NHD, lse[0].T, *before)
        return out_NHD[None]

    @staticmethod
    def backward(ctx: Any, dout_1NHD: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out_NHD, lse_NH, *before = ctx.saved_tensors
        layout, scaling, dout_NHD = ctx.layout, ctx.scaling, dout_1NHD[0]
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
                dkeys_SKD = _of_keys(gradient, key.shape[1]).transpose(1, 2).flatten(0, 1)
                total.index_add_(0, block.key_SK, dkeys_SKD)
        dquery_1HND = torch.cat(dslots)[layout.slot_N].transpose(0, 1)[None]
        dout_1HND, out_1HND = (x.transpose(0, 1)[None] for x in (dout_NHD, out_NHD))
        dbefore: list[Tensor] = []
        for pair in zip(before[::2], before[1::2], strict=True):
            given = dout_1HND, query, *pair, out_1HND, lse_NH.T[None]
            dquery, *dpair = _attend_backward(given, (), scaling)
            dquery_1HND = dquery_1HND + dquery
            dbefore += dpair
        dpair_1KND = (x.transpose(0, 1)[None] for x in (dkey_NKD, dvalue_NKD))
        return None, None, dquery_1HND, *dpair_1KND, *dbefore


def _of_block(block: Block, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values of a block, [S, H, Q or K, D]."""

    def side_by_side(x_1HND: Tensor, token: Tensor) -> Tensor:
        return x_1HND[0][:, token].unflatten(1, (block.num_segments, -1)).transpose(0, 1)

    keys = _for_queries(query, *(side_by_side(x, block.key_SK) for x in (key, value)))
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
