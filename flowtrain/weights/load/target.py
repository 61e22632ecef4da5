"""The tensors that a reader writes to, by the names of the store, wherever their words are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flowtrain import _delta
from flowtrain.weights.format.deltas import DeltaBatch
from flowtrain.weights.format.layout import Digest, Layout
from flowtrain.weights.format.manifest import Manifest, StoreError
from flowtrain.weights.format.tensor_shards import U16, TensorShard, spec_of, u16_view
from flowtrain.weights.ranks import Alone, Ranks


class Target(Protocol):
    """The weights of one model. Where several ranks hold parts of them, all must call its methods
    together.
    """

    @property
    def ranks(self) -> Ranks: ...

    def check(self, manifest: Manifest) -> None:
        """Raise StoreError when the version is of another model."""

    def base(self, name: str, first: int, num_words: int) -> U16:
        """Return a tensor's current words; deltas at level 2 need them to decode. Raises StoreError
        or DeltaError.
        """

    def apply(self, batch: DeltaBatch) -> None:
        """Apply all of the deltas, or none.

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
        self.ranks = Alone()
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

    def base(self, name: str, first: int, num_words: int) -> U16:
        return slice_of(name, self._host[name], first, num_words=num_words)

    def apply(self, batch: DeltaBatch) -> None:
        batch = {key: blob for key, blob in batch.items() if key[0] in self._host}
        words = [self.base(*key, _delta.info(blob)["num_words"]) for key, blob in batch.items()]
        _delta.apply(list(batch.values()), words, num_threads=self._num_threads)
        self._written |= {name for name, _ in batch}

    def write(self, shards: Sequence[TensorShard]) -> None:
        self._written |= self._tensors.keys()
        for shard in shards:
            if shard.name in self._host:
                write_shard(self._host[shard.name], shard)

    def digests(self) -> dict[str, Digest]:
        return {
            name: _delta.digest(u16_view(host), num_threads=self._num_threads)
            for name, host in self._host.items()
        }

    def finish(self) -> None:
        for name in self._written:
            tensor = self._tensors[name]
            if self._host[name] is not tensor:
                with torch.inference_mode(False), torch.no_grad():
                    tensor.copy_(self._host[name])
        self._written.clear()


def check_layout(ours: Layout, theirs: Layout, version: int) -> None:
    """Raise StoreError, with examples, when two layouts differ."""
    if ours == theirs:
        return
    names = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    examples = [f"{name}: here {ours.get(name)}, there {theirs.get(name)}" for name in names[:3]]
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
    """Return the tensors that are another one by a second name, each with the first name.

    Raises ValueError for tensors that share a part of their memory, or of their own.
    """
    twins: dict[str, str] = {}
    places: dict[int, dict[str, np.ndarray[Any, Any]]] = {}
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        if any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(f"tensor {name!r} has several elements in one place")
        place = _place_of(tensor)
        beside = places.setdefault(tensor.untyped_storage().data_ptr(), {})
        for other, its_place in beside.items():
            if place.__array_interface__ == its_place.__array_interface__:
                twins[name] = other
                break
            if np.shares_memory(place, its_place):
                raise ValueError(f"tensors {other!r} and {name!r} share a part of their memory")
        else:
            beside[name] = place
    return twins


def _place_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Describe where a tensor is, on any device, as an array whose elements nobody reads; a
    contiguous one as its bytes.
    """
    is_run, size = tensor.is_contiguous(), tensor.itemsize
    place = {
        "version": 3,
        "data": (tensor.data_ptr(), True),
        "typestr": "|V1" if is_run else f"|V{size}",
        "shape": (tensor.nbytes,) if is_run else tuple(tensor.shape),
        "strides": (1,) if is_run else tuple(step * size for step in tensor.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=place))
