"""Sparse deltas of weights: which 16-bit words changed and by how much, so that only those leave
the device.

Maths, over the words w_i of a piece, unsigned, bit patterns and never numbers (a NaN equals itself,
+0 is not -0); everything wraps: diff_i = (new_i - old_i) mod 2^16, and scattering adds it. Blocks
of 65536 words from the piece's start: a position is 16 bits within its block, ascending. Digest,
mod 2^64, g = first + i: x = (g + 1) 0x9E3779B97F4A7C15; r = (low32(x) ^ 0x85EBCA6B) (high32(x) ^
0xC2B2AE35); r ^= r >> 32; c_a = low32(r) | 1, c_b = high32(r) | 1; digest = (sum_i w_i^2 c_a, sum_i
w_i^2 c_b). Digests of pieces add up, and a delta changes them by what its own words do.

Bytes for n words, C of them changed: count reads 4 n, compact reads those 4 n again (but for tiles
of 2048 that did not change) and writes 4 C; the digest change then reads 4 C and the 32-byte
sectors of `old` that hold a change, 0.3 n at 1 %, at most 2 n. In all 8.3 n + 8 C at 1 %, and 4 C
to the host. The digest's arithmetic (14 instructions a word) is left to that third
pass: within count, every word would pay for it. Scattering reads 4 C, and reads and writes the
sectors; `digest_words` reads 2 n. Extra memory: 12 bytes per tile of a diff, 16 per block of a
scatter. B: blocks, C: changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowkernels.arguments import checks_values
from flowkernels.implementations import resolve_impl, with_launcher

BLOCK_WORDS = 65536
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as int64, which wraps alike
_XOR_LOW, _XOR_HIGH = 0x85EBCA6B, 0xC2B2AE35
_LOW32 = 0xFFFFFFFF
_CHUNK = 2**20
"""Words of which the reference holds 64-bit copies at once."""


@dataclass(frozen=True, slots=True)
class WordDiff:
    """The changes of a piece, block by block, on its device."""

    counts: Tensor
    """int32: changes in each block."""
    positions: Tensor
    """int16, the bits of an unsigned number, since torch and NCCL do little with uint16:
    `.cpu().numpy().view("uint16")`, or `.int() & 0xFFFF`. Relative to the block, ascending within
    it."""
    diffs: Tensor
    """int16: new - old mod 2^16, never 0."""
    digest_change: Tensor
    """int64 [2], the bits of two unsigned sums: digest(new) - digest(old)."""


def _num_blocks(num_words: int) -> int:
    return (num_words + BLOCK_WORDS - 1) // BLOCK_WORDS


def _indices(counts: Tensor, positions: Tensor) -> Tensor:
    """Return the word of each change, int64 [C], from the start of the piece."""
    change_C = torch.arange(len(positions), device=counts.device)
    block_C = torch.searchsorted(counts.cumsum(0), change_C, right=True)
    return block_C * BLOCK_WORDS + (positions.long() & 0xFFFF)


def _coefficients(global_index: Tensor) -> tuple[Tensor, Tensor]:
    """Return (c_a, c_b), int64, for int64 indices. A shift of int64 keeps its sign: hence masks."""
    x = (global_index + 1) * _GOLDEN
    r = ((x & _LOW32) ^ _XOR_LOW) * (((x >> 32) & _LOW32) ^ _XOR_HIGH)
    high = (r >> 32) & _LOW32
    return ((r & _LOW32) ^ high) | 1, high | 1


def _weighted(squares: Tensor, global_index: Tensor) -> Tensor:
    c_a, c_b = _coefficients(global_index)
    return torch.stack([(squares * c_a).sum(), (squares * c_b).sum()])


def _squares(words: Tensor) -> Tensor:
    return (words.long() & 0xFFFF).square()


def _chunks(num: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, num)) for start in range(0, num, _CHUNK))


@with_launcher("flowkernels.sparse_delta_triton")
def diff(old: Tensor, new: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `WordDiff`."""
    index_C = (old != new).nonzero()[:, 0]
    counts = torch.bincount(index_C // BLOCK_WORDS, minlength=_num_blocks(len(old))).int()
    old_C, new_C = old[index_C], new[index_C]
    change = torch.zeros(2, dtype=torch.int64, device=old.device)
    for chunk in _chunks(len(index_C)):
        change += _weighted(_squares(new_C[chunk]) - _squares(old_C[chunk]), first + index_C[chunk])
    return counts, (index_C % BLOCK_WORDS).short(), new_C - old_C, change


@with_launcher("flowkernels.sparse_delta_triton")
def diff_all(
    olds: Sequence[Tensor], new_of: Callable[[int], Tensor], firsts: Sequence[int]
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return the fields of the `WordDiff` of each piece."""
    pieces = enumerate(zip(olds, firsts, strict=True))
    return [diff("torch", old, new_of(piece), first) for piece, (old, first) in pieces]


@with_launcher("flowkernels.sparse_delta_triton")
def scatter(words: Tensor, counts: Tensor, positions: Tensor, diffs: Tensor, first: int) -> Tensor:
    """Add the diffs; return the digest change."""
    index_C = _indices(counts, positions)
    change = torch.zeros(2, dtype=torch.int64, device=words.device)
    for chunk in _chunks(len(index_C)):
        old = words[index_C[chunk]]
        new = old + diffs[chunk]
        words[index_C[chunk]] = new
        change += _weighted(_squares(new) - _squares(old), first + index_C[chunk])
    return change


@with_launcher("flowkernels.sparse_delta_triton")
def digest(words: Tensor, first: int) -> Tensor:
    """Return the digest of a piece."""
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    for chunk in _chunks(len(words)):
        index = torch.arange(first + chunk.start, first + chunk.stop, device=words.device)
        total += _weighted(_squares(words[chunk]), index)
    return total


@torch.library.custom_op("flowkernels::diff_words", mutates_args=())
def _diff_op(
    old: Tensor, new: Tensor, first: int, impl: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return diff(impl, old, new, first)


@_diff_op.register_fake
def _(old: Tensor, new: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_changes = torch.library.get_ctx().new_dynamic_size()
    counts = old.new_empty(_num_blocks(old.shape[0]), dtype=torch.int32)
    digest = old.new_empty(2, dtype=torch.int64)
    return counts, old.new_empty(num_changes), old.new_empty(num_changes), digest


@torch.library.custom_op("flowkernels::scatter_words_", mutates_args=("words",))
def _scatter_op(
    words: Tensor, counts: Tensor, positions: Tensor, diffs: Tensor, first: int, impl: str
) -> Tensor:
    return scatter(impl, words, counts, positions, diffs, first)


@torch.library.custom_op("flowkernels::digest_words", mutates_args=())
def _digest_op(words: Tensor, first: int, impl: str) -> Tensor:
    return digest(impl, words, first)


@_scatter_op.register_fake
@_digest_op.register_fake
def _(words: Tensor, *_: object) -> Tensor:
    return words.new_empty(2, dtype=torch.int64)


def diff_words(old: Tensor, new: Tensor, first: int = 0, *, impl: str = "auto") -> WordDiff:
    """Find the changes that turn `old` into `new`. The host waits once, for the number of changes.

    Args:
        old: contiguous, any shape, of a dtype with an even number of bytes; viewed as 16-bit words.
        new: same dtype, number of elements and device.
        first: index of the first word for the digest, where the piece is part of something larger.
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    impl = resolve_impl(impl, old.device)
    old_words, new_words = _as_words("old", old), _new_words(old, new)
    _check_first(first, len(old_words))
    return WordDiff(*_diff_op(old_words, new_words, first, impl))


def diff_pieces(
    olds: Sequence[Tensor],
    new_of: Callable[[int], Tensor],
    firsts: Sequence[int],
    *,
    impl: str = "auto",
) -> list[WordDiff]:
    """Find the changes of many pieces, each as `diff_words` does. The host waits once, for the
    numbers of changes of all.

    Args:
        olds: on one device, each as `diff_words` takes it.
        new_of: makes the new words of piece i, twice on a GPU: all of them at once would take as
            much memory as the old ones.
        firsts: of each piece, the index of its first word for the digest.
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    if not olds:
        return []
    words = [_as_words("old", old) for old in olds]
    for first, old in zip(firsts, words, strict=True):
        _check_first(first, len(old))
    impl = resolve_impl(impl, olds[0].device)
    diffs = diff_all(impl, words, lambda piece: _new_words(olds[piece], new_of(piece)), firsts)
    return [WordDiff(*fields) for fields in diffs]


def diffs_to_host(diffs: Sequence[WordDiff]) -> list[WordDiff]:
    """Copy the changes of pieces to the host, each field of all at once. The host waits once.

    Args:
        diffs: at least one, on one device.
    """
    fields = ("counts", "positions", "diffs", "digest_change")
    pieces = [[getattr(diff, field) for diff in diffs] for field in fields]
    joined = [torch.cat(tensors) for tensors in pieces]
    on_gpu = joined[0].is_cuda
    # Copies to pinned memory do not wait for one another; the one wait is below.
    on_host = [torch.empty_like(source, device="cpu", pin_memory=on_gpu) for source in joined]
    for target, source in zip(on_host, joined, strict=True):
        target.copy_(source, non_blocking=True)
    if on_gpu:
        torch.cuda.current_stream(joined[0].device).synchronize()
    sizes = [[len(tensor) for tensor in tensors] for tensors in pieces]
    cut = [host.split(lengths) for host, lengths in zip(on_host, sizes, strict=True)]
    return [WordDiff(*host_fields) for host_fields in zip(*cut, strict=True)]


def scatter_words_(
    words: Tensor,
    counts: Tensor,
    positions: Tensor,
    diffs: Tensor,
    first: int = 0,
    *,
    impl: str = "auto",
) -> Tensor:
    """Add a delta to `words` in place, and return the digest change that this made to the words it
    met: int64 [2].

    Adding `-diffs` afterwards puts every bit back. The result is that of `diff_words` if and, but
    for collisions, only if the words were the `old` of the diff. Nothing is read by the host.
    Positions past the end write nothing on a GPU; two equal ones in a block give undefined words.
    On a CPU, and with FLOWKERNELS_DEBUG=1, both are errors.

    Args:
        words: contiguous, any shape, of a dtype with an even number of bytes.
        counts: int32 [B], see `WordDiff`.
        positions: int16 [C].
        diffs: int16 [C].
        first: index of the first word for the digest.
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    impl = resolve_impl(impl, words.device)
    flat = _as_words("words", words)
    _check_first(first, len(flat))
    _check_delta("counts", counts, torch.int32, _num_blocks(len(flat)), words.device)
    _check_delta("positions", positions, torch.int16, positions.numel(), words.device)
    _check_delta("diffs", diffs, torch.int16, len(positions), words.device)
    if checks_values(words.device):
        _check_positions(counts, positions, len(flat))
    change: Tensor = _scatter_op(flat, counts, positions, diffs, first, impl)
    return change


def digest_words(words: Tensor, first: int = 0, *, impl: str = "auto") -> Tensor:
    """Return the digest of a piece, int64 [2]: the bits of two unsigned sums.

    Args:
        words: contiguous, any shape, of a dtype with an even number of bytes.
        first: index of the first word; digests of pieces with their own `first` add up (mod 2^64)
            to that of the whole.
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    impl = resolve_impl(impl, words.device)
    flat = _as_words("words", words)
    _check_first(first, len(flat))
    total: Tensor = _digest_op(flat, first, impl)
    return total


def digest_at(words: Tensor, index: Tensor) -> Tensor:
    """Return the digest of scattered words, int64 [2]: `digest_words` of all words of a piece is
    the sum of this over any partition of them.

    Args:
        words: int16, any shape.
        index: int64, same shape and device: of each word, from the start of the tensor that the
            digest is of.

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
    for chunk in _chunks(len(flat)):
        total += _weighted(_squares(flat[chunk]), flat_index[chunk])
    return total


def _new_words(old: Tensor, new: Tensor) -> Tensor:
    words = _as_words("new", new)
    if (new.dtype, new.numel(), new.device) != (old.dtype, old.numel(), old.device):
        expected, actual = (f"{x.dtype} of {x.numel()} elements on {x.device}" for x in (old, new))
        raise ValueError(f"new must be {expected}, as old, got {actual}".replace("torch.", ""))
    return words


def _as_words(name: str, tensor: Tensor) -> Tensor:
    """View a tensor as int16 [n], sharing memory, without a gradient."""
    if tensor.dtype.itemsize % 2:
        actual = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{name} must have a dtype of an even number of bytes, got {actual}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got strides {tensor.stride()} for {tuple(tensor.shape)}"
        )
    return tensor.detach().view(-1).view(torch.int16)


def _check_first(first: int, num_words: int) -> None:
    if not 0 <= first < 2**63 - num_words:
        raise ValueError(
            f"first={first} must be in [0, 2^63 - {num_words}), so that every word has an index"
        )


def _check_delta(
    name: str, tensor: Tensor, dtype: torch.dtype, num: int, device: torch.device
) -> None:
    form = (tensor.dtype, tensor.shape, tensor.device)
    if form != (dtype, (num,), device) or not tensor.is_contiguous():
        layout = "" if tensor.is_contiguous() else f", strides {tensor.stride()}"
        expected = f"{dtype} [{num}] on {device}"
        actual = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}{layout}"
        raise ValueError(
            f"{name} must be contiguous {expected}, got {actual}".replace("torch.", "")
        )


def _check_positions(counts: Tensor, positions: Tensor, num_words: int) -> None:
    num_changes = len(positions)
    if int(counts.sum()) != num_changes or bool((counts < 0).any()):
        raise ValueError(
            f"counts must be >= 0 and sum to the {num_changes} of positions, got a sum of "
            f"{int(counts.sum())}"
        )
    index_C = _indices(counts, positions)
    if not bool((index_C.diff() > 0).all()):
        raise ValueError(
            "positions must ascend within each block, as unsigned numbers, without a repetition"
        )
    if num_changes and int(index_C[-1]) >= num_words:
        raise ValueError(
            f"positions must be below the {num_words} words, got one for word {int(index_C[-1])}"
        )
