"""One delta between any two versions of a store."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from flowtrain import _delta
from flowtrain.weights.files import Blob, read_delta
from flowtrain.weights.manifest import Manifest, StoreError
from flowtrain.weights.reader import find_path, pull
from flowtrain.weights.store import Source
from flowtrain.weights.tensor_shards import Words, add, subtract, words_of


def compose(
    source: Source, start: int, version: int, level: int = 1, num_threads: int = 1
) -> dict[str, Blob]:
    """By tensor; tensors that did not change are left out.

    Deltas of level 1 that cover the same rows are added up as they are. Others need the weights of
    `start`, which are then read.

    Raises:
        StoreError: a version is not there, no deltas lead from one to the other, or they are
            damaged.
    """
    base, target = source.manifest(start), source.manifest(version)
    steps: list[list[tuple[str, Blob]]] = []
    for step_base, manifest in find_path(source, start, target):
        files = [source.fetch(manifest.version, file) for file in manifest.delta_files[step_base]]
        steps.append(
            [
                item
                for path in files
                for item in read_delta(path, base.layout, step_base, manifest.version).items()
            ]
        )
    weights = functools.cache(lambda: pull(source, start, num_threads))
    composed = {}
    for name in sorted({name for step in steps for name, _ in step}):
        parts = [[blob for other, blob in step if other == name] for step in steps]
        try:
            composed[name] = _one(
                [blobs for blobs in parts if blobs], name, base, weights, level, num_threads
            )
        except _delta.DeltaError as error:
            raise StoreError(
                f"a delta of {name!r} between versions {start} and {version} is damaged: {error}"
            ) from error
    _check(composed, base, target)
    return composed


def _one(
    parts: list[list[Blob]],
    name: str,
    base: Manifest,
    weights: Callable[[], dict[str, Tensor]],
    level: int,
    num_threads: int,
) -> Blob:
    """`parts`: per step, the deltas of the pieces of one tensor."""
    infos = [_delta.info(blob) for blobs in parts for blob in blobs]
    spans = {(info["first"], info["num_words"]) for info in infos}
    if level == 1 and len(spans) == 1 and all(info["level"] == 1 for info in infos):
        return _delta.compose([blob for blobs in parts for blob in blobs], num_threads=num_threads)
    old = words_of(weights()[name])
    new = old.copy()
    for blobs in parts:
        _delta.apply(blobs, [_slice(new, blob) for blob in blobs], num_threads=num_threads)
    return _delta.encode(
        old, new, level=level, base_digest=base.digests[name], num_threads=num_threads
    )


def _slice(words: Words, blob: Blob) -> Words:
    """Shorter than the delta where that reaches beyond the tensor: then the codec refuses it."""
    info = _delta.info(blob)
    part: Words = words[info["first"] : info["first"] + info["num_words"]]
    return part


def _check(composed: dict[str, Blob], base: Manifest, target: Manifest) -> None:
    for name, digest in base.digests.items():
        if name in composed:
            info = _delta.info(composed[name])
            digest = add(digest, subtract(info["target_digest"], info["base_digest"]))
        if digest != target.digests[name]:
            raise StoreError(
                f"the deltas do not lead from version {base.version} to {target.version} at "
                f"{name!r}; run verify"
            )
