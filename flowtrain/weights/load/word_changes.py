"""Changes of a tensor's words as they lie in blocks, four bytes each, on their way from a delta to
the device where the words are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from flowtrain import _delta
from flowtrain.weights.format.tensor_shards import U16, Blob

PIECE_WORDS = 1 << 27
"""Words whose changes are decoded and copied at a time: at most 512 MiB of them."""


@dataclass(frozen=True, slots=True, eq=False)
class WordChanges:
    """Changes of a run of words of a tensor."""

    first: int
    """Index in the tensor of the word that blocks of 65,536 words are counted from."""
    end: int
    """Index after the run's last word."""
    counts: Tensor
    """int32: changes in each block."""
    positions: Tensor
    """int16, the bits of unsigned numbers: ascending within each block."""
    diffs: Tensor
    """int16: the summands, mod 2^16."""

    @property
    def num_bytes(self) -> int:
        return self.counts.nbytes + self.positions.nbytes + self.diffs.nbytes

    def to(self, device: torch.device) -> WordChanges:
        """Copy to a device, on its current stream; the host waits for that stream alone."""
        if self.diffs.device == device:
            return self
        parts = [self.counts, self.positions, self.diffs]
        if device.type == "cuda":  # from pageable memory it would hold up launches of other threads
            parts = [part.pin_memory() for part in parts]
        return WordChanges(self.first, self.end, *(part.to(device) for part in parts))


def decode_pieces(
    blob: Blob, first: int, begin: int, end: int, base: U16 | None, num_threads: int
) -> Iterator[WordChanges]:
    """Decode the changes of words `begin` to `end` - 1 of a tensor, piece by piece, where there are
    any. The delta is that of its words from `first` on, `base` what they were (for level 2).

    Raises:
        DeltaError: the delta is damaged.
    """
    for start in range(begin, end, PIECE_WORDS):
        stop = min(start + PIECE_WORDS, end)
        counts, *pairs = _delta.decode_pairs(
            blob, base, begin=start - first, end=stop - first, num_threads=num_threads
        )
        if len(pairs[0]):
            signed = [counts.view(np.int32), *(part.view(np.int16) for part in pairs)]
            yield WordChanges(start, stop, *map(torch.from_numpy, signed))


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for good: torch keeps the freed memory of each for that one alone."""
    return torch.cuda.Stream(device)


@contextmanager
def side_stream(device: torch.device) -> Iterator[int]:
    """Work on a separate stream of the GPU; yields the bytes that may be allocated, half of the
    free memory.
    """
    if device.type != "cuda":
        yield 2**63
        return
    with torch.cuda.stream(_stream(device)):
        yield torch.cuda.mem_get_info(device)[0] // 2
