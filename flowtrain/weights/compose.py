"""One delta between any two versions of a store."""

from __future__ import annotations

import functools
from collections.abc import Callable

from flowtrain import _delta
from flowtrain.utils.errors import user_error
from flowtrain.weights.deltas import Blob, digest_change
from flowtrain.weights.files import read_delta
from flowtrain.weights.manifest import StoreError
from flowtrain.weights.reader import find_chain, pull
from flowtrain.weights.store import Source
from flowtrain.weights.tensor_shards import U16, Digest, u16_view


def compose(
    source: Source, start: int, version: int, level: int = 1, num_threads: int = 1
) -> dict[str, Blob]:
    """Compose the deltas from `start` to `version` by tensor; tensors that did not change are left
    out.

    Deltas at level 1 that cover the same rows are composed as they are. Others need the weights of
    `start`, which are then loaded.

    Raises:
        StoreError: a version does not exist, no deltas lead from one to the other, or they are
            damaged.
    """
    base = source.manifest(start)
    target = source.manifest(version)
    batches: list[list[tuple[str, Blob]]] = []
    for batch_base, manifest in find_chain(source, start, target):
        batch: list[tuple[str, Blob]] = []
        for file in manifest.delta_files[batch_base]:
            path = source.fetch(manifest.version, file)
            batch += read_delta(
                path, base.layout, base=batch_base, version=manifest.version
            ).items()
        batches.append(batch)
    weights = functools.cache(lambda: pull(source, start, num_threads))

    def words_of(name: str) -> U16:
        return u16_view(weights()[name])

    composed = {}
    for name in sorted({name for batch in batches for name, _ in batch}):
        parts = [[blob for other, blob in batch if other == name] for batch in batches]
        problem = f"a delta of {name!r} between versions {start} and {version} is damaged"
        with user_error(problem, _delta.DeltaError, raises=StoreError):
            composed[name] = _compose_one(
                parts,
                old_words=functools.partial(words_of, name),
                base_digest=base.digests[name],
                level=level,
                num_threads=num_threads,
            )
    changes = {name: digest_change(blob) for name, blob in composed.items()}
    if missed := target.missed_by(base, changes):
        raise StoreError(
            f"the deltas do not lead from version {start} to {version} at {missed[0]!r}; run verify"
        )
    return composed


def _compose_one(
    parts: list[list[Blob]],
    old_words: Callable[[], U16],
    base_digest: Digest,
    level: int,
    num_threads: int,
) -> Blob:
    """Compose the deltas of one tensor; `parts` has those of its shards for each batch."""
    blobs = [blob for batch in parts for blob in batch]
    infos = [_delta.info(blob) for blob in blobs]
    spans = {(info["first"], info["num_words"]) for info in infos}
    if level == 1 and len(spans) == 1 and all(info["level"] == 1 for info in infos):
        return _delta.compose(blobs, num_threads=num_threads)
    old = old_words()
    new = old.copy()
    for batch in parts:
        spans_of_batch = [
            (_delta.info(blob)["first"], _delta.info(blob)["num_words"]) for blob in batch
        ]
        # A slice beyond the tensor is too short, and the codec refuses it.
        words = [new[first : first + num_words] for first, num_words in spans_of_batch]
        _delta.apply(batch, words, num_threads=num_threads)
    return _delta.encode(old, new, level=level, base_digest=base_digest, num_threads=num_threads)
