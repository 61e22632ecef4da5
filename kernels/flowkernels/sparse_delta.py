"""Sparse weight deltas: the positions and differences of the 16-bit words that changed, so that
only these leave the device.

Maths, over the words w_i of a piece, unsigned, bit patterns and never numbers (a NaN equals itself,
+0 is not -0); everything wraps: diff_i = (new_i - old_i) mod 2^16, and scattering adds it. Blocks
of 65536 words from the piece's start: a position is 16 bits within its block, ascending. Digest,
mod 2^64, g = first + i: x = (g + 1) 0x9E3779B97F4A7C15; r = (low32(x) ^ 0x85EBCA6B) (high32(x) ^
0xC2B2AE35); r ^= r >> 32; c_a = low32(r) | 1, c_b = high32(r) | 1; digest = (sum_i w_i^2 c_a, sum_i
w_i^2 c_b). Digests of pieces add up, and a delta changes a digest by the contribution of its own
words.

Bytes for n words, C of them changed: count reads 4 n, compact reads those 4 n again (but for tiles
of 2048 that did not change) and writes 4 C; the digest change then reads 4 C and the 32-byte
sectors of `old` that hold a change, 0.3 n at 1 %, at most 2 n. In all 8.3 n + 8 C at 1 %, and 4 C
to the host. The third pass does the digest's arithmetic (14 instructions a word), because the count
pass would do it for every word. Scattering reads 4 C, and reads and writes the sectors;
`digest_words` reads 2 n. Extra memory: 12 bytes per tile of a diff, 16 per block of a scatter. B:
blocks, C: changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowkernels.arguments import checks_values
from flowkernels.implementations import resolve_impl, with_launcher
from flowkernels.word_digests import as_words, check_first, chunks, squares, weighted

BLOCK_WORDS = 65536


@dataclass(frozen=True, slots=True)
class WordDiff:
    """The changed words of a piece, block by block, on its device."""

    counts: Tensor
    """int32: number of changes in each block."""
    positions: Tensor
    """int16 holding the bits of an unsigned number, because torch and NCCL barely support uint16:
    `.cpu().numpy().view("uint16")`, or `.int() & 0xFFFF`. Relative to the start of the block,
    ascending within the block."""
    diffs: Tensor
    """int16: new - old mod 2^16, never 0."""
    digest_change: Tensor
    """int64 [2], the bits of two unsigned sums: digest(new) - digest(old)."""


def _num_blocks(num_words: int) -> int:
    return (num_words + BLOCK_WORDS - 1) // BLOCK_WORDS


def _indices(counts: Tensor, positions: Tensor) -> Tensor:
    """Return the index of each changed word, int64 [C], from the start of the piece."""
    change_C = torch.arange(len(positions), device=counts.device)
    block_C = torch.searchsorted(counts.cumsum(0), change_C, right=True)
    return block_C * BLOCK_WORDS + (positions.long() & 0xFFFF)


@with_launcher("flowkernels.sparse_delta_triton")
def diff(old: Tensor, new: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `WordDiff`."""
    index_C = (old != new).nonzero()[:, 0]
    counts = torch.bincount(index_C // BLOCK_WORDS, minlength=_num_blocks(len(old))).int()
    old_C, new_C = old[index_C], new[index_C]
    change = torch.zeros(2, dtype=torch.int64, device=old.device)
    for chunk in chunks(len(index_C)):
        change += weighted(squares(new_C[chunk]) - squares(old_C[chunk]), first + index_C[chunk])
    return counts, (index_C % BLOCK_WORDS).short(), new_C - old_C, change


@with_launcher("flowkernels.sparse_delta_triton")
def diff_all(
    olds: Sequence[Tensor], new_of: Callable[[int], Tensor], firsts: Sequence[int]
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return the fields of the `WordDiff` of each piece."""
    pieces = enumerate(zip(olds, firsts, strict=True))
    return [diff("torch", old, new_of(piece), first) for piece, (old, first) in pieces]


@with_launcher("flowkernels.sparse_delta_triton")
def scatter(
    words: Tensor,
    counts: Tensor,
    positions: Tensor,
    diffs: Tensor,
    first: int,
    dims: Tensor | None,
    origin: int,
) -> Tensor:
    """Add the diffs; return the digest change."""
    index_C = _indices(counts, positions)
    change = torch.zeros(2, dtype=torch.int64, device=words.device)
    for chunk in chunks(len(index_C)):
        place = index = index_C[chunk]
        diff = diffs[chunk]
        if dims is not None:
            place, has_place = _places(first + index - origin, dims)
            place, index, diff = place[has_place], index[has_place], diff[has_place]
        old = words[place]
        new = old + diff
        words[place] = new
        change += weighted(squares(new) - squares(old), first + index)
    return change


def _places(rest: Tensor, dims: Tensor) -> tuple[Tensor, Tensor]:
    """Return where words are that lie `rest` after the first of all places, and whether there is a
    place for them.
    """
    place, has_place = torch.zeros_like(rest), rest >= 0
    # Strides descend, so division by each gives the index; what is left at the end is elsewhere.
    for size, stride, to_stride in dims.tolist():
        i = rest // stride
        has_place &= i < size
        place += i * to_stride
        rest = rest - i * stride
    return place, has_place & (rest == 0)


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
    words: Tensor,
    counts: Tensor,
    positions: Tensor,
    diffs: Tensor,
    first: int,
    dims: Tensor | None,
    origin: int,
    impl: str,
) -> Tensor:
    return scatter(impl, words, counts, positions, diffs, first, dims, origin)


@_scatter_op.register_fake
def _(words: Tensor, *_: object) -> Tensor:
    return words.new_empty(2, dtype=torch.int64)


def diff_words(old: Tensor, new: Tensor, first: int = 0, *, impl: str = "auto") -> WordDiff:
    """Return the changes that turn `old` into `new`. The host waits once, for the number of
    changes.

    Args:
        old: contiguous, any shape, of a dtype with an even number of bytes; viewed as 16-bit words.
        new: same dtype, number of elements and device.
        first: index of the first word for the digest, if the piece is part of a larger tensor.
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    impl = resolve_impl(impl, old.device)
    old_words, new_words = as_words("old", old), _new_words(old, new)
    check_first(first, len(old_words))
    return WordDiff(*_diff_op(old_words, new_words, first, impl))


def diff_pieces(
    olds: Sequence[Tensor],
    new_of: Callable[[int], Tensor],
    firsts: Sequence[int],
    *,
    impl: str = "auto",
) -> list[WordDiff]:
    """Return the changes of many pieces, each as `diff_words` would. The host waits once in total,
    for the numbers of changes.

    Args:
        olds: the old words of each piece, all on one device, as `diff_words` takes them.
        new_of: returns the new words of piece i. It is called twice per piece on a GPU, because the
            new words of all pieces together would take as much memory as the old ones.
        firsts: the index of each piece's first word for the digest.
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    if not olds:
        return []
    words = [as_words("old", old) for old in olds]
    for first, old in zip(firsts, words, strict=True):
        check_first(first, len(old))
    impl = resolve_impl(impl, olds[0].device)
    diffs = diff_all(impl, words, lambda piece: _new_words(olds[piece], new_of(piece)), firsts)
    return [WordDiff(*fields) for fields in diffs]


def diffs_to_host(diffs: Sequence[WordDiff]) -> list[WordDiff]:
    """Copy the changes of all pieces to the host, one transfer per field. The host waits once.

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
    dims: Tensor | None = None,
    origin: int = 0,
    impl: str = "auto",
) -> Tensor:
    """Add a delta to `words` in place and return the resulting change of their digest, int64 [2].

    Adding `-diffs` afterwards restores every bit. The result equals `digest_change` of `diff_words`
    if the words were the `old` of the diff and, except for hash collisions, only then. The host
    does not wait for the device. Positions past the end write nothing on a GPU; two equal positions
    in a block give undefined words. On a CPU, and with FLOWKERNELS_DEBUG=1, both are errors.

    Args:
        words: contiguous, any shape, of a dtype with an even number of bytes.
        counts: int32 [B], see `WordDiff`.
        positions: int16 [C].
        diffs: int16 [C].
        first: index of the first word for the digest.
        dims: int64 [D, 3], for a `words` that holds part of the delta's words in a different order:
            rows of (size, stride, stride in `words`), with descending strides. The word of index
            `origin` + sum i_d stride_d is words[sum i_d stride_in_words_d], with 0 <= i_d < size_d;
            changes of other words are skipped.
        origin: with `dims`, the index of the word that is words[0].
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    impl = resolve_impl(impl, words.device)
    flat = as_words("words", words)
    num_blocks, limit = _num_blocks(len(flat)), len(flat)
    if dims is not None:
        num_blocks, limit = len(counts), len(counts) * BLOCK_WORDS
        if (dims.dtype, dims.shape[1:], dims.device) != (torch.int64, (3,), words.device):
            form = f"{dims.dtype} {tuple(dims.shape)} on {dims.device}".removeprefix("torch.")
            raise ValueError(f"dims must be int64 [D, 3] on {words.device}, got {form}")
    check_first(first, limit)
    _check_delta("counts", counts, torch.int32, num_blocks, words.device)
    _check_delta("positions", positions, torch.int16, positions.numel(), words.device)
    _check_delta("diffs", diffs, torch.int16, len(positions), words.device)
    if checks_values(words.device):
        _check_positions(counts, positions, limit)
    change: Tensor = _scatter_op(flat, counts, positions, diffs, first, dims, origin, impl)
    return change


def _new_words(old: Tensor, new: Tensor) -> Tensor:
    words = as_words("new", new)
    if (new.dtype, new.numel(), new.device) != (old.dtype, old.numel(), old.device):
        expected, actual = (f"{x.dtype} of {x.numel()} elements on {x.device}" for x in (old, new))
        raise ValueError(f"new must be {expected}, as old, got {actual}".replace("torch.", ""))
    return words


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
