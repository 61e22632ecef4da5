"""Words of a stored tensor at other places in memory: cut for several ranks, fused, or transposed.

A model holds each tensor of the store as strided views, which are affine copies: element (i, j,
...) of a view is word `first + i * strides[0] + j * strides[1] + ...` of the tensor, and word
`to_first + i * to_strides[0] + ...` of a memory, the storage of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from flowkernels import digest_at
from torch import Tensor

from flowtrain.weights.format.layout import Digest, add
from flowtrain.weights.format.tensor_shards import digest_of, to_digest

_CHUNK = 1 << 20
"""Words that are digested at a time."""
UndoLog = list[Callable[[], object]]
"""Calls that undo what was written, the last write last."""


@dataclass(frozen=True, slots=True, eq=False)
class StridedView:
    """Words of a stored tensor, and where they are."""

    memory: Tensor
    """int16, flat: the storage of a parameter."""
    first: int
    to_first: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in the stored tensor: descending, and no word comes twice."""
    to_strides: tuple[int, ...]
    """Strides in the memory."""

    @property
    def is_run(self) -> bool:
        """True when the words are contiguous in both."""
        return self.strides == self.to_strides == (1,)

    @property
    def num_words(self) -> int:
        return prod(self.sizes)

    @property
    def region(self) -> str:
        """The words of the tensor as a key: equal for views of the same words."""
        return f"{self.first}:{self.sizes}:{self.strides}"

    def live(self) -> Tensor:
        """Return the words in memory."""
        return self.within(self.memory)

    def within(self, memory: Tensor) -> Tensor:
        """Return the view's words of a flat tensor as long as its memory."""
        return memory.as_strided(self.sizes, self.to_strides, self.to_first)

    def of_tensor(self, flat: Tensor) -> Tensor:
        """Return the view's words of a whole tensor."""
        return flat.as_strided(self.sizes, self.strides, self.first)

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Find the ascending positions of the tensor that are in the view. Returns int64: their
        indices in `positions`, and where each is in memory.
        """
        end = self.first + 1 + _reach(self.sizes, self.strides)
        start, stop = torch.searchsorted(positions, torch.tensor([self.first, end])).tolist()
        which = torch.arange(start, stop)
        rest = positions[start:stop] - self.first
        at = torch.full_like(rest, self.to_first)
        is_inside = torch.ones_like(rest, dtype=torch.bool)
        for n, stride, to_stride in zip(self.sizes, self.strides, self.to_strides, strict=True):
            i = rest if stride == 1 else rest // stride
            is_inside &= i < n
            at += i * to_stride
            rest = rest - i * stride
        is_inside &= rest == 0
        return which[is_inside], at[is_inside]

    def scatter(self, positions: Tensor, diffs: Tensor, undo: UndoLog) -> Digest:
        """Add differences at ascending positions of the tensor, leaving out those outside the view.
        Returns the digest change.
        """
        which, at = self.locate(positions)
        device = self.memory.device
        at = at.to(device)
        index = positions[which].to(device)
        old = self.memory[at]
        undo.append(lambda: self.memory.index_put_((at,), old))
        new = old + diffs[which].to(device)
        self.memory[at] = new
        return to_digest(digest_at(new, index) - digest_at(old, index))

    def write(self, flat: Tensor, first: int) -> None:
        """Copy from a run of whole rows of the tensor that starts at its word `first`."""
        ahead = first - self.first
        stride = self.strides[0]
        row_words = 1 + _reach(self.sizes[1:], self.strides[1:])
        start = max(0, -(-ahead // stride))
        stop = min(self.sizes[0], (ahead + len(flat) - row_words) // stride + 1)
        if start < stop:
            sizes = (stop - start, *self.sizes[1:])
            rows = flat.as_strided(sizes, self.strides, start * stride - ahead)
            self.live()[start:stop].copy_(rows)

    def digest(self, num_threads: int) -> Digest:
        """Digest the words in memory, each at its index in the tensor."""
        live = self.live()
        if self.is_run:
            return digest_of(live, self.first, num_threads)
        inner = torch.zeros(self.sizes[1:], dtype=torch.int64)
        for axis, (n, stride) in enumerate(zip(self.sizes[1:], self.strides[1:], strict=True)):
            inner += (torch.arange(n) * stride).view(-1, *[1] * (inner.dim() - axis - 1))
        inner = inner.to(live.device)
        num_rows = max(1, _CHUNK // max(1, inner.numel()))
        total: Digest = (0, 0)
        for start in range(0, self.sizes[0], num_rows):
            part = live[start : start + num_rows]
            rows = torch.arange(start, start + len(part), device=live.device)
            outer = (rows * self.strides[0] + self.first).view(-1, *[1] * inner.dim())
            total = add(total, to_digest(digest_at(part, outer + inner)))
        return total


def _reach(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Words from the first to the last of a strided view."""
    return sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
