"""The wire formats of other projects for a sparse update of 16-bit weights, in numpy and zstandard.
Their sizes can be compared, their speeds cannot.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

U16 = NDArray[np.uint16]
_HEADER = struct.Struct("<QHHi")


class WireFormat(NamedTuple):
    pack: Callable[[U16, U16], bytes]
    """(old words, new words) -> what goes over the wire."""
    unpack: Callable[[bytes, U16], U16]
    """(wire, old words) -> new words."""


def _indexed(header: bool, index: str) -> WireFormat:
    """Indices of changed words, then the words; with a header of 16 bytes or without."""
    start = _HEADER.size if header else 0
    width = np.dtype(index).itemsize

    def pack(old: U16, new: U16) -> bytes:
        where = np.flatnonzero(old != new)
        begin = _HEADER.pack(len(where), 2, 1, 0)[:start]
        return begin + where.astype(index).tobytes() + new[where].tobytes()

    def unpack(wire: bytes, old: U16) -> U16:
        number = (len(wire) - start) // (width + 2)
        where = np.frombuffer(wire, index, number, start)
        return _written(old, where, np.frombuffer(wire, np.uint16, number, start + width * number))

    return WireFormat(pack, unpack)


def _gaps(is_xor: bool) -> WireFormat:
    """Gaps between changed words, as wide as the widest needs, then words or their XOR; zstd 1."""

    def pack(old: U16, new: U16) -> bytes:
        where = np.flatnonzero(old != new)
        gaps = np.diff(where, prepend=-1) - 1
        width = 2 if gaps.size == 0 or gaps.max() < 2**16 else 4 if gaps.max() < 2**32 else 8
        values = old[where] ^ new[where] if is_xor else new[where]
        begin = struct.pack("<QB", len(where), width)
        return _zipped(begin + gaps.astype(f"<u{width}").tobytes() + values.tobytes())

    def unpack(wire: bytes, old: U16) -> U16:
        plain = zstandard.ZstdDecompressor().decompress(wire)
        number, width = struct.unpack_from("<QB", plain)
        gaps = np.frombuffer(plain, f"<u{width}", number, 9).astype(np.int64)
        where = np.cumsum(gaps + 1) - 1
        values = np.frombuffer(plain, np.uint16, number, 9 + width * number)
        return _written(old, where, old[where] ^ values if is_xor else values)

    return WireFormat(pack, unpack)


def _xor_unpack(wire: bytes, old: U16) -> U16:
    return old ^ np.frombuffer(zstandard.ZstdDecompressor().decompress(wire), np.uint16)


def _zipped(plain: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(plain)


def _written(old: U16, where: NDArray[np.integer], values: U16) -> U16:
    new = old.copy()
    new[where] = values
    return new


FORMATS = {
    # AstraFlow: u64 indices, its choice above 4.29e9 weights.
    "astraflow": _indexed(True, "<u8"),
    # verl, vLLM's sparse_nccl, TRL.
    "coo": _indexed(False, "<u4"),
    # slime, miles, SGLang: the XOR image of a whole tensor.
    "xor_zstd": WireFormat(lambda old, new: _zipped((old ^ new).tobytes()), _xor_unpack),
    # NeMo-RL, overwriting and by XOR.
    "gap_zstd": _gaps(is_xor=False),
    "gap_xor_zstd": _gaps(is_xor=True),
}
