"""The two kinds of files of a version, both legal safetensors: anchors hold tensors, deltas hold
the codec's bytes as U8 tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowtrain import _delta
from flowtrain.weights.manifest import FORMAT, File, StoreError
from flowtrain.weights.tensor_shards import Layout, Piece, layout_hash

Blob = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""A delta of one piece, as `_delta.encode` returns it."""
_KEY = "flowtrain_delta"
_HEAD = {"format": int, "layout": str, "base": int, "version": int}


def write_anchor(path: Path, found: Sequence[Piece]) -> File:
    """The pieces as tensors of their rows; with one rank this is the model as any safetensors
    reader loads it.
    """
    metadata = {"format": "pt", "first": json.dumps({piece.name: piece.first for piece in found})}
    save_file(_apart({piece.name: piece.rows().cpu() for piece in found}), path, metadata=metadata)
    return seal(path)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights each in memory of their own, as safetensors wants it."""
    seen: set[int] = set()
    return {
        name: tensor if _is_new(tensor, seen) else tensor.clone()
        for name, tensor in tensors.items()
    }


def _is_new(tensor: Tensor, seen: set[int]) -> bool:
    place = tensor.untyped_storage().data_ptr()
    is_new = place not in seen
    seen.add(place)
    return is_new


def write_delta(
    path: Path, blobs: Mapping[str, Blob], layout: Layout, base: int, version: int
) -> File:
    """The deltas of pieces by the name of their tensor; what did not change is left out."""
    head = {"format": FORMAT, "layout": layout_hash(layout), "base": base, "version": version}
    metadata = {_KEY: json.dumps(head)}  # one key, because safetensors writes several in any order
    save_file(
        {name: torch.from_numpy(blob) for name, blob in blobs.items()}, path, metadata=metadata
    )
    return seal(path)


def seal(path: Path) -> File:
    """Flush a finished file to the disk and take its checksum."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return File(path.name, path.stat().st_size, checksum(path))


def checksum(path: Path) -> str:
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    return f"{_delta.xxh3(np.asarray(data)):016x}"


def check(path: Path, expected: File) -> None:
    """Raises StoreError when the file is not what the manifest says."""
    size = path.stat().st_size
    if size != expected.num_bytes:
        raise StoreError(
            f"{path} has {size} bytes, its manifest says {expected.num_bytes}; delete it, or "
            "publish an anchor"
        )
    if checksum(path) != expected.xxh3:
        raise StoreError(
            f"{path} does not have the checksum of its manifest; delete it, or publish an anchor"
        )


def read_delta(path: Path, layout: Layout, base: int, version: int) -> dict[str, Blob]:
    """Raises StoreError when the file belongs to other weights or versions."""
    head, blobs = open_delta(path)
    if (head["base"], head["version"]) != (base, version):
        raise StoreError(
            f"{path} leads from version {head['base']} to {head['version']}, not from {base} to "
            f"{version}"
        )
    if head["layout"] != layout_hash(layout):
        raise StoreError(f"{path} belongs to a model of another layout")
    if foreign := sorted(blobs.keys() - layout.keys()):
        raise StoreError(
            f"{path} holds a delta of {foreign[0]!r}, a tensor that the model does not have"
        )
    return blobs


def open_delta(path: Path) -> tuple[dict[str, Any], dict[str, Blob]]:
    """What a delta file says of itself (format, layout, base, version), and its deltas by tensor."""
    with _opened(path) as file:
        head = _json_object((file.metadata() or {}).get(_KEY, ""))
        if isinstance(head.get("format"), int) and head["format"] > FORMAT:
            raise StoreError(
                f"{path} has format {head['format']}; this code reads up to {FORMAT}, a newer "
                "flowtrain is needed"
            )
        if not all(isinstance(head.get(key), kind) for key, kind in _HEAD.items()):
            raise StoreError(f"{path} is not a delta of this store")
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        if odd := [
            name
            for name, tensor in tensors.items()
            if tensor.dtype != torch.uint8 or tensor.dim() != 1
        ]:
            raise StoreError(
                f"{path} holds {odd[0]!r} as {tensors[odd[0]].dtype}; a delta is a run of bytes"
            )
        return head, {name: tensor.numpy() for name, tensor in tensors.items()}


def read_anchor(path: Path, layout: Layout) -> list[Piece]:
    """The pieces of an anchor file, mapped from the disk. Raises StoreError when they are not of
    this layout.
    """
    with _opened(path) as file:
        firsts = _json_object((file.metadata() or {}).get("first", ""))
        found = []
        for name in sorted(file.keys()):
            local, spec = file.get_tensor(name), layout.get(name)
            is_ours = spec is not None and (str(local.dtype), local.shape[1:]) == (
                f"torch.{spec.dtype}",
                spec.shape[1:],
            )
            if spec is None or not is_ours or not isinstance(firsts.get(name), int):
                raise StoreError(
                    f"{path} holds {name!r} as {local.dtype} {tuple(local.shape)}, its manifest "
                    f"says {spec}"
                )
            found.append(Piece(name, spec, firsts[name], local))
        return found


def _json_object(text: str) -> dict[str, Any]:
    """Empty where the text is something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path} is no safetensors file: {error}") from error
