"""The two kinds of safetensors files of a version: full snapshots hold tensors, delta files hold
the codec's bytes as U8 tensors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from flowtrain.utils.errors import user_error
from flowtrain.utils.files import share, sync, writing
from flowtrain.weights.format.manifest import (
    FORMAT,
    File,
    Layout,
    StoreError,
    check_format,
    layout_hash,
    record,
)
from flowtrain.weights.format.tensor_shards import Blob, TensorShard

_DELTA_KEY = "flowtrain_delta"
_DELTA_FIELDS = {"format": int, "layout": str, "base": int, "version": int}


def check_storable(layout: Layout) -> None:
    """Raise ValueError for a layout that a file cannot store or restore."""
    if not layout:
        raise ValueError("there are no tensors to publish")
    if "__metadata__" in layout:
        raise ValueError("no tensor can be called '__metadata__' in a safetensors file")
    for name, spec in layout.items():
        try:
            save({name: torch.empty(0, dtype=spec.torch_dtype)})
        except (KeyError, SafetensorError) as error:
            raise ValueError(f"tensor {name[:80]!r}: no file can hold {spec.dtype}") from error


def write_snapshot(path: Path, shards: Sequence[TensorShard]) -> File:
    """Write shards as tensors of their rows. The file of a single rank is the whole model in a form
    that any safetensors reader loads.
    """
    tensors = {}
    memories = set()
    for shard in shards:
        rows = shard.rows().cpu()
        memory = rows.untyped_storage().data_ptr()
        # safetensors refuses tied weights: each gets memory of its own.
        tensors[shard.name] = rows.clone() if memory in memories else rows
        memories.add(memory)
    firsts = json.dumps({shard.name: shard.first for shard in shards})
    save_file(tensors, path, metadata={"format": "pt", "first": firsts})
    return seal(path)


def write_delta(
    path: Path, blobs: Mapping[str, Blob], layout: Layout, base: int, version: int
) -> File:
    """Write the deltas of shards, by tensor, without unchanged tensors."""
    head = {"format": FORMAT, "layout": layout_hash(layout), "base": base, "version": version}
    # One key, because safetensors writes several in any order.
    metadata = {_DELTA_KEY: json.dumps(head)}
    save_file({name: torch.from_numpy(blob) for name, blob in blobs.items()}, path, metadata)
    return seal(path)


@contextmanager
def writing_tensors(path: Path) -> Iterator[None]:
    """`writing` for libraries in Rust, whose errors name the system's number in their text."""
    with writing(path):
        try:
            yield
        except Exception as error:  # tokenizers has no class for its errors
            match = re.search(r"\(os error (\d+)\)", str(error))
            if match is not None:
                raise OSError(int(match[1]), os.strerror(int(match[1]))) from error
            if isinstance(error, SafetensorError):
                raise OSError(str(error)) from error
            raise


def seal(path: Path) -> File:
    """Flush a finished file to the disk and take its checksum."""
    share(path)
    sync(path)
    return record(path)


def read_delta(path: Path, layout: Layout, base: int, version: int) -> dict[str, Blob]:
    """Read the deltas of a file by tensor.

    Raises:
        StoreError: the file belongs to another model or other versions.
    """
    with _open(path) as file:
        head = _json_object(file, _DELTA_KEY)
        if isinstance(head.get("format"), int):
            check_format(path, head["format"])
        if not all(isinstance(head.get(key), kind) for key, kind in _DELTA_FIELDS.items()):
            raise StoreError(f"{path} is not a delta of this store")
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    for name, tensor in tensors.items():
        if tensor.dtype != torch.uint8 or tensor.dim() != 1:
            raise StoreError(f"{path} holds {name!r} as {tensor.dtype}; a delta is a run of bytes")
    if (head["base"], head["version"]) != (base, version):
        raise StoreError(
            f"{path} leads from version {head['base']} to {head['version']}, not from {base} to "
            f"{version}"
        )
    if head["layout"] != layout_hash(layout):
        raise StoreError(f"{path} belongs to a model of another layout")
    if unknown := sorted(tensors.keys() - layout.keys()):
        raise StoreError(
            f"{path} holds a delta of {unknown[0]!r}, a tensor that the model does not have"
        )
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def read_snapshot(path: Path, layout: Layout) -> list[TensorShard]:
    """Return the shards of a snapshot file, mapped from the disk.

    Raises:
        StoreError: the file holds tensors of another layout.
    """
    shards = []
    with _open(path) as file:
        firsts = _json_object(file, "first")
        for name in sorted(file.keys()):
            rows = file.get_tensor(name)
            spec = layout.get(name)
            first = firsts.get(name)
            if (
                spec is None
                or str(rows.dtype) != f"torch.{spec.dtype}"
                or rows.shape[1:] != spec.shape[1:]
                or not isinstance(first, int)
            ):
                raise StoreError(
                    f"{path} holds {name!r} as {rows.dtype} {tuple(rows.shape)}, its manifest says "
                    f"{spec}"
                )
            shards.append(TensorShard(name, spec, first, source=rows))
    return shards


def _json_object(file: safe_open, key: str) -> dict[str, Any]:
    """Return the JSON object under a key of the metadata; empty when there is none."""
    with suppress(ValueError, RecursionError):
        record = json.loads((file.metadata() or {}).get(key, ""))
        if isinstance(record, dict):
            return record
    return {}


def _open(path: Path) -> safe_open:
    with user_error(
        f"{path} is not a safetensors file", SafetensorError, OSError, raises=StoreError
    ):
        return safe_open(path, "pt")
