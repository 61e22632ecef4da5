"""What a store, a version or a delta file holds, as records for JSON and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowtrain import _delta
from flowtrain.weights.files import open_delta
from flowtrain.weights.manifest import File, Manifest, StoreError
from flowtrain.weights.remote import NotThere
from flowtrain.weights.store import Source, WeightStore

_CODECS = ("empty", "pairs", "rice", "class rice", "bitmap", "dense")
"""In the order of `num_blocks` of a delta."""

Record = dict[str, Any]


def list_versions(source: Source) -> list[int]:
    """In order. Over HTTP nothing can be listed: from HEAD back, by the deltas and, where there are
    none, by one.
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
    """A line of the table of versions."""
    bases = sorted(manifest.delta_files, reverse=True)
    delta_bytes = _size(manifest.delta_files[bases[0]]) if bases else 0
    return {
        "version": manifest.version,
        "num_changed": manifest.num_changed,
        "density": manifest.num_changed / max(manifest.num_words, 1),
        "bases": bases,
        "delta_bytes": delta_bytes,
        "bytes_per_change": delta_bytes / manifest.num_changed
        if delta_bytes and manifest.num_changed
        else None,
        "skip_bytes": sum(_size(manifest.delta_files[base]) for base in bases[1:]),
        "anchor_bytes": _size(manifest.anchor_files),
        "anchor": manifest.anchor,
        "reason": manifest.reason,
    }


def damaged_record(version: int, error: StoreError) -> Record:
    return {"version": version, "error": str(error)}


def whole_record(source: Source, manifest: Manifest) -> Record:
    """A version with its tensors and its delta files."""
    tensors = [
        {
            "name": name,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "num_words": spec.num_words,
            "digest": _hex(manifest.digests[name]),
        }
        for name, spec in manifest.layout.items()
    ]
    paths = [
        source.fetch(manifest.version, file)
        for _, files in sorted(manifest.delta_files.items(), reverse=True)
        for file in files
    ]
    deltas = [delta_record(path) for path in paths]
    return version_record(manifest) | {"root": manifest.root, "tensors": tensors, "deltas": deltas}


def delta_record(path: Path) -> Record:
    """A delta file with its tensors. Raises StoreError when it is none, or damaged."""
    header, blobs = open_delta(path)
    tensors = []
    for name, blob in blobs.items():
        try:
            info = _delta.info(blob)
        except _delta.DeltaError as error:
            raise StoreError(f"{path}: the delta of {name!r} is damaged: {error}") from error
        tensors.append(
            {
                "name": name,
                "first": info["first"],
                "num_words": info["num_words"],
                "num_changed": info["num_changed"],
                "num_bytes": info["num_bytes"],
                "level": info["level"],
                "blocks": {
                    codec: n for codec, n in zip(_CODECS, info["num_blocks"], strict=True) if n
                },
                "base_digest": _hex(info["base_digest"]),
                "target_digest": _hex(info["target_digest"]),
            }
        )
    named = {key: header[key] for key in ("base", "version", "layout")}
    return {"file": path.name, "num_bytes": path.stat().st_size, **named, "tensors": tensors}


def versions_table(records: Sequence[Record]) -> str:
    lines = [
        [
            "version",
            "changed",
            "density",
            "delta",
            "bytes/change",
            "skips",
            "anchor",
            "deltas from",
            "why an anchor",
        ]
    ]
    for r in records:
        if "error" in r:
            lines.append([str(r["version"]), "damaged", *[""] * 6, r["error"]])
            continue
        per_change = "" if r["bytes_per_change"] is None else f"{r['bytes_per_change']:.2f}"
        sizes = [
            human(r["delta_bytes"]),
            per_change,
            human(r["skip_bytes"]),
            human(r["anchor_bytes"]),
        ]
        bases = ", ".join(map(str, r["bases"]))
        lines.append(
            [
                str(r["version"]),
                f"{r['num_changed']:,}",
                f"{r['density']:.3%}",
                *sizes,
                bases,
                r["reason"],
            ]
        )
    return _table(lines, num_texts=2)


def whole_table(record: Record) -> str:
    lines = [["tensor", "dtype", "shape", "digest"]]
    lines += [
        [t["name"], t["dtype"], "x".join(map(str, t["shape"])) or "scalar", t["digest"][:16]]
        for t in record["tensors"]
    ]
    parts = [
        versions_table([record]),
        f"root {record['root']}, deltas from anchor {record['anchor']}",
        _table(lines, num_texts=4),
    ]
    return "\n\n".join([*parts, *(delta_table(delta) for delta in record["deltas"])])


def delta_table(record: Record) -> str:
    lines = [
        [
            "changed",
            "of words",
            "bytes",
            "bytes/change",
            "from word",
            "level",
            "tensor",
            "blocks",
            "digest before",
            "after",
        ]
    ]
    for t in record["tensors"]:
        per_change = f"{t['num_bytes'] / t['num_changed']:.2f}" if t["num_changed"] else ""
        numbers = [
            f"{t['num_changed']:,}",
            f"{t['num_words']:,}",
            f"{t['num_bytes']:,}",
            per_change,
            f"{t['first']:,}",
            str(t["level"]),
        ]
        blocks = ", ".join(f"{n} {codec}" for codec, n in t["blocks"].items())
        lines.append([*numbers, t["name"], blocks, t["base_digest"][:16], t["target_digest"][:16]])
    return (
        f"{record['file']}: from {record['base']} to {record['version']}, "
        f"{human(record['num_bytes'])}\n" + _table(lines, num_texts=4)
    )


def human(num_bytes: float) -> str:
    """Empty for nothing."""
    if num_bytes == 0:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def _table(lines: Sequence[Sequence[str]], num_texts: int) -> str:
    """Columns as wide as they must be; the last `num_texts` are text and stand to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    num_numbers = len(widths) - num_texts
    rows = []
    for line in lines:
        cells = [
            text.ljust(width) if i >= num_numbers else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        rows.append("  ".join(cells).rstrip())
    return "\n".join(rows)


def _hex(digest: tuple[int, int]) -> str:
    return "".join(f"{part:016x}" for part in digest)


def _size(files: Sequence[File]) -> int:
    return sum(file.num_bytes for file in files)
