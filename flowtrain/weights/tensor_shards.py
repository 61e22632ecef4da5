"""Tensors as the codec sees them: runs of 16-bit words, each at an offset in a whole tensor."""

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

U16 = np.ndarray[tuple[int], np.dtype[np.uint16]]
"""A flat, contiguous view of a tensor's bits as 16-bit words."""
Digest = tuple[int, int]
"""Two sums mod 2^64 over the words of a tensor or shard; digests of shards add up. See
docs/delta-format.md."""
_MASK = (1 << 64) - 1


def add(*digests: Digest) -> Digest:
    """Add digests up: the digest of several shards together."""
    return sum(a for a, _ in digests) & _MASK, sum(b for _, b in digests) & _MASK


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
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.dtype!r} is not a dtype of this torch")
        return dtype

    @property
    def num_words(self) -> int:
        return prod(self.shape) * self.torch_dtype.itemsize // 2


Layout = dict[str, TensorSpec]
"""The tensors of a model by name."""


def num_words_of(layout: Layout) -> int:
    """Count the 16-bit words of a model."""
    return sum(spec.num_words for spec in layout.values())


def layout_hash(layout: Mapping[str, TensorSpec]) -> str:
    """Hash names, dtypes and shapes into 32 hex digits."""
    text = json.dumps({name: [spec.dtype, spec.shape] for name, spec in sorted(layout.items())})
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """A contiguous run of rows of a tensor."""

    name: str
    spec: TensorSpec
    """Spec of the whole tensor."""
    first: int
    """Index in the tensor of the shard's first word."""
    source: Tensor
    """The rows, in any dtype and on any device."""

    def rows(self) -> Tensor:
        """Return the rows contiguous and in the dtype of `spec`, on their device. This may be a
        copy: keep it no longer than needed.
        """
        return self.source.to(self.spec.torch_dtype).contiguous()

    def u16(self) -> U16:
        """Return the shard's words on the CPU."""
        return u16_view(self.rows().cpu())


def u16_view(tensor: Tensor) -> U16:
    """View the bits of a contiguous CPU tensor as a flat array that shares its memory."""
    flat = tensor.detach().reshape(-1)
    assert flat.numel() == 0 or flat.data_ptr() == tensor.data_ptr(), "not a view but a copy"
    words: U16 = flat.view(torch.int16).numpy().view(np.uint16)
    return words


def spec_of(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
    """Return the spec of a tensor that is stored as `dtype` (None: its own).

    Raises:
        ValueError: the tensor has an odd number of bytes.
    """
    dtype = dtype or tensor.dtype
    if tensor.numel() * dtype.itemsize % 2:
        raise ValueError(
            f"tensor {name!r} has an odd number of bytes ({tuple(tensor.shape)} {dtype}); the "
            "store counts in 16-bit words"
        )
    return TensorSpec(str(dtype).removeprefix("torch."), tuple(tensor.shape))


def local_shards(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None, rank: int, num_ranks: int
) -> list[TensorShard]:
    """Return this rank's shards of named tensors, to be cast to `dtype` (None: as they are).

    A DTensor must be sharded by rows over all ranks (FSDP2). Any other tensor is whole on every
    rank, and a hash of its name picks the rank that publishes it.
    """
    shards = []
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
            shards.append(TensorShard(name, spec, first_row * row_words, source=source.detach()))
    return shards


def _first_row(name: str, tensor: DTensor, num_ranks: int) -> int:
    placements, mesh = tensor.placements, tensor.device_mesh
    if mesh.size() != num_ranks or tuple(placements) != (Shard(0),):
        raise ValueError(
            f"tensor {name!r} is placed as {placements} over {mesh.size()} ranks; the store needs "
            f"Shard(0) over all {num_ranks}"
        )
    num_rows = -(-tensor.shape[0] // num_ranks)  # as torch.chunk cuts
    return min(mesh.get_local_rank() * num_rows, tensor.shape[0])
