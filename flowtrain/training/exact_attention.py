"""Attention that gives a query the same bits alone, in a batch and in any token tree.

A query's keys are those of its path from the root, in the order of positions, in blocks of `KEYS`
from position 0 on. Its maximum is taken over all of them, which no order changes. Then numerator
and denominator of the softmax's mean are added up block by block in ascending order, both by one
product: values carry a column of ones. Keys that a query does not see add exact zeros, so it makes
no difference how many blocks there are before and beyond those that it sees. A sink is the first
key of a block of its own, before all others. Products have multiples of `QUERIES` rows and are
computed in fp32.

S: segments of a block of the forest, Q: queries of its longest, K: keys of its longest, H: heads,
G: key heads, R: query heads per key head, D: head size, E: columns of values, X: any batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flowtrain.training.forest import Block, Forest, sees
from flowtrain.types import UserError

KEYS = 32
"""Keys of a block."""
QUERIES = 4
"""Products of fewer rows, or of a number that this does not divide, sum in another order; so do
those of fewer than 12 columns, unless it divides them."""
_MOST_SCORES = 2**21
"""Scores that exist at a time."""
_FEWEST_QUERIES = 64
"""Queries of a segment that are computed side by side, before fewer segments are."""


def width(size: int) -> int:
    """Columns of values of a head size with ones behind them: the next multiple of `QUERIES`."""
    return size + QUERIES - size % QUERIES


def with_ones(value: Tensor) -> Tensor:
    """Append columns that sum the weights; [..., E] in fp32."""
    size = value.shape[-1]
    return F.pad(value.float(), (0, width(size) - size), value=1.0)


def add_blocks(total_XQE: Tensor, weight_XQK: Tensor, value_XKE: Tensor) -> None:
    """total += weight value, block by block of keys."""
    for start in range(0, weight_XQK.shape[-1], KEYS):
        block = slice(start, start + KEYS)
        total_XQE.baddbmm_(weight_XQK[..., block], value_XKE[:, block])


def mean_of(total: Tensor, size: int) -> Tensor:
    """Numerator over denominator, [..., D]."""
    return total[..., :size] / total[..., -1:]


def set_sink(score: Tensor, sink: Tensor) -> None:
    """Make the first block of scores [..., K] that of a sink alone, a tensor for [..., 1]."""
    score[..., :KEYS] = -torch.inf
    score[..., :1] = sink


def attend_block(
    query_SHQD: Tensor,
    key_SGKD: Tensor,
    value_SGKD: Tensor,
    is_seen_SQK: Tensor,
    sink_H: Tensor | None,
) -> Tensor:
    """Attention of segments side by side, [S, H, Q, D] in fp32. Queries are scaled; Q is a multiple
    of `QUERIES` and K one of `KEYS`.
    """
    num_segments, num_heads, num_queries = query_SHQD.shape[:3]
    size = value_SGKD.shape[3]
    shape = (num_segments, key_SGKD.shape[1], num_heads // key_SGKD.shape[1], num_queries)
    query_XQD = query_SHQD.reshape(shape[0] * shape[1], shape[2] * num_queries, -1)
    if sink_H is not None:
        key_SGKD, value_SGKD = (F.pad(x, (0, 0, KEYS, 0)) for x in (key_SGKD, value_SGKD))
        is_seen_SQK = F.pad(is_seen_SQK, (KEYS, 0))
    key_XKD, value_XKE = key_SGKD.flatten(0, 1), with_ones(value_SGKD).flatten(0, 1)
    score_XQK = query_XQD @ key_XKD.mT
    is_hidden = ~is_seen_SQK[:, None, None]
    score_XQK.view(*shape, -1).masked_fill_(is_hidden, -torch.inf)
    if sink_H is not None:
        set_sink(score_XQK.view(*shape, -1), sink_H.view(*shape[1:3], 1, 1))
    score_XQK -= score_XQK.amax(-1, keepdim=True)
    total_XQE = query_XQD.new_zeros(*query_XQD.shape[:2], width(size))
    add_blocks(total_XQE, score_XQK.exp_(), value_XKE)
    return mean_of(total_XQE, size).view(num_segments, num_heads, num_queries, size)


@dataclass(frozen=True, slots=True)
class ExactForest:
    """How a row falls into segments, in the place of a `Forest`, whose gradient it takes."""

    forest: Forest
    """Its blocks hold multiples of `QUERIES` and `KEYS`."""

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
    ) -> Tensor:
        """See `Forest.attend`."""
        if dropout:
            raise UserError(f"train.exact=true does not go with dropout in attention ({dropout})")
        scale = query_1HND.shape[-1] ** -0.5 if scaling is None else scaling
        inputs = (query_1HND, key_1HND, value_1HND, sink_H)
        out: Tensor = _ExactAttention.apply(*inputs, self.forest, scale, window)
        return out


class _ExactAttention(torch.autograd.Function):
    """Attention in blocks; the backward pass is that of the plain attention on the same forest."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink_H: Tensor | None,
        forest: Forest,
        scale: float,
        window: int | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sink_H)
        ctx.forest, ctx.scale, ctx.window = forest, scale, window
        query_NHD, key_NGD, value_NGD = (x[0].transpose(0, 1).float() for x in (query, key, value))
        inputs, layout = (query_NHD * scale, key_NGD, value_NGD), forest.layout(window)
        parts = [_attend(inputs, block, window, sink_H) for block in layout.blocks]
        return torch.cat(parts).index_select(0, layout.slot_N).to(query.dtype)[None]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        saved = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
        *inputs, sink_H = saved
        with torch.enable_grad():
            out = ctx.forest.attend(*inputs, scaling=ctx.scale, window=ctx.window, sink_H=sink_H)
        grads = torch.autograd.grad(out, [x for x in saved if x is not None], dout)
        return (*grads, *[None] * (7 - len(grads)))


