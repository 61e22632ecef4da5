"""What a reader writes to: tensors as the store names them, wherever their words are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from flowtrain import _delta
from flowtrain.weights.files import Blob
from flowtrain.weights.manifest import Manifest, StoreError
from flowtrain.weights.ranks import Alone, Ranks
from flowtrain.weights.tensor_shards import Digest, Layout, Piece, Words, spec_of, words_of

Step = dict[tuple[str, int], Blob]
"""Deltas between two versions by tensor and first word."""


class Target(Protocol):
    """The weights of one model. Where several ranks hold parts of them, all must call its methods
    together.
    """

    @property
    def ranks(self) -> Ranks: ...

    def check(self, manifest: Manifest) -> None:
        """Raises StoreError when the version is of another model."""

    def base(self, name: str, first: int, num_words: int) -> Words:
        """Words of a tensor as they are; deltas at level 2 cannot be read without. Raises
        StoreError or DeltaError.
        """

    def apply(self, step: Step) -> None:
        """All of the deltas, or none.

        Raises:
            DeltaError: a delta is damaged, or the words are not its base. On every rank alike, as
                is what follows.
            Exception: anything else that happened.
        """

    def write(self, found: Sequence[Piece]) -> None:
        """Every word of every tensor, checked before."""

    def digests(self) -> dict[str, Digest]:
        """Of whole tensors, by reading all words; a tensor that is only another name for one may be
        left out.
        """

    def finish(self) -> None:
        """A load is over: make what was written take effect."""


class HostTensors:
    """Tensors of this process: CPU tensors are written to directly, others through a copy on the
    CPU.
    """

    def __init__(self, tensors: Mapping[str, Tensor], num_threads: int = 1) -> None:
        self.ranks = Alone()
        self._tensors = dict(tensors)
        self._layout = {name: spec_of(name, tensor) for name, tensor in self._tensors.items()}
        self._host = {name: _host(tensor) for name, tensor in self._tensors.items()}
        self._num_threads = num_threads
        self._written: set[str] = set()

    def check(self, manifest: Manifest) -> None:
        check_layout(self._layout, manifest.layout, manifest.version)

    def base(self, name: str, first: int, num_words: int) -> Words:
        return part_of(name, words_of(self._host[name]), first, num_words)

    def apply(self, step: Step) -> None:
        slices = [
            self.base(name, first, _delta.info(blob)["num_words"])
            for (name, first), blob in step.items()
        ]
        _delta.apply(list(step.values()), slices, num_threads=self._num_threads)
        self._written |= {name for name, _ in step}

    def write(self, found: Sequence[Piece]) -> None:
        self._written |= self._tensors.keys()
        for piece in found:  # everything was checked: nothing in this loop can fail
            words = piece.words()
            words_of(self._host[piece.name])[piece.first : piece.first + len(words)] = words

    def digests(self) -> dict[str, Digest]:
        return {
            name: _delta.digest(words_of(host), num_threads=self._num_threads)
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
    """Raises StoreError that names what differs."""
    if ours != theirs:
        differing = sorted(
            name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
        )
        examples = "; ".join(
            f"{name}: here {ours.get(name)}, there {theirs.get(name)}" for name in differing[:3]
        )
        raise StoreError(
            f"version {version} holds another model than the one here: {len(differing)} tensors "
            f"differ ({examples})"
        )


def part_of(name: str, words: Words, first: int, num_words: int) -> Words:
    """The words that a delta is for. Raises StoreError when the tensor has not so many."""
    if first + num_words > len(words):
        raise StoreError(
            f"a delta of {name!r} covers words {first} to {first + num_words}; the tensor has "
            f"{len(words)}"
        )
    part: Words = words[first : first + num_words]
    return part


def _host(tensor: Tensor) -> Tensor:
    """The tensor itself where its memory can be written to, else one like it on the CPU."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype)
