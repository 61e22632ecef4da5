"""Digests of 16-bit words, additive over any partition; `sparse_delta.py` has the maths."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flowkernels.implementations import resolve_impl, with_launcher

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as int64, which wraps alike
_XOR_LOW, _XOR_HIGH = 0x85EBCA6B, 0xC2B2AE35
_LOW32 = 0xFFFFFFFF
_CHUNK = 2**20
"""Number of words that the reference converts to 64 bits at a time."""


def _coefficients(global_index: Tensor) -> tuple[Tensor, Tensor]:
    """Return (c_a, c_b), int64, for int64 indices. A shift of int64 keeps its sign: hence masks."""
    x = (global_index + 1) * _GOLDEN
    r = ((x & _LOW32) ^ _XOR_LOW) * (((x >> 32) & _LOW32) ^ _XOR_HIGH)
    high = (r >> 32) & _LOW32
    return ((r & _LOW32) ^ high) | 1, high | 1


def weighted(squares: Tensor, global_index: Tensor) -> Tensor:
    c_a, c_b = _coefficients(global_index)
    return torch.stack([(squares * c_a).sum(), (squares * c_b).sum()])


def squares(words: Tensor) -> Tensor:
    return (words.long() & 0xFFFF).square()


def chunks(num: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, num)) for start in range(0, num, _CHUNK))


@with_launcher("flowkernels.sparse_delta_triton")
def digest(words: Tensor, first: int) -> Tensor:
    """Return the digest of a piece."""
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    for chunk in chunks(len(words)):
        index = torch.arange(first + chunk.start, first + chunk.stop, device=words.device)
        total += weighted(squares(words[chunk]), index)
    return total


@torch.library.custom_op("flowkernels::digest_words", mutates_args=())
def _digest_op(words: Tensor, first: int, impl: str) -> Tensor:
    return digest(impl, words, first)


@_digest_op.register_fake
def _(words: Tensor, *_: object) -> Tensor:
    return words.new_empty(2, dtype=torch.int64)


def digest_words(words: Tensor, first: int = 0, *, impl: str = "auto") -> Tensor:
    """Return the digest of a piece, int64 [2]: the bits of two unsigned sums.

    Args:
        words: contiguous, any shape, of a dtype with an even number of bytes.
        first: index of the first word; the digests of pieces, each with its own `first`, add up
            (mod 2^64) to the digest of the whole.
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    impl = resolve_impl(impl, words.device)
    flat = as_words("words", words)
    check_first(first, len(flat))
    total: Tensor = _digest_op(flat, first, impl)
    return total


def digest_at(words: Tensor, index: Tensor) -> Tensor:
    """Return the digest of scattered words, int64 [2]. Its sum over any partition of a piece equals
    `digest_words` of the piece.

    Args:
        words: int16, any shape.
        index: int64, same shape and device: the index of each word within the tensor.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    has_dtypes = words.dtype == torch.int16 and index.dtype == torch.int64
    if not has_dtypes or (words.shape, words.device) != (index.shape, index.device):
        actual = " and ".join(f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in (words, index))
        raise ValueError(
            "words must be int16 and index int64 of the same shape and device, got "
            + actual.replace("torch.", "")
        )
    flat, flat_index = words.reshape(-1), index.reshape(-1)
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    for chunk in chunks(len(flat)):
        total += weighted(squares(flat[chunk]), flat_index[chunk])
    return total


def as_words(name: str, tensor: Tensor) -> Tensor:
    """View a tensor as int16 [n], sharing memory, without a gradient."""
    if tensor.dtype.itemsize % 2:
        actual = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{name} must have a dtype of an even number of bytes, got {actual}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got strides {tensor.stride()} for {tuple(tensor.shape)}"
        )
    return tensor.detach().view(-1).view(torch.int16)


def check_first(first: int, num_words: int) -> None:
    if not 0 <= first < 2**63 - num_words:
        raise ValueError(
            f"first={first} must be in [0, 2^63 - {num_words}), so that every word has an index"
        )
