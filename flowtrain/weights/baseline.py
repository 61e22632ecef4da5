"""A copy of what a rank has published, piece by piece: in host memory, or beside the weights on
their device.

On the host one pass finds and codes the changes. On a device Triton kernels find them, and only
they cross to the host to be coded: the bytes are the same.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from flowkernels import diff_words, digest_words
from torch import Tensor

from flowtrain import _delta
from flowtrain.weights.files import Blob
from flowtrain.weights.tensor_shards import Digest, Piece, Words, add

_MASK = (1 << 64) - 1


class Copy(Protocol):
    """The published words of one piece."""

    digest: Digest

    def encode(self, piece: Piece, level: int, num_threads: int) -> Blob:
        """The delta to what the piece is now."""

    def plain(self, blob: Blob, num_threads: int) -> Blob:
        """A delta from these words at level 1."""

    def advance(self, piece: Piece, blob: Blob, num_threads: int) -> None:
        """The delta was published."""


def make_copy(piece: Piece, num_threads: int) -> Copy:
    """Where the piece is."""
    return HostCopy(piece, num_threads) if piece.source.device.type == "cpu" else DeviceCopy(piece)


class HostCopy:
    """See `Copy`."""

    def __init__(self, piece: Piece, num_threads: int) -> None:
        self._words: Words = piece.words().copy()
        self.digest: Digest = _delta.digest(self._words, first=piece.first, num_threads=num_threads)

    def encode(self, piece: Piece, level: int, num_threads: int) -> Blob:
        return _delta.encode(
            self._words,
            piece.words(),
            first=piece.first,
            level=level,
            base_digest=self.digest,
            num_threads=num_threads,
        )

    def plain(self, blob: Blob, num_threads: int) -> Blob:
        if _delta.info(blob)["level"] == 1:
            return blob
        return _delta.compose([blob], self._words, num_threads=num_threads)

    def advance(self, piece: Piece, blob: Blob, num_threads: int) -> None:
        # Encoding could store into the words in its own pass; a publish that fails would then have
        # to take that back.
        _delta.apply([blob], [self._words], num_threads=num_threads)
        self.digest = _delta.info(blob)["target_digest"]


class DeviceCopy:
    """See `Copy`. Level 1 only: level 2 needs all old words where the coder is."""

    def __init__(self, piece: Piece) -> None:
        self._words = piece.rows().view(torch.int16).clone()
        self.digest: Digest = _to_digest(digest_words(self._words, piece.first))

    def encode(self, piece: Piece, level: int, num_threads: int) -> Blob:
        if level != 1:
            raise ValueError(
                f"level={level} needs the weights on the CPU; on {piece.source.device} only level "
                "1 is coded"
            )
        found = diff_words(self._words, piece.rows().view(torch.int16), piece.first)
        return _delta.encode_pairs(
            _to_host(found.counts).view(np.uint32),
            _to_host(found.positions).view(np.uint16),
            _to_host(found.diffs).view(np.uint16),
            self._words.numel(),
            _to_digest(found.digest_change),
            first=piece.first,
            base_digest=self.digest,
            num_threads=num_threads,
        )

    def plain(self, blob: Blob, num_threads: int) -> Blob:
        return blob

    def advance(self, piece: Piece, blob: Blob, num_threads: int) -> None:
        self._words.copy_(piece.rows().view(torch.int16))  # at the speed of the device's memory
        self.digest = _delta.info(blob)["target_digest"]


def _to_host(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.cpu().numpy()


def _to_digest(pair: Tensor) -> Digest:
    a, b = pair.tolist()
    return add((a & _MASK, b & _MASK))
