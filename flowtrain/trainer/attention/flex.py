"""Attention over packed rows on a GPU: PyTorch's FlexAttention under the mask that `subtree_end`
spells out.

The kernel walks over blocks of 128 x 128 tokens and leaves out those where nobody sees anybody.
Which those are is worked out on the device from the ends of the subtrees, a block at a time: no N x
N mask exists. Rows are filled up to whole blocks with lone tokens, and the kernel is compiled for
any number of blocks, so a new batch compiles nothing. Q: blocks of a row, B: of its keys.

A window is a mask of its own, by the places of tokens on their paths. Sinks are taken off
afterwards: with lse the log-sum-exp of a query's scores, out * sigmoid(lse - sink) is what a
softmax over the sink as well would give.

Most pairs of tokens that see each other are of a tree's root and what comes after it (77 % with 3
turns of AgentFlow's shape, 55 % with 10), all of which sees all of the root. `rectangles` leave
that to a library, and what a piece of a walk sees of the open path, in layers without windows and
sinks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from flowtrain.records import UserError
from flowtrain.trainer.attention.rectangles import join
from flowtrain.trainer.packing import PackedRow

BLOCK = 128
_TRITON: dict[str, Any] = {"IS_DIVISIBLE": True}
"""Options of the kernels: the compiler does not see that any N is a multiple of BLOCK, and would
check bounds at every access."""
_FLASH: dict[str, Any] = {"BACKEND": "FLASH"}
_MIN_PAIRS = 1 << 20
"""Pairs of tokens from which on a root's rectangle is worth a call of its own."""


class Root(NamedTuple):
    """The first run of a tree: tokens start to end - 1, which all up to stop - 1 see."""

    start: int
    end: int
    stop: int


