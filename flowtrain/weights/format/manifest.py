"""The manifest of a version: the layout and digests of its weights, and the files that lead to
them.

A manifest is one JSON file, written after all files that it names. A full snapshot is called
"anchor" there and in file names. This module does not import torch, so that a file server starts at
once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

import numpy as np

from flowtrain import _delta
from flowtrain.records import UserError
from flowtrain.utils.errors import user_error

if TYPE_CHECKING:
    import torch

FORMAT = 1
MAX_MANIFEST = 64 << 20
"""Longest manifest in bytes."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Errors of reading a record that has other fields than it should."""
Digest = tuple[int, int]
"""Two sums mod 2^64 over the words of a tensor or shard; digests of shards add up. See
docs/delta-format.md."""
_MASK = (1 << 64) - 1
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "uint8": 1}
"""Bytes of an element: whoever only serves files need not import torch to count them."""


class StoreError(UserError):
    """The store is damaged or a request to it is invalid; the message says what to do."""


class NotThere(StoreError):
    """The server has no such file."""


# ---- tensors, and digests of their words


def add(*digests: Digest) -> Digest:
    """Add digests up: the digest of several shards together."""
    return sum(a for a, _ in digests) & _MASK, sum(b for _, b in digests) & _MASK


def add_up(names: Iterable[str], digests: Sequence[Mapping[str, Digest]]) -> dict[str, Digest]:
    """Add up the digests of all ranks' shards by tensor."""
    return {name: add(*((d[name][0], d[name][1]) for d in digests if name in d)) for name in names}


def subtract(x: Digest, y: Digest) -> Digest:
    """Return the digest change from y to x."""
    return (x[0] - y[0]) & _MASK, (x[1] - y[1]) & _MASK


