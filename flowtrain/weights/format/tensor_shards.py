"""Tensors as the codec sees them: runs of 16-bit words, each at an offset in a whole tensor, with
their digests and deltas.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from flowkernels import digest_words
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from flowtrain import _delta
from flowtrain.weights.format.manifest import Digest, TensorSpec, add, add_up, subtract
from flowtrain.weights.ranks import Ranks, SingleRank, gather

U16 = np.ndarray[tuple[int], np.dtype[np.uint16]]
"""A flat, contiguous view of a tensor's bits as 16-bit words."""
Blob = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""The delta of one shard, as `_delta.encode` returns it."""
ShardKey = tuple[str, int]
"""Name of a tensor, and index of a shard's first word in it."""
DeltaBatch = dict[ShardKey, Blob]
"""The deltas that lead from one version to another; a shard that is left out did not change."""


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

    def words(self) -> Tensor:
        """Return the shard's words as int16, flat, on their device: perhaps a copy, as `rows`."""
        return self.rows().view(-1).view(torch.int16)

    def u16(self) -> U16:
        """Return the shard's words on the CPU."""
        return u16_view(self.words().cpu())


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


def digest_of(run: Tensor, first: int = 0, num_threads: int = 1) -> Digest:
    """Digest contiguous words of any dtype, on any device."""
    if run.device.type == "cpu":
        digest: Digest = _delta.digest(u16_view(run), first=first, num_threads=num_threads)
        return digest
    return to_digest(digest_words(run, first))


def to_digest(pair: Tensor) -> Digest:
    """Read a digest that a kernel computed as two int64."""
    a, b = pair.tolist()
    return add((a, b))


def digest_change(blob: Blob) -> Digest:
    """Return what a delta adds to the digest of its tensor."""
    info = _delta.info(blob)
    return subtract(info["target_digest"], info["base_digest"])


def digests_of(
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    ranks: Ranks | None = None,
    num_threads: int = 1,
) -> dict[str, Digest]:
    """Compute the digest of every whole tensor; collective over `ranks`.

    Args:
        tensors: plain, or DTensors sharded by rows over the ranks, as for `Publisher.publish`.
        dtype: the dtype that they are cast to; None: their own.
    """
    ranks = ranks or SingleRank()
    shards = local_shards(tensors, dtype, ranks.rank, num_ranks=ranks.size)
    digests = {shard.name: digest_of(shard.rows(), shard.first, num_threads) for shard in shards}
    return add_up(sorted(tensors), gather(ranks, digests))
