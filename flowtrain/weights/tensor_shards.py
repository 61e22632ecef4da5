"""Tensors as the codec sees them: runs of 16-bit words, each at its place in a whole tensor."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

Words = np.ndarray[tuple[int], np.dtype[np.uint16]]
"""A flat, contiguous view of a tensor's bits."""
Digest = tuple[int, int]
"""Two sums mod 2^64 over the words of a tensor or of a piece of it; pieces add up. See
docs/delta-format.md."""
_MASK = (1 << 64) - 1


def add(*digests: Digest) -> Digest:
    """The digest of pieces together."""
    return sum(a for a, _ in digests) & _MASK, sum(b for _, b in digests) & _MASK


def subtract(x: Digest, y: Digest) -> Digest:
    return (x[0] - y[0]) & _MASK, (x[1] - y[1]) & _MASK


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is, whoever holds it."""

    dtype: str
    """As in torch: "bfloat16"."""
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.dtype!r} is no dtype that this torch knows")
        return dtype

    @property
    def num_words(self) -> int:
        return prod(self.shape) * self.torch_dtype.itemsize // 2


Layout = dict[str, TensorSpec]


def layout_hash(layout: Mapping[str, TensorSpec]) -> str:
    """Names, dtypes and shapes in 32 hex digits."""
    text = json.dumps({name: [spec.dtype, spec.shape] for name, spec in sorted(layout.items())})
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A contiguous run of rows of a tensor."""

    name: str
    spec: TensorSpec
    """Of the whole tensor."""
    first: int
    """Index of the piece's first word in the tensor."""
    source: Tensor
    """The rows, in whatever dtype and place they are."""

    def rows(self) -> Tensor:
        """In the dtype of `spec`, contiguous, on their device: a copy only where those ask for one,
        so keep it no longer than needed.
        """
        return self.source.to(self.spec.torch_dtype).contiguous()

    def words(self) -> Words:
        """On the CPU."""
        return words_of(self.rows().cpu())


def words_of(tensor: Tensor) -> Words:
    """The bits of a contiguous CPU tensor as a flat array that shares its memory."""
    flat = tensor.detach().reshape(-1)
    assert flat.numel() == 0 or flat.data_ptr() == tensor.data_ptr(), (
        "a copy would be changed in its stead"
    )
    words: Words = flat.view(torch.int16).numpy().view(np.uint16)
    return words


def spec_of(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
    """Raises ValueError for a tensor of an odd number of bytes, which has no words."""
    kind = dtype or tensor.dtype
    if tensor.numel() * kind.itemsize % 2:
        raise ValueError(
            f"tensor {name!r} has an odd number of bytes ({tuple(tensor.shape)} {kind}); the store "
            "counts in 16-bit words"
        )
    return TensorSpec(str(kind).removeprefix("torch."), tuple(tensor.shape))


def pieces(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None, rank: int, num_ranks: int
) -> list[Piece]:
    """This rank's share of named tensors, to be cast to `dtype` (None: as they are).

    A DTensor must be sharded by rows over all ranks (FSDP2); any other tensor is whole on every
    rank, and its name decides whose it is.
    """
    found = []
    for name, tensor in sorted(tensors.items()):
        spec = spec_of(name, tensor, dtype)
        if isinstance(tensor, DTensor):
            first_row, source = _first_row(name, tensor, num_ranks), tensor.to_local()
        elif zlib.crc32(name.encode()) % num_ranks == rank:
            first_row, source = 0, tensor
        else:
            continue
        row_words = prod(spec.shape[1:]) * spec.torch_dtype.itemsize // 2
        if source.numel() or spec.num_words == 0:
            found.append(Piece(name, spec, first_row * row_words, source.detach()))
    return found


def _first_row(name: str, tensor: DTensor, num_ranks: int) -> int:
    placements, mesh = tensor.placements, tensor.device_mesh
    if mesh.size() != num_ranks or tuple(placements) != (Shard(0),):
        raise ValueError(
            f"tensor {name!r} is placed as {placements} over {mesh.size()} ranks; the store takes "
            f"rows over all {num_ranks}"
        )
    rows = -(-tensor.shape[0] // num_ranks)  # as torch.chunk cuts
    return min(mesh.get_local_rank() * rows, tensor.shape[0])
