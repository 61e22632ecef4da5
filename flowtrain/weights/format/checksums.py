"""Files against their records in a manifest."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flowtrain import _delta
from flowtrain.weights.format.manifest import File, StoreError


def record(path: Path) -> File:
    """Take the checksum of a file."""
    return File(path.name, path.stat().st_size, _checksum(path))


def _checksum(path: Path) -> str:
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    return f"{_delta.xxh3(np.asarray(data)):016x}"


def checksum_of(data: bytes) -> str:
    """Take the checksum of bytes."""
    return f"{_delta.xxh3(np.frombuffer(data, np.uint8)):016x}"


def mismatch(path: Path, expected: File) -> str:
    """Describe how a file differs from its record; empty when it does not."""
    size = path.stat().st_size
    if size != expected.num_bytes:
        return f"has {size} bytes, its manifest says {expected.num_bytes}"
    if _checksum(path) != expected.xxh3:
        return "does not have the checksum of its manifest"
    return ""


def check(path: Path, expected: File) -> None:
    """Raise StoreError when a file differs from its record."""
    if problem := mismatch(path, expected):
        raise StoreError(f"{path} {problem}; delete it, or publish a full snapshot")
