"""The published words of a rank, shard by shard, in host memory or on the device of the weights.

On the host, one pass finds and encodes the changes. On a device, Triton kernels find them, and only
the changes cross to the host to be encoded; the bytes are the same. At every fourth version deltas
are composed to skips over several versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from flowkernels import WordDiff, diff_pieces, diffs_to_host

from flowtrain import _delta
from flowtrain.weights.format.manifest import Digest
from flowtrain.weights.format.tensor_shards import Blob, TensorShard, digest_of, to_digest, u16_view

_SKIP = 4
"""Every 4th version has a skip over 4 versions, every 16th over 16, every 64th over 64."""
_NUM_TIERS = 3


class Change(NamedTuple):
    """The difference of a shard to its published words."""

    num_words: int
    """Words that differ."""
    digest: Digest
    """Digest of the present words."""

    @classmethod
    def of_delta(cls, blob: Blob) -> Change:
        info = _delta.info(blob)
        return cls(info["num_changed"], info["target_digest"])


class Baseline:
    """The published words of one shard; `encode_all` encodes the deltas of many."""

    def __init__(
        self, shard: TensorShard, level: int, num_threads: int, *, on_device: bool
    ) -> None:
        """`on_device`: kernels find the changes, where the shard is; else the codec, on the host.

        Raises ValueError for level 2 on a device.
        """
        if on_device and level != 1:
            raise ValueError(
                f"level={level} needs the weights on the CPU; on {shard.source.device} "
                "deltas are encoded at level 1 only"
            )
        self.on_device = on_device
        self.words = shard.words().to(shard.source.device if on_device else "cpu", copy=True)
        self.digest = digest_of(self.words, shard.first, num_threads)
        self._level, self._num_threads = level, num_threads

    def encode(self, shard: TensorShard) -> Blob:
        """Encode on the host the delta from the published words to the shard's present ones."""
        return _delta.encode(
            u16_view(self.words),
            shard.u16(),
            first=shard.first,
            level=self._level,
            base_digest=self.digest,
            num_threads=self._num_threads,
        )

    def encode_changes(self, shard: TensorShard, changes: WordDiff) -> Blob:
        """Encode changes that kernels found and that are on the host."""
        return _delta.encode_pairs(
            changes.counts.numpy().view(np.uint32),
            changes.positions.numpy().view(np.uint16),
            changes.diffs.numpy().view(np.uint16),
            self.words.numel(),
            to_digest(changes.digest_change),
            first=shard.first,
            base_digest=self.digest,
            num_threads=self._num_threads,
        )

    def to_level_1(self, blob: Blob) -> Blob:
        """Convert a delta from the published words to level 1, which composes without them."""
        if _delta.info(blob)["level"] == 1:
            return blob
        return _delta.compose([blob], u16_view(self.words), num_threads=self._num_threads)

    def compare(self, shard: TensorShard) -> Change:
        """Return the changes of the shard, without encoding a delta."""
        words = shard.words().to(self.words.device)
        num_changed = int(torch.count_nonzero(self.words != words))
        return Change(num_changed, digest_of(words, shard.first, self._num_threads))

    def advance(self, shard: TensorShard, digest: Digest) -> None:
        """Record the shard's present words as published."""
        self.words.copy_(shard.words())
        self.digest = digest


def make_baseline(shard: TensorShard, level: int, num_threads: int) -> Baseline:
    """Copy a shard's words on its own device."""
    is_on_host = shard.source.device.type == "cpu"
    return Baseline(shard, level, num_threads, on_device=not is_on_host)


def encode_all(pairs: Sequence[tuple[Baseline, TensorShard]]) -> dict[str, Blob]:
    """Encode the delta of each shard from its baseline. Returns them by tensor.

    For shards on a device the host waits twice, whatever their number: once for the counts of
    changes and once for the changes.
    """
    blobs = {
        shard.name: baseline.encode(shard) for baseline, shard in pairs if not baseline.on_device
    }
    on_device = [(baseline, shard) for baseline, shard in pairs if baseline.on_device]
    if not on_device:
        return blobs
    diffs = diff_pieces(
        [baseline.words for baseline, _ in on_device],
        lambda piece: on_device[piece][1].words(),
        [shard.first for _, shard in on_device],
    )
    for (baseline, shard), changes in zip(on_device, diffs_to_host(diffs), strict=True):
        blobs[shard.name] = baseline.encode_changes(shard, changes)
    return blobs


@dataclass(frozen=True, slots=True)
class SkipTiers:
    """Deltas waiting to be merged, by tier; immutable, so a failed publish leaves no trace."""

    tiers: tuple[tuple[tuple[int, dict[str, Blob]], ...], ...] = ((),) * _NUM_TIERS

    def plus(
        self, base: int, blobs: dict[str, Blob], num_threads: int
    ) -> tuple[SkipTiers, dict[int, dict[str, Blob]]]:
        """Add the delta from version `base`. Return the new tiers, and the skips that this delta
        completes by the version that they start from.
        """
        tiers = list(self.tiers)
        skips = {}
        for i, pending in enumerate(tiers):
            tiers[i] = (*pending, (base, blobs))
            if len(tiers[i]) < _SKIP:
                break
            # A full tier becomes one skip, which is the next delta of the tier above.
            base = tiers[i][0][0]
            blobs = _compose([batch for _, batch in tiers[i]], num_threads)
            tiers[i] = ()
            skips[base] = blobs
        return SkipTiers(tuple(tiers)), skips


def _compose(batches: Sequence[dict[str, Blob]], num_threads: int) -> dict[str, Blob]:
    """Compose consecutive deltas, all at level 1, tensor by tensor."""
    blobs: dict[str, list[Blob]] = {}
    for name, blob in chain.from_iterable(batch.items() for batch in batches):
        blobs.setdefault(name, []).append(blob)
    return {
        name: _delta.compose(blobs[name], num_threads=num_threads)
        if len(blobs[name]) > 1
        else blobs[name][0]
        for name in sorted(blobs)
    }
