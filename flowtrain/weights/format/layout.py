"""The parts of a version: tensors by name, dtype and shape, and digests of their words. Without
torch, so that a server of files starts at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Digest = tuple[int, int]
"""Two sums mod 2^64 over the words of a tensor or shard; digests of shards add up. See
docs/delta-format.md."""
_MASK = (1 << 64) - 1
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "uint8": 1}
"""Bytes of an element: whoever only serves files need not import torch to count them."""


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
