"""The words that a rank has published, shard by shard: in host memory, or on the device of the
weights.

On the host, one pass finds and encodes the changes. On a device, Triton kernels find them, and only
the changes cross to the host to be encoded; the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from flowkernels import WordDiff, diff_pieces, diffs_to_host

from flowtrain import _delta
from flowtrain.weights.format.deltas import Blob
from flowtrain.weights.format.layout import Digest
from flowtrain.weights.format.tensor_shards import TensorShard, digest_of, to_digest

_DENSE = 1 / 8
"""Share of the full size from which on copying the words is faster than applying their delta."""


class HostBaseline:
    """The published words of one shard, in host memory."""

    def __init__(self, shard: TensorShard, level: int, num_threads: int) -> None:
        self._words = shard.u16().copy()
        self._level = level
        self._num_threads = num_threads
        self.digest: Digest = _delta.digest(self._words, first=shard.first, num_threads=num_threads)

    def encode(self, shard: TensorShard) -> Blob:
        """Encode the delta from the published words to the shard's present ones."""
        return _delta.encode(
            self._words,
            shard.u16(),
            first=shard.first,
            level=self._level,
            base_digest=self.digest,
            num_threads=self._num_threads,
        )

    def to_level_1(self, blob: Blob) -> Blob:
        """Convert a delta from the published words to level 1, which composes without them."""
        if _delta.info(blob)["level"] == 1:
            return blob
        return _delta.compose([blob], self._words, num_threads=self._num_threads)

    def compare(self, shard: TensorShard) -> tuple[int, Digest]:
        """Count the words that changed, and digest the present ones, without encoding a delta."""
        words = shard.u16()
        num_changed = int(np.count_nonzero(self._words != words))
        return num_changed, _delta.digest(words, first=shard.first, num_threads=self._num_threads)

    def advance(self, shard: TensorShard, digest: Digest, blob: Blob | None) -> None:
        """Take the shard's present words as published; `blob` is the delta to them, where there is
        one.
        """
        # Encoding could store the new words in its own pass, but a failed publish would then have
        # to undo that.
        if blob is None or len(blob) > _DENSE * self._words.nbytes:
            self._words[:] = shard.u16()
        else:
            _delta.apply([blob], [self._words], num_threads=self._num_threads)
        self.digest = digest


class DeviceBaseline:
    """The published words of one shard on its device; `encode_all` encodes those of many."""

    def __init__(self, shard: TensorShard, level: int, num_threads: int) -> None:
        if level != 1:
            raise ValueError(
                f"level={level} needs the weights on the CPU; on {shard.source.device} "
                "deltas are encoded at level 1 only"
            )
        self.words = shard.rows().view(torch.int16).clone()
        self._num_threads = num_threads
        self.digest = digest_of(self.words, shard.first)

    def blob(self, found: WordDiff, shard: TensorShard) -> Blob:
        """Encode the delta of changes that are on the host."""
        return _delta.encode_pairs(
            found.counts.numpy().view(np.uint32),
            found.positions.numpy().view(np.uint16),
            found.diffs.numpy().view(np.uint16),
            self.words.numel(),
            to_digest(found.digest_change),
            first=shard.first,
            base_digest=self.digest,
            num_threads=self._num_threads,
        )

    def to_level_1(self, blob: Blob) -> Blob:
        return blob

    def compare(self, shard: TensorShard) -> tuple[int, Digest]:
        words = shard.rows().view(torch.int16)
        num_changed = int(torch.count_nonzero(self.words != words))
        return num_changed, digest_of(words, shard.first)

    def advance(self, shard: TensorShard, digest: Digest, blob: Blob | None) -> None:
        self.words.copy_(shard.rows().view(torch.int16))
        self.digest = digest


Baseline = HostBaseline | DeviceBaseline


def make_baseline(shard: TensorShard, level: int, num_threads: int) -> Baseline:
    """Copy a shard's words on its own device."""
    is_on_host = shard.source.device.type == "cpu"
    return (HostBaseline if is_on_host else DeviceBaseline)(shard, level, num_threads)


def encode_all(pairs: Sequence[tuple[Baseline, TensorShard]]) -> dict[str, Blob]:
    """Encode the delta of each shard from its baseline. Returns them by tensor.

    Of shards on a device the host waits twice, however many they are: for the number of their
    changes, and for the changes.
    """
    blobs = {s.name: b.encode(s) for b, s in pairs if isinstance(b, HostBaseline)}
    on_device = [(b, s) for b, s in pairs if isinstance(b, DeviceBaseline)]
    if not on_device:
        return blobs
    found = diff_pieces(
        [baseline.words for baseline, _ in on_device],
        lambda piece: on_device[piece][1].rows().view(torch.int16),
        [shard.first for _, shard in on_device],
    )
    for (baseline, shard), changes in zip(on_device, diffs_to_host(found), strict=True):
        blobs[shard.name] = baseline.blob(changes, shard)
    return blobs
