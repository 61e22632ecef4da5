"""Deltas of shards, as the codec writes them, in batches that lead from one version to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from flowtrain import _delta
from flowtrain.weights.format.layout import Digest, subtract
from flowtrain.weights.format.tensor_shards import U16

Blob = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""The delta of one shard, as `_delta.encode` returns it."""
ShardKey = tuple[str, int]
"""Name of a tensor, and index of a shard's first word in it."""
DeltaBatch = dict[ShardKey, Blob]
"""The deltas that lead from one version to another; a shard that is left out did not change."""
_Key = TypeVar("_Key", str, ShardKey)


def digest_change(blob: Blob) -> Digest:
    """Return what a delta adds to the digest of its tensor."""
    info = _delta.info(blob)
    return subtract(info["target_digest"], info["base_digest"])


def can_compose(batches: Iterable[DeltaBatch]) -> bool:
    """Tell whether all batches cut their tensors alike, that is, come from as many ranks."""
    spans: dict[str, set[tuple[int, int]]] = {}
    for batch in batches:
        for (name, first), blob in batch.items():
            spans.setdefault(name, set()).add((first, first + _delta.info(blob)["num_words"]))
    return all(
        end <= start
        for spans_of_name in spans.values()
        for (_, end), (start, _) in pairwise(sorted(spans_of_name))
    )


def compose_batches(
    batches: Sequence[Mapping[_Key, Blob]],
    num_threads: int,
    base_of: Callable[[_Key, int], U16] | None = None,
) -> dict[_Key, Blob]:
    """Compose consecutive batches, all cut alike, into one.

    `base_of` returns the words of a shard, by key and number, before the first batch; deltas at
    level 2 need them.
    """
    composed = {}
    for key in sorted({key for batch in batches for key in batch}):
        blobs = [batch[key] for batch in batches if key in batch]
        infos = [_delta.info(blob) for blob in blobs]
        base = None
        if base_of is not None and len(blobs) > 1 and any(info["level"] == 2 for info in infos):
            base = base_of(key, infos[0]["num_words"])
        composed[key] = (
            _delta.compose(blobs, base, num_threads=num_threads) if len(blobs) > 1 else blobs[0]
        )
    return composed
