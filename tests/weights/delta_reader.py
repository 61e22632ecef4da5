"""A reader of deltas in plain Python, written from docs/delta-format.md alone."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

EMPTY, PAIRS, RICE, CLASS_RICE, BITMAP, DENSE = range(6)


def xxh3(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


@dataclass
class Class:
    n: int
    gap_k: int = 0
    num_exceptions: int = 0
    exception_k: int = 0
    excess_k: int = 0


class Bits:
    """A payload from its front: the lowest bit of a byte first."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> int:
        value = sum(
            (self.data[i >> 3] >> (i & 7) & 1) << (i - self.at)
            for i in range(self.at, self.at + count)
        )
        self.at += count
        return value

    def pad(self) -> None:
        while self.at % 8:
            assert self.take(1) == 0, "padding is zero"

    def rice(self, lengths_and_k: list[tuple[int, int]]) -> list[list[int]]:
        """The values of each class."""
        low = [[self.take(k) for _ in range(n)] for n, k in lengths_and_k]
        self.pad()
        values = [
            [self.unary() << k | bits for bits in part]
            for part, (_, k) in zip(low, lengths_and_k, strict=True)
        ]
        self.pad()
        return values

    def unary(self) -> int:
        zeros = 0
        while not self.take(1):
            zeros += 1
        return zeros


def places(gaps: list[int]) -> list[int]:
    at, found = -1, []
    for gap in gaps:
        at += gap + 1
        found.append(at)
    return found


def digest_change(index: int, old: int, new: int) -> tuple[int, int]:
    x = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
    r = (x % 2**32 ^ 0x85EBCA6B) * (x >> 32 ^ 0xC2B2AE35) % 2**64
    r ^= r >> 32
    return (new**2 - old**2) * (r % 2**32 | 1), (new**2 - old**2) * (r >> 32 | 1)


def read_block(codec: int, payload: bytes, old: list[int]) -> Iterator[tuple[int, int]]:
    """(position, diff), in the order of the file. `old`: the words of the block before."""
    if codec in (EMPTY, PAIRS, DENSE):
        numbers = struct.unpack(f"<{len(payload) // 2}H", payload)
        if codec == PAIRS:
            n = numbers[0] + 1
            yield from zip(numbers[1 : 1 + n], numbers[1 + n :], strict=True)
        if codec == DENSE:
            yield from ((position, diff) for position, diff in enumerate(numbers) if diff)
        return
    bits = Bits(payload)
    top = bits.take(8) if codec == CLASS_RICE else 0
    width = bits.take(5)
    classes = []
    for _ in range(8 if codec == CLASS_RICE else 1):
        one = Class(bits.take(width))
        if one.n:
            one.gap_k = bits.take(4) if codec != BITMAP else 0
            one.num_exceptions = bits.take(width)
        if one.num_exceptions:
            one.exception_k, one.excess_k = bits.take(4), bits.take(4)
        classes.append(one)
    bits.pad()
    if codec == BITMAP:
        positions = [i for i in range(len(old)) if bits.take(1)]
        bits.pad()
    else:
        ranks = [places(gaps) for gaps in bits.rice([(one.n, one.gap_k) for one in classes])]
        members = [list(range(len(old)))]
        if codec == CLASS_RICE:
            members = [[] for _ in classes]
            for i, word in enumerate(old):
                members[min(max(top - (word >> 7 & 0xFF), 0), 7)].append(i)
        positions = [
            of_class[rank] for of_class, some in zip(members, ranks, strict=True) for rank in some
        ]
    diffs = [-1 if bits.take(1) else 1 for _ in positions]
    bits.pad()
    exceptions = bits.rice([(one.num_exceptions, one.exception_k) for one in classes])
    excess = bits.rice([(one.num_exceptions, one.excess_k) for one in classes])
    start = 0
    for one, gaps, sizes in zip(classes, exceptions, excess, strict=True):
        for index, size in zip(places(gaps), sizes, strict=True):
            diffs[start + index] *= size + 2
        start += one.n
    assert start == len(positions) and bits.at == 8 * len(payload), "nothing is left over"
    yield from zip(positions, (diff % 2**16 for diff in diffs), strict=True)


def read(data: bytes, old: list[int]) -> list[tuple[int, int]]:
    """All (position, diff) in ascending order; every checksum and digest is compared."""
    magic, file_format, level, block_log2, reserved = struct.unpack_from("<4s4B", data)
    num_words, first, num_changed, *digests, checksum = struct.unpack_from("<8Q", data, 8)
    assert (magic, file_format, block_log2, reserved) == (b"FTDL", 1, 16, 0)
    assert level in (1, 2)
    assert num_words == len(old)
    num_blocks = -(-num_words // 65536)
    at = 72 + 12 * num_blocks
    assert checksum == xxh3(struct.pack("<2Q", xxh3(data[:64] + bytes(8)), xxh3(data[72:at])))
    found = []
    for block in range(num_blocks):
        packed, payload_sum = struct.unpack_from("<IQ", data, 72 + 12 * block)
        codec, payload = packed >> 28, data[at : at + packed % 2**28]
        assert payload_sum == (xxh3(payload) if payload else 0)
        assert len(payload) == packed % 2**28
        assert level == 2 or codec != CLASS_RICE
        start = block * 65536
        found += [
            (start + position, diff)
            for position, diff in read_block(codec, payload, old[start : start + 65536])
        ]
        at += len(payload)
    changes = [digest_change(first + i, old[i], (old[i] + diff) % 2**16) for i, diff in found]
    assert at == len(data) and len(found) == num_changed
    seen = [sum(one) % 2**64 for one in zip(*changes, strict=True)]
    assert seen in ([(digests[2 + i] - digests[i]) % 2**64 for i in (0, 1)], [])
    return sorted(found)
