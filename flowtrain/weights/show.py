"""The contents of a store, a version or a delta file, as records for JSON and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowtrain import _delta
from flowtrain.utils.errors import user_error
from flowtrain.weights.files import open_delta
from flowtrain.weights.manifest import Manifest, StoreError, total_bytes
from flowtrain.weights.remote import NotThere
from flowtrain.weights.store import Source, WeightStore
from flowtrain.weights.tensor_shards import digest_hex

_CODECS = ("empty", "pairs", "rice", "class rice", "bitmap", "dense")
"""In the order of `num_blocks` of a delta."""
_VERSION_HEAD = (
    *("version", "changed", "density", "delta", "bytes/change", "skips", "snapshot"),
    *("deltas from", "why a full snapshot"),
)
_DELTA_HEAD = (
    *("changed", "of words", "bytes", "bytes/change", "from word", "level"),
    *("tensor", "blocks", "digest before", "after"),
)

Record = dict[str, Any]


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


def version_record(manifest: Manifest) -> Record:
    """Describe a version for the table of versions."""
    sizes = {base: total_bytes(files) for base, files in manifest.delta_files.items()}
    bases = sorted(sizes, reverse=True)
    delta_bytes = sizes[bases[0]] if bases else 0
    has_size = delta_bytes and manifest.num_changed
    return {
        "version": manifest.version,
        "num_changed": manifest.num_changed,
        "density": manifest.num_changed / max(manifest.num_words, 1),
        "bases": bases,
        "delta_bytes": delta_bytes,
        "bytes_per_change": delta_bytes / manifest.num_changed if has_size else None,
        "skip_bytes": sum(sizes.values()) - delta_bytes,
        "snapshot_bytes": total_bytes(manifest.snapshot_files),
        "snapshot": manifest.snapshot,
        "reason": manifest.reason,
    }


def damaged_record(version: int, error: StoreError) -> Record:
    """Describe a version whose manifest cannot be read."""
    return {"version": version, "error": str(error)}


def whole_record(source: Source, manifest: Manifest) -> Record:
    """Describe a version with its tensors and its delta files."""
    tensors = [
        {
            "name": name,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "num_words": spec.num_words,
            "digest": digest_hex(manifest.digests[name]),
        }
        for name, spec in manifest.layout.items()
    ]
    deltas = [
        delta_record(source.fetch(manifest.version, file))
        for base in sorted(manifest.delta_files, reverse=True)
        for file in manifest.delta_files[base]
    ]
    return version_record(manifest) | {"root": manifest.root, "tensors": tensors, "deltas": deltas}


def delta_record(path: Path) -> Record:
    """Describe a delta file with its tensors. Raises StoreError when it is none, or damaged."""
    head, blobs = open_delta(path)
    tensors = []
    for name, blob in blobs.items():
        problem = f"{path}: the delta of {name!r} is damaged"
        with user_error(problem, _delta.DeltaError, raises=StoreError):
            info = _delta.info(blob)
        blocks = dict(zip(_CODECS, info["num_blocks"], strict=True))
        counts = {k: info[k] for k in ("first", "num_words", "num_changed", "num_bytes", "level")}
        tensors.append(
            {
                "name": name,
                **counts,
                "blocks": {codec: number for codec, number in blocks.items() if number},
                "base_digest": digest_hex(info["base_digest"]),
                "target_digest": digest_hex(info["target_digest"]),
            }
        )
    named = {key: head[key] for key in ("base", "version", "layout")}
    return {"file": path.name, "num_bytes": path.stat().st_size, **named, "tensors": tensors}


def versions_table(records: Sequence[Record]) -> str:
    """Draw one line per version."""
    lines: list[Sequence[str]] = [_VERSION_HEAD]
    for r in records:
        if "error" in r:
            lines.append([str(r["version"]), "damaged", *[""] * 6, r["error"]])
            continue
        lines.append(
            [
                str(r["version"]),
                f"{r['num_changed']:,}",
                f"{r['density']:.3%}",
                human(r["delta_bytes"]),
                "" if r["bytes_per_change"] is None else f"{r['bytes_per_change']:.2f}",
                human(r["skip_bytes"]),
                human(r["snapshot_bytes"]),
                ", ".join(map(str, r["bases"])),
                r["reason"],
            ]
        )
    return _table(lines, num_texts=2)


def whole_table(record: Record) -> str:
    """Draw a version: its line, its tensors, its delta files."""
    lines = [["tensor", "dtype", "shape", "digest"]]
    lines += [
        [t["name"], t["dtype"], "x".join(map(str, t["shape"])) or "scalar", t["digest"][:16]]
        for t in record["tensors"]
    ]
    root = f"root {record['root']}, deltas from the full snapshot of {record['snapshot']}"
    parts = [versions_table([record]), root, _table(lines, num_texts=4)]
    return "\n\n".join([*parts, *(delta_table(delta) for delta in record["deltas"])])


def delta_table(record: Record) -> str:
    """Draw one line per tensor of a delta file."""
    lines: list[Sequence[str]] = [_DELTA_HEAD]
    for t in record["tensors"]:
        lines.append(
            [
                f"{t['num_changed']:,}",
                f"{t['num_words']:,}",
                f"{t['num_bytes']:,}",
                f"{t['num_bytes'] / t['num_changed']:.2f}" if t["num_changed"] else "",
                f"{t['first']:,}",
                str(t["level"]),
                t["name"],
                ", ".join(f"{number} {codec}" for codec, number in t["blocks"].items()),
                t["base_digest"][:16],
                t["target_digest"][:16],
            ]
        )
    span = f"{record['file']}: from {record['base']} to {record['version']}"
    return f"{span}, {human(record['num_bytes'])}\n{_table(lines, num_texts=4)}"


def human(num_bytes: float) -> str:
    """Write a size with its unit; empty for nothing."""
    if num_bytes == 0:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def _table(lines: Sequence[Sequence[str]], num_texts: int) -> str:
    """Align columns; the last `num_texts` are text, to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    num_numbers = len(widths) - num_texts
    rows = []
    for line in lines:
        cells = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
        for i in range(num_numbers, len(widths)):
            cells[i] = line[i].ljust(widths[i])
        rows.append("  ".join(cells).rstrip())
    return "\n".join(rows)
