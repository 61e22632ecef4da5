"""Messages and groups as bytes: MessagePack by the annotations of the records, so that a wrong type
or field is refused.

A group is compressed, because the prompts of its turns repeat each other.
"""

from __future__ import annotations

import threading
import zlib
from array import array
from typing import Any, TypeVar

import msgspec

from flowtrain.dataflow.contract import Refused
from flowtrain.types import Group

T = TypeVar("T")

MAX_GROUP_BYTES = 256 << 20
"""Largest uncompressed group: a bound for what a stranger's few bytes may grow to."""
_ARRAY = 1


def pack(message: object) -> bytes:
    """Encode a message. Raises Refused for a number of more than 64 bits."""
    try:
        return _ENCODER.encode(message)
    except OverflowError as error:
        raise Refused(f"malformed {type(message).__name__}: numbers have 64 bits") from error


def unpack(data: bytes, kind: type[T]) -> T:
    """Decode a record. Raises Refused when the bytes are no such record."""
    try:
        decoded: T = _decoder(kind).decode(data)
        return decoded
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise Refused(f"malformed {kind.__name__}: {error}") from error


def pack_group(group: Group) -> bytes:
    return zlib.compress(pack(group), 1)


def unpack_group(data: bytes) -> Group:
    """Decode a group. Raises Refused when the bytes are no group, or one that is too large."""
    return unpack(inflated(data), Group)


def inflated(data: bytes, max_bytes: int = MAX_GROUP_BYTES) -> bytes:
    """Undo the compression of a group. Raises Refused when it was cut, or has more than `max_bytes`
    without the compression.
    """
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(data, max_bytes)
    except zlib.error as error:
        raise Refused(f"malformed group: {error}") from error
    if inflate.unconsumed_tail:
        raise Refused(f"a group may have {max_bytes} bytes, this one has more")
    if not inflate.eof or inflate.unused_data:
        raise Refused("malformed group: it was cut, or something follows it")
    return plain


def _decoder(kind: type) -> msgspec.msgpack.Decoder[Any]:
    """Make the decoder of a record once. msgspec crashes when two threads make one of a kind."""
    with _LOCK:
        if kind not in _DECODERS:
            _DECODERS[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_decoded, ext_hook=_array)
        return _DECODERS[kind]


def _encoded(value: Any) -> Any:
    if isinstance(value, array) and value.typecode == "i":
        return msgspec.msgpack.Ext(_ARRAY, value.tobytes())
    raise TypeError(f"{type(value).__name__} has no place in a message")


def _array(code: int, data: memoryview) -> Any:
    if code != _ARRAY or len(data) % 4:
        raise ValueError(f"extension {code} of {len(data)} bytes is no array")
    values = array("i")
    values.frombytes(data)
    return values


def _decoded(kind: type, value: Any) -> Any:
    if kind is array and isinstance(value, array):
        return value
    raise ValueError(f"{type(value).__name__} is no {kind.__name__}")


_LOCK = threading.Lock()
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {}
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)
