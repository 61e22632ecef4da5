"""The tensors that a reader writes to, by the names of the store, wherever their words are: whole
in host memory, or as strided views of other memories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from flowkernels import digest_at, scatter_words_
from torch import Tensor

from flowtrain import _delta
from flowtrain.weights.format.manifest import Digest, Layout, Manifest, StoreError, add
from flowtrain.weights.format.tensor_shards import (
    U16,
    DeltaBatch,
    ShardKey,
    TensorShard,
    digest_of,
    spec_of,
    to_digest,
    u16_view,
)
from flowtrain.weights.load.word_changes import WordChanges
from flowtrain.weights.ranks import Ranks, SingleRank

_CHUNK = 1 << 20
"""Words that are digested at a time."""
_Dims = tuple[tuple[int, int, int], ...]
"""Dimensions of a view: (size, stride, stride in memory)."""


@dataclass(frozen=True, slots=True)
class PreparedBatches:
    """Deltas that a target has got ready to apply, batch after batch."""

    batches: Sequence[DeltaBatch]
    additions: Sequence[Mapping[ShardKey, Sequence[tuple[StridedView, WordChanges]]]] = ()
    """Words and places of each batch; an unprepared delta is decoded when it is applied."""


class Target(Protocol):
    """The weights of one model. Where several ranks hold parts of them, all must call its methods
    together.
    """

    @property
    def ranks(self) -> Ranks: ...

    def check(self, manifest: Manifest) -> None:
        """Raise StoreError when the version is of another model."""

    def prepare(self, batches: Sequence[DeltaBatch]) -> PreparedBatches:
        """Do what needs no weights: on each rank alone, on any thread, while the weights are used.

        Raises:
            DeltaError: a delta is damaged.
        """

    def apply(self, prepared: PreparedBatches) -> None:
        """Apply the deltas of one batch after another: all of them, or none.

        Raises:
            DeltaError: a delta is damaged, or the words are not its base; on every rank.
            Exception: anything else that happened; on every rank.
        """

    def write(self, shards: Sequence[TensorShard]) -> None:
        """Write every word of every tensor; the shards were checked before."""

    def digests(self) -> dict[str, Digest]:
        """Read all words and return the digests of whole tensors; a tensor that is another name of
        one may be left out.
        """

    def finish(self) -> None:
        """Make a load take effect."""


class HostTensors:
    """Tensors of this process: CPU tensors are written to directly, others through a copy on the
    CPU. Those that are tied are written once.
    """

    def __init__(self, tensors: Mapping[str, Tensor], num_threads: int = 1) -> None:
        """Raise ValueError for tensors that share a part of their memory."""
        self.ranks = SingleRank()
        self._layout = {name: spec_of(name, tensor) for name, tensor in tensors.items()}
        self._twins = _twins(tensors)
        self._tensors = {name: t for name, t in tensors.items() if name not in self._twins}
        self._host = {name: _host(tensor) for name, tensor in self._tensors.items()}
        self._num_threads = num_threads
        self._written: set[str] = set()

    def check(self, manifest: Manifest) -> None:
        check_layout(self._layout, manifest.layout, manifest.version)
        for name, twin in self._twins.items():
            if manifest.digests[name] != manifest.digests[twin]:
                raise StoreError(
                    f"version {manifest.version} has {name!r} and {twin!r} apart; here they are "
                    "one tensor"
                )

    def prepare(self, batches: Sequence[DeltaBatch]) -> PreparedBatches:
        return PreparedBatches(batches)  # the codec writes as it reads

    def apply(self, prepared: PreparedBatches) -> None:
        self._written |= apply_batches(prepared.batches, self._host, self._num_threads)

    def write(self, shards: Sequence[TensorShard]) -> None:
        self._written |= self._tensors.keys()
        for shard in shards:
            if shard.name in self._host:
                write_shard(self._host[shard.name], shard)

    def digests(self) -> dict[str, Digest]:
        num_threads = self._num_threads
        return {n: digest_of(host, num_threads=num_threads) for n, host in self._host.items()}

    def finish(self) -> None:
        for name in self._written:
            tensor = self._tensors[name]
            if self._host[name] is not tensor:
                with torch.inference_mode(False), torch.no_grad():
                    tensor.copy_(self._host[name])
        self._written.clear()


@dataclass(frozen=True, slots=True, eq=False)
class StridedView:
    """Words of a stored tensor at other places in memory: cut for several ranks, fused, transposed.

    It is an affine copy: element (i, j, ...) is word `first + i * strides[0] + j * strides[1] + ..`
    of the tensor, and word `to_first + i * to_strides[0] + ..` of a memory, that of a parameter.
    """

    memory: Tensor
    """int16, flat: the storage of a parameter."""
    first: int
    to_first: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in the stored tensor: descending, and no word comes twice."""
    to_strides: tuple[int, ...]
    """Strides in the memory."""

    @property
    def is_run(self) -> bool:
        """True when the words are contiguous in both."""
        return self.strides == self.to_strides == (1,)

    @property
    def num_words(self) -> int:
        return prod(self.sizes)

    @property
    def end(self) -> int:
        """Index in the tensor after the view's last word."""
        return self.first + 1 + _num_spanned(self.sizes, self.strides)

    @property
    def region(self) -> str:
        """The words of the tensor as a key: equal for views of the same words."""
        return f"{self.first}:{self.sizes}:{self.strides}"

    def live(self) -> Tensor:
        """Return the words in memory."""
        return self.within(self.memory)

    def within(self, memory: Tensor) -> Tensor:
        """Return the view's words of a flat tensor as long as its memory."""
        return memory.as_strided(self.sizes, self.to_strides, self.to_first)

    def of_tensor(self, flat: Tensor) -> Tensor:
        """Return the view's words of a whole tensor."""
        return flat.as_strided(self.sizes, self.strides, self.first)

    def scatter(
        self, changes: WordChanges, num_threads: int = 1, *, is_undo: bool = False
    ) -> Tensor:
        """Add changes of the tensor's words, or take them back, leaving out those of words outside
        the view. Returns the digest change: int64 [2], on the memory's device.
        """
        words = self.memory[self.to_first :]
        changes = changes.to(words.device)
        if is_undo:
            changes = replace(changes, diffs=-changes.diffs)
        dims = tuple(zip(self.sizes, self.strides, self.to_strides, strict=True))
        if words.device.type == "cpu":
            return _add_on_host(words, changes, self.first, dims, num_threads)
        return _add_on_device(words, changes, self.first, dims, num_threads)

    def write(self, flat: Tensor, first: int) -> None:
        """Copy from a run of whole rows of the tensor that starts at its word `first`."""
        lead = first - self.first
        stride = self.strides[0]
        row_words = 1 + _num_spanned(self.sizes[1:], self.strides[1:])
        start = max(0, -(-lead // stride))
        stop = min(self.sizes[0], (lead + len(flat) - row_words) // stride + 1)
        if start < stop:
            sizes = (stop - start, *self.sizes[1:])
            rows = flat.as_strided(sizes, self.strides, start * stride - lead)
            self.live()[start:stop].copy_(rows)

    def digest(self, num_threads: int) -> Digest:
        """Digest the words in memory, each at its index in the tensor."""
        live = self.live()
        if self.is_run:
            return digest_of(live, self.first, num_threads)
        num_rows = max(1, _CHUNK // max(1, prod(self.sizes[1:])))
        total: Digest = (0, 0)
        for start in range(0, self.sizes[0], num_rows):
            part = live[start : start + num_rows]
            index = torch.tensor(self.first + start * self.strides[0], device=live.device)
            for n, stride in zip(part.shape, self.strides, strict=True):
                index = index[..., None] + stride * torch.arange(n, device=live.device)
            total = add(total, to_digest(digest_at(part, index)))
        return total


def _add_on_host(
    words: Tensor, changes: WordChanges, origin: int, dims: _Dims, num_threads: int
) -> Tensor:
    """Add changes to copies of words, as `_delta.scatter` has it."""
    change = _delta.scatter(
        u16_view(words),
        changes.counts.numpy().view(np.uint32),
        u16_view(changes.positions),
        u16_view(changes.diffs),
        first=changes.first,
        origin=origin,
        dims=dims,
        num_threads=num_threads,
    )
    return torch.from_numpy(np.array(change, np.uint64).view(np.int64))


def warm_up(device: torch.device) -> None:
    """Do what the first `StridedView.scatter` on a device does once: the kernel is compiled."""
    one, zero = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int16)
    view = StridedView(zero.to(device), 0, 0, (1,), (1,), (1,))
    view.scatter(WordChanges(0, 1, one, zero, zero))


def _add_on_device(words: Tensor, changes: WordChanges, origin: int, dims: _Dims, _: int) -> Tensor:
    """Do the same by a kernel; the host does not wait for it."""
    fields = changes.counts, changes.positions, changes.diffs, changes.first
    return scatter_words_(words, *fields, dims=_to_device(dims, words.device), origin=origin)


@lru_cache(maxsize=1024)
def _to_device(dims: _Dims, device: torch.device) -> Tensor:
    """Return int64 [D, 3]; the layers of a model share them."""
    return torch.tensor(dims, device=device)


def _num_spanned(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Words from the first to the last of a strided view."""
    return sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))


def check_layout(held: Layout, stored: Layout, version: int) -> None:
    """Raise StoreError, with examples, when two layouts differ."""
    if held == stored:
        return
    names = sorted(n for n in held.keys() | stored.keys() if held.get(n) != stored.get(n))
    examples = [f"{name}: here {held.get(name)}, there {stored.get(name)}" for name in names[:3]]
    raise StoreError(
        f"version {version} holds another model than the one here: {len(names)} tensors differ "
        f"({'; '.join(examples)})"
    )


def slice_of(name: str, tensor: Tensor, first: int, num_words: int) -> U16:
    """Return the words of a CPU tensor that a delta is for. Raises StoreError when the tensor is
    too short.
    """
    words = u16_view(tensor)
    if first + num_words > len(words):
        raise StoreError(
            f"a delta of {name!r} covers words {first} to {first + num_words}; the tensor has "
            f"{len(words)}"
        )
    part: U16 = words[first : first + num_words]
    return part


def apply_batches(
    batches: Sequence[DeltaBatch], tensors: Mapping[str, Tensor], num_threads: int
) -> set[str]:
    """Apply the deltas of whole CPU tensors, one batch after another, leaving out those of other
    tensors: all of them, or none. Returns the names of the tensors that they are for.
    """
    rounds = []
    for batch in batches:
        deltas = [(key, blob) for key, blob in batch.items() if key[0] in tensors]
        words = [
            slice_of(name, tensors[name], first, _delta.info(blob)["num_words"])
            for (name, first), blob in deltas
        ]
        rounds.append(([blob for _, blob in deltas], words))
    _delta.apply_rounds(rounds, num_threads=num_threads)
    return {name for batch in batches for name, _ in batch} & tensors.keys()


def write_shard(tensor: Tensor, shard: TensorShard) -> None:
    """Copy a shard to its place in a whole CPU tensor."""
    words = shard.u16()
    u16_view(tensor)[shard.first : shard.first + len(words)] = words


def _host(tensor: Tensor) -> Tensor:
    """Return the tensor itself if its memory can be written to, else an empty copy on the CPU."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _twins(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the tied tensors by their second names, with their first names.

    Raises ValueError for tensors that share a part of their memory, or of their own.
    """
    twins: dict[str, str] = {}
    extents: dict[int, dict[str, np.ndarray[Any, Any]]] = {}
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        if any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(f"tensor {name!r} has several elements in one place")
        extent = _memory_extent(tensor)
        neighbours = extents.setdefault(tensor.untyped_storage().data_ptr(), {})
        for twin, other in neighbours.items():
            if extent.__array_interface__ == other.__array_interface__:
                twins[name] = twin
                break
            if np.shares_memory(extent, other):
                raise ValueError(f"tensors {twin!r} and {name!r} share a part of their memory")
        else:
            neighbours[name] = extent
    return twins


def _memory_extent(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Describe where a tensor is, on any device, as an array whose elements nobody reads; a
    contiguous one as its bytes.
    """
    is_run, size = tensor.is_contiguous(), tensor.itemsize
    interface = {
        "version": 3,
        "data": (tensor.data_ptr(), True),
        "typestr": "|V1" if is_run else f"|V{size}",
        "shape": (tensor.nbytes,) if is_run else tuple(tensor.shape),
        "strides": (1,) if is_run else tuple(step * size for step in tensor.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