def digest_hex(digest: Digest) -> str:
    """Write a digest as 32 hex digits, as in a manifest."""
    return "".join(f"{part:016x}" for part in digest)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype and shape of a whole tensor."""

    dtype: str
    """The name in torch: "bfloat16"."""
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.dtype!r} is not a dtype of this torch")
        return dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * (_BYTES.get(self.dtype) or self.torch_dtype.itemsize)

    @property
    def num_words(self) -> int:
        return self.num_bytes // 2


Layout = dict[str, TensorSpec]
"""The tensors of a model by name."""


def num_words_of(layout: Layout) -> int:
    """Count the 16-bit words of a model."""
    return sum(spec.num_words for spec in layout.values())


def layout_hash(layout: Mapping[str, TensorSpec]) -> str:
    """Hash names, dtypes and shapes into 32 hex digits."""
    text = json.dumps({name: [spec.dtype, spec.shape] for name, spec in sorted(layout.items())})
    return hashlib.sha256(text.encode()).hexdigest()[:32]


ADAPTER_PREFIX = "base_model.model."
"""The text that peft puts before the names of an adapter's tensors."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The low-rank adapters of one model: W becomes W + alpha / rank * B A, with A [rank, in] and
    B [out, rank].
    """

    rank: int
    alpha: float
    layout: Layout
    """A and B of every adapted layer, as each version of a store holds them."""

    @property
    def modules(self) -> list[str]:
        """Names of the adapted layers, as the model has them."""
        names = {name.removeprefix(ADAPTER_PREFIX).partition(".lora_")[0] for name in self.layout}
        return sorted(names)

    @property
    def targets(self) -> list[str]:
        """Ends of their names."""
        return sorted({name.rpartition(".")[2] for name in self.modules})


# ---- files


@dataclass(frozen=True, slots=True)
class File:
    """A file of a version."""

    name: str
    num_bytes: int
    xxh3: str
    """Checksum of the whole file in 16 hex digits."""


def read_whole(path: Path, limit: int) -> bytes:
    """Read a file whole. Raises StoreError when it is a device, or longer than `limit` bytes."""
    if not S_ISREG(path.stat().st_mode):
        raise StoreError(f"{path} is not a regular file")
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise StoreError(f"{path} is longer than {limit} bytes")
    return data


def total_bytes(files: Iterable[File]) -> int:
    """Add up the sizes of files."""
    return sum(file.num_bytes for file in files)


def record(path: Path) -> File:
    """Return the record of a file, with its checksum."""
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


# ---- the manifest


@dataclass(frozen=True, slots=True)
class Manifest:
    """A version of the weights."""

    version: int
    layout: Layout
    digests: dict[str, Digest]
    """Digest of each whole tensor."""
    snapshot: int
    """The newest version, up to this one, with a full snapshot from which deltas lead here."""
    snapshot_files: tuple[File, ...]
    """The full snapshot, one file per rank of the trainer; empty when this version has none."""
    delta_files: dict[int, tuple[File, ...]]
    """Delta files by the version that they start from."""
    num_changed: int
    """Number of words that differ from the previous version; all words of a first version."""
    reason: str
    """The reason for a full snapshot; empty when there is none."""

    @property
    def root(self) -> str:
        """Hash of the contents: equal for equal weights of equal layout."""
        text = json.dumps([layout_hash(self.layout), sorted(self.digests.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def num_words(self) -> int:
        return num_words_of(self.layout)

    @property
    def files(self) -> list[File]:
        """All files of the version."""
        return [*self.snapshot_files, *(f for files in self.delta_files.values() for f in files)]

    def missed_by(self, start: Manifest, changes: Mapping[str, Digest]) -> list[str]:
        """Return the tensors whose digests do not reach this version when `changes` are applied to
        `start`.
        """
        return [
            name
            for name, digest in self.digests.items()
            if add(start.digests[name], changes.get(name, (0, 0))) != digest
        ]

    def to_json(self) -> str:
        record = {
            "format": FORMAT,
            "version": self.version,
            "root": self.root,
            "layout": layout_hash(self.layout),
            "tensors": {
                name: asdict(spec) | {"digest": digest_hex(self.digests[name])}
                for name, spec in self.layout.items()
            },
            "anchor": self.snapshot,
            "anchor_files": [asdict(file) for file in self.snapshot_files],
            "delta_files": {
                str(base): [asdict(file) for file in files]
                for base, files in self.delta_files.items()
            },
            "num_changed": self.num_changed,
            "reason": self.reason,
        }
        return json.dumps(record, indent=1)

    @classmethod
    def of_version(cls, version: int, data: bytes, path: str) -> Manifest:
        """Return the manifest of a version, from JSON text. Raises StoreError for an invalid
        manifest or one of another version.
        """
        manifest = cls.from_json(data.decode(errors="replace"), path)
        if manifest.version != version:
            raise StoreError(f"{path} describes version {manifest.version}; it was moved")
        return manifest

    @classmethod
    def from_json(cls, text: str, path: str) -> Manifest:
        """Read a manifest.

        Raises:
            StoreError: the text is no manifest or is inconsistent; the message names `path`.
        """
        with user_error(f"{path} is damaged", *_MALFORMED, raises=StoreError):
            record = json.loads(text)
            if not isinstance(record, dict) or not isinstance(record.get("format"), int):
                raise StoreError(f"{path} is not the manifest of a weight store")
            check_format(path, record["format"])
            manifest = cls._from_record(record)
        hashes = (manifest.root, layout_hash(manifest.layout))
        if hashes != (record.get("root"), record.get("layout")):
            raise StoreError(f"{path} is damaged: its root is not that of its tensors")
        version = manifest.version
        if manifest.snapshot > version or any(base >= version for base in manifest.delta_files):
            raise StoreError(
                f"{path} is damaged: version {version} starts from a version that is not before it"
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
            snapshot=int(record["anchor"]),
            snapshot_files=tuple(_file(f) for f in record["anchor_files"]),
            delta_files={
                int(base): tuple(_file(f) for f in files)
                for base, files in record["delta_files"].items()
            },
            num_changed=int(record["num_changed"]),
            reason=str(record["reason"]),
        )


def check_format(path: object, number: int) -> None:
    """Raise StoreError when a newer flowtrain wrote the file."""
    if number > FORMAT:
        raise StoreError(
            f"{path} has format {number}; this code reads up to {FORMAT}, a newer flowtrain is "
            "needed"
        )


def _spec(record: Mapping[str, Any]) -> TensorSpec:
    spec = TensorSpec(str(record["dtype"]), tuple(int(n) for n in record["shape"]))
    if any(n < 0 for n in spec.shape) or spec.num_bytes % 2:
        raise ValueError(f"{spec} is not a tensor of 16-bit words")
    return spec


def _file(record: Mapping[str, Any]) -> File:
    file = File(str(record["name"]), int(record["num_bytes"]), str(record["xxh3"]))
    if not _FILE_NAME.fullmatch(file.name):
        raise StoreError(
            f"a manifest names the file {file.name!r}, which is outside its folder or no "
            "safetensors file"
        )
    return file
