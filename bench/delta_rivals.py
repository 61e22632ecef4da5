"""The wire formats of other projects for a sparse update of 16-bit weights, in numpy and zstandard.
Their sizes can be compared, their speeds cannot.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

U16 = NDArray[np.uint16]


@dataclass(frozen=True)
class WireFormat:
    source: str
    pack: Callable[[U16, U16], bytes]
    """(old words, new words) -> what goes over the wire."""
    unpack: Callable[[bytes, U16], U16]
    """(wire, old words) -> new words."""


def _astraflow_pack(old: U16, new: U16) -> bytes:
    where = np.flatnonzero(old != new)
    return (
        struct.pack("<QHHi", len(where), 2, 1, 0)
        + where.astype("<u8").tobytes()
        + new[where].tobytes()
    )


def _astraflow_unpack(wire: bytes, old: U16) -> U16:
    num_changed = struct.unpack_from("<QHHi", wire)[0]
    where = np.frombuffer(wire, "<u8", num_changed, 16)
    return _written(old, where, np.frombuffer(wire, np.uint16, num_changed, 16 + 8 * num_changed))


def _coo_pack(old: U16, new: U16) -> bytes:
    where = np.flatnonzero(old != new)
    return where.astype("<u4").tobytes() + new[where].tobytes()


def _coo_unpack(wire: bytes, old: U16) -> U16:
    num_changed = len(wire) // 6
    return _written(
        old,
        np.frombuffer(wire, "<u4", num_changed),
        np.frombuffer(wire, np.uint16, num_changed, 4 * num_changed),
    )


def _xor_pack(old: U16, new: U16) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress((old ^ new).tobytes())


def _xor_unpack(wire: bytes, old: U16) -> U16:
    return old ^ np.frombuffer(zstandard.ZstdDecompressor().decompress(wire), np.uint16)


def _gap_pack(values: Callable[[U16, U16], U16]) -> Callable[[U16, U16], bytes]:
    def pack(old: U16, new: U16) -> bytes:
        where = np.flatnonzero(old != new)
        gaps = np.diff(where, prepend=-1) - 1
        width = 2 if gaps.size == 0 or gaps.max() < 2**16 else 4 if gaps.max() < 2**32 else 8
        plain = (
            struct.pack("<QB", len(where), width)
            + gaps.astype(f"<u{width}").tobytes()
            + values(old[where], new[where]).tobytes()
        )
        return zstandard.ZstdCompressor(level=1).compress(plain)

    return pack


def _gap_unpack(values: Callable[[U16, U16], U16]) -> Callable[[bytes, U16], U16]:
    def unpack(wire: bytes, old: U16) -> U16:
        plain = zstandard.ZstdDecompressor().decompress(wire)
        num_changed, width = struct.unpack_from("<QB", plain)
        where = (
            np.cumsum(np.frombuffer(plain, f"<u{width}", num_changed, 9).astype(np.int64) + 1) - 1
        )
        return _written(
            old,
            where,
            values(
                old[where], np.frombuffer(plain, np.uint16, num_changed, 9 + width * num_changed)
            ),
        )

    return unpack


def _second(_: U16, second: U16) -> U16:
    return second


def _written(old: U16, where: NDArray[np.integer], values: U16) -> U16:
    new = old.copy()
    new[where] = values
    return new


FORMATS = {
    "astraflow": WireFormat(
        "AstraFlow: a header of 16 bytes, u64 indices (its choice above 4.29e9 weights), bf16 "
        "values",
        _astraflow_pack,
        _astraflow_unpack,
    ),
    "coo": WireFormat(
        "verl, vLLM sparse_nccl, TRL: u32 indices, bf16 values", _coo_pack, _coo_unpack
    ),
    "xor_zstd": WireFormat(
        "slime, miles, SGLang: the XOR image of a whole tensor, zstd 1", _xor_pack, _xor_unpack
    ),
    "gap_zstd": WireFormat(
        "NeMo-RL, overwrite: u16 gaps (wider where one needs it), bf16 values, zstd 1",
        _gap_pack(_second),
        _gap_unpack(_second),
    ),
    "gap_xor_zstd": WireFormat(
        "NeMo-RL, XOR: u16 gaps with old ^ new as values, zstd 1",
        _gap_pack(np.bitwise_xor),
        _gap_unpack(np.bitwise_xor),
    ),
}
