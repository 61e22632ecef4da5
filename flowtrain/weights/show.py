"""A store as lines of a table; a version or a delta file as a record for JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowtrain import _delta
from flowtrain.utils.errors import user_error
from flowtrain.weights.format.layout import digest_hex
from flowtrain.weights.format.manifest import Manifest, NotThere, StoreError, total_bytes
from flowtrain.weights.stores.folder import Source, WeightStore

_CODECS = ("empty", "pairs", "rice", "class rice", "bitmap", "dense")
"""In the order of `num_blocks` of a delta."""
_LINE = "{:>8}  {:>15}  {:>8}  {:>8}  {:>8}  {:>8}  {:14}  {}"
HEADING = _LINE.format(
    *("version", "changed", "density", "delta", "skips", "snapshot"),
    *("deltas from", "why a full snapshot"),
)


def list_versions(source: Source) -> list[int]:
    """List the versions in order. HTTP has no listing: follow the deltas back from HEAD and, where
    there are none, go to the number before.
    """
    if isinstance(source, WeightStore):
        return source.versions()
    found: list[int] = []
    at = source.head()
    while at is not None and at >= 0:
        try:
            manifest = source.manifest(at)
        except NotThere:
            break
        found.append(at)
        at = max(manifest.delta_files, default=at - 1)
    return found[::-1]


def version_line(manifest: Manifest) -> str:
    """Describe a version in the columns of `HEADING`."""
    sizes = {base: total_bytes(files) for base, files in manifest.delta_files.items()}
    bases = sorted(sizes, reverse=True)
    delta_bytes = sizes[bases[0]] if bases else 0
    return _LINE.format(
        manifest.version,
        f"{manifest.num_changed:,}",
        f"{manifest.num_changed / max(manifest.num_words, 1):.3%}",
        human(delta_bytes),
        human(sum(sizes.values()) - delta_bytes),
        human(total_bytes(manifest.snapshot_files)),
        ", ".join(map(str, bases)),
        manifest.reason,
    ).rstrip()


def version_record(source: Source, manifest: Manifest) -> dict[str, Any]:
    """Describe a version by its manifest and its delta files."""
    deltas = [
        delta_record(source.fetch(manifest.version, file))
        for base in sorted(manifest.delta_files, reverse=True)
        for file in manifest.delta_files[base]
    ]
    record: dict[str, Any] = json.loads(manifest.to_json())
    return record | {"deltas": deltas}


def delta_record(path: Path) -> dict[str, Any]:
    """Describe a delta file with its tensors. Raises StoreError when it is none, or damaged."""
    from flowtrain.weights.format.files import open_delta  # and with it torch

    head, blobs = open_delta(path)
    tensors = {}
    for name, blob in blobs.items():
        problem = f"{path}: the delta of {name!r} is damaged"
        with user_error(problem, _delta.DeltaError, raises=StoreError):
            info = _delta.info(blob)
        digests = {key: digest_hex(info[key]) for key in ("base_digest", "target_digest")}
        blocks = dict(zip(_CODECS, info["num_blocks"], strict=True))
        tensors[name] = info | digests | {"num_blocks": blocks}
    return {"file": path.name, "num_bytes": path.stat().st_size, **head, "tensors": tensors}


def human(num_bytes: float) -> str:
    """Write a size with its unit; empty for nothing."""
    if num_bytes == 0:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"
