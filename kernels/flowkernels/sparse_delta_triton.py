"""Sparse deltas of weights in Triton: count, compact, scatter and digest. Sums wrap mod 2^64, so
their order does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from flowkernels.implementations import warps

BLOCK_WORDS = tl.constexpr(65536)
STEP = tl.constexpr(0x9E3779B97F4A7C15)
"""From x of a word to that of the next, see `sparse_delta.py`."""
WIDTH, LOADS = tl.constexpr(8), tl.constexpr(4)
"""Words of the digest that are one load of a thread, and loads that it has under way at once."""
TILE = {"TILE": 2048, "num_warps": warps(256)}
"""Eight words a thread: one load of 16 bytes from each tensor."""
_TILES = BLOCK_WORDS.value // TILE["TILE"]
"""Tiles of a block."""
SCATTER = {"CHUNK": 512, "SPLIT": 8, "num_warps": warps(128)}
"""SPLIT programs to a block take turns, CHUNK changes at a time; at 1 % two of them find work."""
DIGEST = {"TILE": 2048, "NUM_TILES": 8, "num_warps": warps(256)}


@triton.jit
def _x(index) -> tl.tensor:
    """Return x of global indices, as uint64; see `sparse_delta.py`."""
    return (index.to(tl.uint64) + 1) * STEP


@triton.jit
def _one() -> tl.tensor:
    """Return 1 in uint32, which the compiler does not know. The compiler would compute an
    expression that it can analyse in 64 bits in place of 32, with twice the instructions.
    """
    return tl.num_programs(1).to(tl.uint32)


@triton.jit
def _coefficients(x, one) -> tuple[tl.tensor, tl.tensor]:
    """Return (c_a, c_b) of the digest as uint32, of x of global indices; `one`: 1 or `_one`."""
    low, high = x.to(tl.uint32) ^ (0x85EBCA6B * one), (x >> 32).to(tl.uint32) ^ (0xC2B2AE35 * one)
    r = low.to(tl.uint64) * high.to(tl.uint64)
    high = (r >> 32).to(tl.uint32)
    return (r.to(tl.uint32) ^ high) | one, high | one


@triton.jit
def _square(word, one) -> tl.tensor:
    """Return w^2 as uint64, of an unsigned word in int32; 32 bits hold it. `one`: 1 or `_one`."""
    word = word.to(tl.uint32)
    return (word * word + (one - 1)).to(tl.uint64)


@triton.jit
def _weigh(squares, coefficients) -> tl.tensor:
    return (squares * coefficients.to(tl.uint64)).to(tl.int64)


@triton.jit
def _add_digest(digest_ptr, a, b) -> None:
    tl.atomic_add(digest_ptr, tl.sum(a, axis=0), sem="relaxed")
    tl.atomic_add(digest_ptr + 1, tl.sum(b, axis=0), sem="relaxed")


@triton.jit
def _load_word(ptr, mask) -> tl.tensor:
    """Load a word as unsigned number in int32."""
    return tl.load(ptr, mask=mask, other=0).to(tl.int32) & 0xFFFF


@triton.jit
def count_kernel(
    old_words_ptr, new_words_ptr, tile_counts_ptr, num_words, TILE: tl.constexpr
) -> None:
    """Count the changed words of a tile."""
    tile = tl.program_id(0)
    index = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    is_in = index < num_words
    changed = tl.load(old_words_ptr + index, mask=is_in, other=0) != tl.load(
        new_words_ptr + index, mask=is_in, other=0
    )
    tl.store(tile_counts_ptr + tile, tl.sum(changed.to(tl.int32), axis=0))


@triton.jit
def compact_kernel(
    old_words_ptr, new_words_ptr, tile_bounds_ptr, positions_ptr, diffs_ptr, num_words,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Write positions and diffs of a tile to where its changes are: from bounds[tile] to
    bounds[tile + 1] - 1. A tile without a change is not read again.
    """
    tile = tl.program_id(0)
    begin, end = tl.load(tile_bounds_ptr + tile), tl.load(tile_bounds_ptr + tile + 1)
    if begin < end:
        index = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        is_in = index < num_words
        old, new = (
            _load_word(old_words_ptr + index, is_in),
            _load_word(new_words_ptr + index, is_in),
        )
        # Through shared memory as one number, where the compiler would send pointers of 64 bits:
        # 17 bits hold the difference, those above count the changes up to here.
        packed = tl.cumsum((old != new).to(tl.int32), axis=0) * 2**17 + (new - old + 2**16)
        offset = tl.arange(0, TILE)
        packed = tl.gather(packed, offset, axis=0)
        slot, change = (packed >> 17) - 1, packed.to(tl.int16)
        position = (tile % (BLOCK_WORDS // TILE)) * TILE + offset
        tl.store(positions_ptr + begin + slot, position.to(tl.int16), mask=change != 0)
        tl.store(diffs_ptr + begin + slot, change, mask=change != 0)


@triton.jit
def _place(rest, dims_ptr, num_dims) -> tuple[tl.tensor, tl.tensor]:
    """Return where words are that lie `rest` after the first of all places, and whether there is a
    place for them.
    """
    place, is_in = tl.zeros_like(rest), rest >= 0
    for d in range(num_dims):
        size, stride = tl.load(dims_ptr + 3 * d), tl.load(dims_ptr + 3 * d + 1)
        i = rest // stride
        is_in = is_in & (i < size)
        place += i * tl.load(dims_ptr + 3 * d + 2)
        rest -= i * stride
    return place, is_in & (rest == 0)


@triton.jit(
    # One program for all places, so that none is compiled while something waits.
    do_not_specialize=["num_dims", "first", "origin", "num_words"],
    do_not_specialize_on_alignment=["words_ptr", "positions_ptr", "diffs_ptr"],
)
def scatter_kernel(
    words_ptr, positions_ptr, diffs_ptr, bounds_ptr, digest_ptr, dims_ptr, num_dims, first, origin,
    num_words, WRITES: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """Add the diffs of a block and sum up the digest change; without WRITES only the latter.
    `bounds`: the changes of block b are bounds[b] to bounds[b + 1] - 1. Without `dims`, words
    follow each other.
    """
    block, turn = tl.program_id(0).to(tl.int64) // SPLIT, tl.program_id(0) % SPLIT
    begin, end = tl.load(bounds_ptr + block) + turn * CHUNK, tl.load(bounds_ptr + block + 1)
    a, b = tl.zeros([CHUNK], tl.int64), tl.zeros([CHUNK], tl.int64)
    for start in range(begin, end, SPLIT * CHUNK):
        change = start + tl.arange(0, CHUNK)
        is_in = change < end
        index = block * BLOCK_WORDS + _load_word(positions_ptr + change, is_in)
        place = index
        if dims_ptr is not None:
            place, has_place = _place(first + index - origin, dims_ptr, num_dims)
            is_in = is_in & has_place
        is_in = is_in & (place < num_words)
        old = _load_word(words_ptr + place, is_in)
        new = (old + _load_word(diffs_ptr + change, is_in)) & 0xFFFF
        if WRITES:
            tl.store(words_ptr + place, new.to(tl.int16), mask=is_in)
        gain = _square(new, 1) - _square(old, 1)  # 0 where masked: there word and diff are 0
        c_a, c_b = _coefficients(_x(first + index), 1)
        a += _weigh(gain, c_a)
        b += _weigh(gain, c_b)
    if begin < end:
        _add_digest(digest_ptr, a, b)


@triton.jit
def _load_tiles(
    ptr, limit, offsets, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the words of LOADS tiles; 0 from `limit` on."""
    return (
        _load_word(ptr + offsets, offsets < limit),
        _load_word(ptr + TILE + offsets, offsets < limit - TILE),
        _load_word(ptr + 2 * TILE + offsets, offsets < limit - 2 * TILE),
        _load_word(ptr + 3 * TILE + offsets, offsets < limit - 3 * TILE),
    )


@triton.jit(do_not_specialize=["first"])
def digest_kernel(
    words_ptr, digest_ptr, first, num_words, TILE: tl.constexpr, NUM_TILES: tl.constexpr
) -> None:
    """Add the share of NUM_TILES tiles in the digest."""
    begin = tl.program_id(0).to(tl.int64) * (TILE * NUM_TILES)
    words_ptr += begin
    num_words = tl.minimum(num_words - begin, TILE * NUM_TILES).to(tl.int32)
    LANES: tl.constexpr = TILE // WIDTH
    offsets = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    a, b, one = tl.zeros([LANES], tl.int64), tl.zeros([LANES], tl.int64), _one()
    x = _x(first + begin + offsets)
    for start in range(0, num_words, LOADS * TILE):
        loaded = _load_tiles(words_ptr + start, num_words - start, offsets, TILE)
        for i in tl.static_range(LOADS):
            squares = _square(loaded[i], one)
            c_a, c_b = _coefficients(x, one)
            a += tl.sum(_weigh(squares, c_a), axis=1)
            b += tl.sum(_weigh(squares, c_b), axis=1)
            x += (STEP * TILE) % 2**64
    _add_digest(digest_ptr, a, b)


Changes = tuple[Tensor, Tensor, Tensor, Tensor]
"""The fields of a `WordDiff`."""


def diff(old: Tensor, new: Tensor, first: int) -> Changes:
    """Launcher, see `sparse_delta.diff`."""
    return diff_all([old], lambda _: new, [first])[0]


def diff_all(
    olds: Sequence[Tensor], new_of: Callable[[int], Tensor], firsts: Sequence[int]
) -> list[Changes]:
    """Launcher, see `sparse_delta.diff_all`. The host waits where it reads how many there are."""
    bounds = [_tile_bounds(old, new_of(piece)) for piece, old in enumerate(olds)]
    # One read for all pieces: each .tolist() would wait for the device.
    nums = torch.stack([tile_bounds[-1] for tile_bounds in bounds]).tolist() if bounds else []
    return [
        _compact(old, new_of(piece), bounds[piece], nums[piece], first)
        for piece, (old, first) in enumerate(zip(olds, firsts, strict=True))
    ]


def _tile_bounds(old: Tensor, new: Tensor) -> Tensor:
    """Return bounds, int64: the changes of tile t will be bounds[t] to bounds[t + 1] - 1."""
    grid = (triton.cdiv(len(old), BLOCK_WORDS.value) * _TILES,)
    tile_counts = torch.empty(grid, dtype=torch.int32, device=old.device)
    if len(old):
        count_kernel[grid](old, new, tile_counts, len(old), **TILE)
    tile_bounds = torch.zeros(len(tile_counts) + 1, dtype=torch.int64, device=old.device)
    torch.cumsum(tile_counts, 0, out=tile_bounds[1:])
    return tile_bounds


def _compact(old: Tensor, new: Tensor, tile_bounds: Tensor, num: int, first: int) -> Changes:
    positions, diffs = old.new_empty(num), old.new_empty(num)
    if num:
        grid = (len(tile_bounds) - 1,)
        compact_kernel[grid](old, new, tile_bounds, positions, diffs, len(old), **TILE)
    bounds_B1 = tile_bounds[::_TILES].contiguous()
    change = _scatter(old, bounds_B1, positions, diffs, first, writes=False)
    return bounds_B1.diff().int(), positions, diffs, change


def scatter(
    words: Tensor,
    counts: Tensor,
    positions: Tensor,
    diffs: Tensor,
    first: int,
    dims: Tensor | None,
    origin: int,
) -> Tensor:
    """Launcher, see `sparse_delta.scatter`."""
    # Bounds that never point outside the changes, whatever the counts hold.
    bounds_B1 = F.pad(counts.cumsum(0, dtype=torch.int64), (1, 0)).clamp_(0, len(positions))
    return _scatter(words, bounds_B1, positions, diffs, first, dims, origin, writes=True)


def _scatter(
    words: Tensor,
    bounds_B1: Tensor,
    positions: Tensor,
    diffs: Tensor,
    first: int,
    dims: Tensor | None = None,
    origin: int = 0,
    *,
    writes: bool,
) -> Tensor:
    """Return the digest change; nothing is written if not `writes`."""
    change = torch.zeros(2, dtype=torch.int64, device=words.device)
    if len(positions):
        grid = ((len(bounds_B1) - 1) * SCATTER["SPLIT"],)
        scatter_kernel[grid](
            words, positions, diffs, bounds_B1, change, dims, 0 if dims is None else len(dims),
            first, origin, len(words), WRITES=writes, **SCATTER,
        )  # fmt: skip
    return change


def digest(words: Tensor, first: int) -> Tensor:
    """Launcher, see `sparse_delta.digest`."""
    out = torch.zeros(2, dtype=torch.int64, device=words.device)
    if len(words):
        grid = (triton.cdiv(len(words), DIGEST["TILE"] * DIGEST["NUM_TILES"]),)
        digest_kernel[grid](words, out, first, len(words), **DIGEST)
    return out
