"""What a version is and how to get it: one JSON file, written when everything that it names is in
place.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from flowtrain.types import UserError
from flowtrain.weights.tensor_shards import Digest, Layout, TensorSpec, layout_hash

FORMAT = 1
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")


class StoreError(UserError):
    """The store, or what it was asked for, is not in order; the text says what to do."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a version."""

    name: str
    num_bytes: int
    xxh3: str
    """16 hex digits, of the whole file."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A version of the weights."""

    version: int
    layout: Layout
    digests: dict[str, Digest]
    """Of each whole tensor."""
    anchor: int
    """The newest version, this or an earlier one, from whose anchor deltas lead here."""
    anchor_files: tuple[File, ...]
    """The tensors themselves, one file per rank of the trainer; empty when this version has no
    anchor."""
    delta_files: dict[int, tuple[File, ...]]
    """By the version they start from."""
    num_changed: int
    """Words that differ from the version before; all of them when there is none."""
    reason: str
    """Why there is an anchor; empty when there is none."""

    @property
    def root(self) -> str:
        """One string for the contents: equal for equal weights of equal layout."""
        text = json.dumps([layout_hash(self.layout), sorted(self.digests.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def num_bytes(self) -> int:
        """Of the whole tensors."""
        return 2 * self.num_words

    @property
    def num_words(self) -> int:
        return sum(spec.num_words for spec in self.layout.values())

    def to_json(self) -> str:
        record = {
            "format": FORMAT,
            "version": self.version,
            "root": self.root,
            "layout": layout_hash(self.layout),
            "tensors": {
                name: {
                    "dtype": spec.dtype,
                    "shape": spec.shape,
                    "digest": "".join(f"{part:016x}" for part in self.digests[name]),
                }
                for name, spec in self.layout.items()
            },
            "anchor": self.anchor,
            "anchor_files": [_file_record(file) for file in self.anchor_files],
            "delta_files": {
                str(base): [_file_record(file) for file in files]
                for base, files in self.delta_files.items()
            },
            "num_changed": self.num_changed,
            "reason": self.reason,
        }
        return json.dumps(record, indent=1)

    @classmethod
    def from_json(cls, text: str, place: str) -> Manifest:
        """Raises StoreError, naming `place`, when the text is not a manifest or contradicts itself."""
        try:
            record = json.loads(text)
            if not isinstance(record, dict) or not isinstance(record.get("format"), int):
                raise StoreError(f"{place} is no manifest of a weight store")
            if record["format"] > FORMAT:
                raise StoreError(
                    f"{place} has format {record['format']}; this code reads up to {FORMAT}, a "
                    "newer flowtrain is needed"
                )
            manifest = cls._from_record(record)
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{place} is damaged: {type(error).__name__}: {error}") from error
        if (manifest.root, layout_hash(manifest.layout)) != (
            record.get("root"),
            record.get("layout"),
        ):
            raise StoreError(f"{place} is damaged: its root is not that of its tensors")
        if (
            not all(base < manifest.version for base in manifest.delta_files)
            or manifest.anchor > manifest.version
        ):
            raise StoreError(
                f"{place} is damaged: version {manifest.version} starts from a version that is not "
                "before it"
            )
        return manifest

    @classmethod
    def _from_record(cls, record: Mapping[str, Any]) -> Manifest:
        tensors = record["tensors"]
        return cls(
            version=int(record["version"]),
            layout={name: _spec(t) for name, t in tensors.items()},
            digests={
                name: (int(t["digest"][:16], 16), int(t["digest"][16:], 16))
                for name, t in tensors.items()
            },
            anchor=int(record["anchor"]),
            anchor_files=tuple(_file(f) for f in record["anchor_files"]),
            delta_files={
                int(base): tuple(_file(f) for f in files)
                for base, files in record["delta_files"].items()
            },
            num_changed=int(record["num_changed"]),
            reason=str(record["reason"]),
        )


def _file_record(file: File) -> dict[str, Any]:
    return {"name": file.name, "num_bytes": file.num_bytes, "xxh3": file.xxh3}


def _spec(record: Mapping[str, Any]) -> TensorSpec:
    spec = TensorSpec(str(record["dtype"]), tuple(int(n) for n in record["shape"]))
    if any(n < 0 for n in spec.shape) or prod(spec.shape) * spec.torch_dtype.itemsize % 2:
        raise ValueError(f"{spec} is no tensor of 16-bit words")
    return spec


def _file(record: Mapping[str, Any]) -> File:
    file = File(str(record["name"]), int(record["num_bytes"]), str(record["xxh3"]))
    if not _FILE_NAME.fullmatch(file.name):
        raise StoreError(
            f"a manifest names the file {file.name!r}, which is outside its folder or no "
            "safetensors file"
        )
    return file