@dataclass(frozen=True, slots=True)
class FlexTree:
    """The structure of a row, as `forest.Forest`. Made once per row, used by every layer."""

    subtree_end_N: Tensor
    """int32, because it is read for every pair of a partial block; so are positions."""
    num_before: int
    """Tokens that all of the row sees: their keys come before its own, filled up to whole blocks,
    and they ask nothing."""
    flash: bool
    """FlashAttention 4's kernels, which the package flash-attn-4 brings."""
    beside: FlexTree | None = None
    """The rest of the tree beside rectangles; None without rectangles."""
    roots: Sequence[Root] = ()
    """The roots computed as rectangles, in a row that starts with them."""
    masks: dict[int | None, BlockMask] = field(default_factory=dict)
    """By window; those that a layer has asked for."""

    @classmethod
    def of(
        cls,
        subtree_end_N: Tensor,
        num_before: int = 0,
        flash: bool = False,
        rectangles: bool = False,
    ) -> FlexTree:
        """N is a multiple of BLOCK."""
        assert len(subtree_end_N) % BLOCK == 0, len(subtree_end_N)
        end_N = subtree_end_N.int()
        if not rectangles:
            return cls(end_N, num_before, flash)
        roots = [] if num_before else _large_roots(end_N)
        rest_N = end_N.clone()
        for root in roots:  # its own queries alone see it
            rest_N[root.start : root.end].clamp_(max=root.end)
        return cls(end_N, num_before, flash, cls(rest_N, 0, flash), roots)

    @property
    def _num_fill(self) -> int:
        """Number of keys between those before the row and its own."""
        return -self.num_before % BLOCK

    def mask(self, window: int | None = None) -> BlockMask:
        """Return the mask of a window; one that holds the whole row hides nothing."""
        if window is not None and window >= self.num_before + len(self.subtree_end_N):
            window = None
        if window not in self.masks:
            self.masks[window] = self._mask(window)
        return self.masks[window]

    def _mask(self, window: int | None) -> BlockMask:
        num_tokens, shift = len(self.subtree_end_N), self.num_before + self._num_fill
        device = self.subtree_end_N.device
        # A key's subtree ends at a query: those before the row with its last, those that fill up
        # before its first.
        end_K = F.pad(self.subtree_end_N, (self._num_fill, 0))
        end_K = F.pad(end_K, (self.num_before, 0), value=num_tokens)
        end_BT = end_K.view(-1, BLOCK)
        start_Q = torch.arange(0, num_tokens, BLOCK, device=device)[:, None]
        start_B = torch.arange(-shift, num_tokens, BLOCK, device=device)
        is_before_QB = start_B < start_Q
        # In a block before one's own, the token whose subtree reaches furthest is seen by the first
        # query or nobody is by any.
        is_seen_QB = is_before_QB & (end_BT.amax(1) > start_Q)
        is_whole_QB = is_before_QB & (end_BT.amin(1) >= start_Q + BLOCK)

        position_K = None if window is None else self._positions()
        if position_K is not None and window is not None:
            # Of a block that is partly seen some tokens may be near enough and yet not seen.
            first_B, last_B = position_K.view(-1, BLOCK).aminmax(dim=1)
            first_Q = first_B[shift // BLOCK :, None]
            is_seen_QB &= first_Q - last_B < window
            is_whole_QB &= last_B[shift // BLOCK :, None] - first_B < window
            # As a tensor: a number would be compiled into the kernel, as would the shift.
            first_seen_N = position_K[shift:] - (window - 1)
        shift_1 = torch.tensor(shift, dtype=torch.int32, device=device) if shift else None

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            place = key if shift_1 is None else key - shift_1
            is_seen = (place <= query) & (query < end_K[key])
            return (
                is_seen
                if position_K is None
                else is_seen & (first_seen_N[query] <= position_K[key])
            )

        is_partial_QB = is_seen_QB & ~is_whole_QB | (start_B == start_Q)

        lists = (*_lists(is_partial_QB), *_lists(is_whole_QB))
        return BlockMask.from_kv_blocks(
            *lists, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(num_tokens, len(end_K))
        )

    def _positions(self) -> Tensor:
        """int32 [K]: a key's place on its path."""
        own_N = self.num_before + _positions(self.subtree_end_N)
        before = torch.arange(self.num_before, dtype=torch.int32, device=own_N.device)
        return torch.cat([F.pad(before, (0, self._num_fill)), own_N])

    @torch.compiler.disable  # a graph of its own, or every compiled layer would hold one
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
        """See `Forest.attend`; `before` has `num_before` tokens."""
        assert dropout == 0, "FlexAttention has no dropout"
        inputs = query_1HND, key_1HND, value_1HND
        if self.beside is not None and _is_plain(*inputs, window, sink_H):
            scaling = query_1HND.shape[3] ** -0.5 if scaling is None else scaling
            out, lse = self.beside._run(*inputs, scaling, None, has_lse=True)
            if before:
                out = join(out, lse, query_1HND, before, scaling)
            for root in self.roots:
                out = self._with_root(root, out, lse, *inputs, scaling)
            return out.transpose(1, 2).contiguous()
        if before:
            fill = key_1HND.new_zeros(*key_1HND.shape[:2], self._num_fill, key_1HND.shape[3])
            fills = fill, fill[..., :1].expand(-1, -1, -1, value_1HND.shape[3])
            pairs = zip(*before, fills, (key_1HND, value_1HND), strict=True)
            key_1HND, value_1HND = (torch.cat(parts, 2) for parts in pairs)
        if self.flash and (window or sink_H is not None):
            raise UserError(
                "train.attention='flash' supports neither windows nor sinks: use 'flex'"
            )
        inputs = query_1HND, key_1HND, value_1HND
        out, lse = self._run(*inputs, scaling, window, has_lse=sink_H is not None)
        if sink_H is not None:
            out = out * (lse - sink_H[:, None]).sigmoid()[..., None].to(out.dtype)
        return out.transpose(1, 2).contiguous()

    def _run(
        self,
        query_1HND: Tensor,
        key_1KND: Tensor,
        value_1KND: Tensor,
        scaling: float | None,
        window: int | None,
        has_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the output [1, H, N, D] and, if asked for, the scores' lse, fp32 [1, H, N]."""
        on_gpu = query_1HND.is_cuda
        attend: Any = _compiled() if on_gpu else flex_attention
        found = attend(
            query_1HND,
            key_1KND,
            value_1KND,
            block_mask=self.mask(window),
            scale=scaling,
            enable_gqa=query_1HND.shape[1] != key_1KND.shape[1],
            kernel_options=dict(_FLASH if self.flash else _TRITON) if on_gpu else None,
            return_aux=AuxRequest(lse=True) if has_lse else None,
        )
        return (found[0], found[1].lse) if has_lse else (found, found)

    def _with_root(
        self,
        root: Root,
        out_1HND: Tensor,
        lse_1HN: Tensor,
        query_1HND: Tensor,
        key_1KND: Tensor,
        value_1KND: Tensor,
        scaling: float,
    ) -> Tensor:
        """Add what others see of a root."""
        below = slice(root.end, root.stop)
        start, end = root.start, root.end
        pair = key_1KND[:, :, start:end], value_1KND[:, :, start:end]
        joined = join(
            out_1HND[:, :, below], lse_1HN[:, :, below], query_1HND[:, :, below], [pair], scaling
        )
        return torch.cat([out_1HND[:, :, : root.end], joined, out_1HND[:, :, root.stop :]], 2)


def _is_plain(query: Tensor, key: Tensor, value: Tensor, *options: object) -> bool:
    """Return whether a library's call can have a part of a layer: cuDNN knows 16 bits alone."""
    has_none = all(option is None for option in options)
    return has_none and key.shape == value.shape and query.itemsize <= (2 if query.is_cuda else 8)


def _large_roots(subtree_end_N: Tensor) -> list[Root]:
    """Find the roots that others see in rectangles of _MIN_PAIRS pairs or more."""
    ends_N, found, start = subtree_end_N.cpu(), list[Root](), 0
    while start < len(ends_N):
        stop = int(ends_N[start])
        end = start + int((ends_N[start:stop] != stop).int().argmax())  # 0 where no other ends
        if (end - start) * (stop - end) >= _MIN_PAIRS:
            found.append(Root(start, end, stop))
        start = stop
    return found


def _positions(subtree_end_N: Tensor) -> Tensor:
    """int32 [N]: a token's place on its path, which is the tokens before it but for those whose
    subtrees have ended.
    """
    place_N = torch.arange(len(subtree_end_N), dtype=torch.int32, device=subtree_end_N.device)
    ends = subtree_end_N.sort().values
    return place_N - torch.searchsorted(ends, place_N, right=True, out_int32=True)


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


_MOST_GRAPHS = 64
"""With and without gradients, windows, sinks, fewer heads of keys, and a row of one block alone:
torch's own limit of 8 is less than one model may need."""


@functools.cache
def _compiled() -> Callable[..., Any]:
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_GRAPHS)
    # A whole graph or an error: what is not compiled would build an N x N matrix.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _lists(is_in_QB: Tensor) -> tuple[Tensor, Tensor]:
    """(blocks of keys that each block of queries takes in, [1, 1, Q]; which they are, [1, 1, Q, B],
    the others behind them)
    """
    order_QB = is_in_QB.int().argsort(dim=1, descending=True, stable=True)
    return is_in_QB.sum(1, dtype=torch.int32)[None, None], order_QB.int()[None, None]