def _attend(
    inputs: tuple[Tensor, Tensor, Tensor], block: Block, window: int | None, sink_H: Tensor | None
) -> Tensor:
    """The outputs of a block's query slots, [S * Q, H, D]; some of its segments at a time."""
    query_NHD, key_NGD, value_NGD = inputs
    query_SQ, key_SK = (x.view(block.num_segments, -1) for x in (block.query_SQ, block.key_SK))
    num_scores = query_NHD.shape[1] * min(query_SQ.shape[1], _FEWEST_QUERIES) * key_SK.shape[1]
    step = max(1, _MOST_SCORES // num_scores)
    outs = []
    for start in range(0, block.num_segments, step):
        some = slice(start, start + step)
        query_SHQD, key_SGKD, value_SGKD = (
            x[token_SX[some]].transpose(1, 2)
            for x, token_SX in ((query_NHD, query_SQ), (key_NGD, key_SK), (value_NGD, key_SK))
        )
        place_SQ = block.place_SQ[some]
        outs.append(_attend_segments(query_SHQD, key_SGKD, value_SGKD, place_SQ, window, sink_H))
    return torch.cat(outs)


def _attend_segments(
    query_SHQD: Tensor,
    key_SGKD: Tensor,
    value_SGKD: Tensor,
    place_SQ: Tensor,
    window: int | None,
    sink_H: Tensor | None,
) -> Tensor:
    """The outputs of segments' query slots, [S * Q, H, D], some queries at a time."""
    num_segments, num_heads, num_queries = query_SHQD.shape[:3]
    num_keys = key_SGKD.shape[2]
    step = _MOST_SCORES // (num_segments * num_heads * num_keys) // QUERIES * QUERIES
    outs = []
    for queries in torch.arange(num_queries).split(max(step, QUERIES)):
        some = slice(int(queries[0]), int(queries[-1]) + 1)
        place_SR = place_SQ[:, some]
        end = min(num_keys, (int(place_SR.max()) // KEYS + 1) * KEYS)
        is_seen_SRK = sees(place_SR, torch.arange(end, device=place_SR.device), window)
        inputs = (query_SHQD[:, :, some], key_SGKD[:, :, :end], value_SGKD[:, :, :end])
        outs.append(attend_block(*inputs, is_seen_SRK, sink_H))
    return torch.cat(outs, 2).transpose(1, 2).flatten(0, 1)
