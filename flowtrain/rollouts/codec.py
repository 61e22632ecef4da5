"""Messages and groups as bytes: MessagePack by the annotations of the records, so that a wrong type
or field is refused.

A group is compressed. The prompts of its turns repeat each other, and may do so at a greater
distance than the compression looks back: a prompt is packed as the number of tokens that it shares
with the call before it, and the rest. The routes of these tokens are packed as the bits in which
they differ from those of that call: hardly any.
"""

from __future__ import annotations

import threading
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from flowtrain.records import Call, Group
from flowtrain.rollouts.contract import Refused
from flowtrain.utils.prefixes import num_shared

T = TypeVar("T")

MAX_GROUP_BYTES = 256 << 20
"""Largest uncompressed group: a bound for what a stranger's few bytes may grow to."""
_ARRAY = 1
_PACKED = b"\x82\xa5group"
"""How a `_Packed` begins, and no `Group`."""
_BYTES_PER_ID = 5


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


@dataclass(frozen=True, slots=True)
class _Packed:
    group: Group
    """Without the tokens that are `shared`, whose routes are XORed with those before."""
    shared: tuple[int, ...]
    """How many tokens the prompt of each call shares with the tokens of the policy's call before it
    in the group."""


def pack_group(group: Group) -> bytes:
    return zlib.compress(encoded(group), 1)


def unpack_group(data: bytes) -> Group:
    """Decode a group. Raises Refused when the bytes are no group, or one that is too large."""
    return decoded(inflated(data))


def encoded(group: Group) -> bytes:
    """Encode a group without compression."""
    shared: list[int] = []

    def cut(previous: Call | None, call: Call) -> tuple[Call, Call]:
        num = num_shared(_ids(previous), call.prompt_ids)
        shared.append(num)
        return replace(_xor_routes(call, previous, num), prompt_ids=call.prompt_ids[num:]), call

    return pack(_Packed(_each_call(group, cut), tuple(shared)))


def decoded(plain: bytes, max_bytes: int = MAX_GROUP_BYTES) -> Group:
    """Decode a group without compression, or one with whole prompts, as nodes in other languages
    send it. Raises Refused when it is none, or would take more than `max_bytes`.
    """
    if not plain.startswith(_PACKED):
        return unpack(plain, Group)
    packed = unpack(plain, _Packed)
    if len(plain) + _BYTES_PER_ID * sum(packed.shared) > max_bytes:
        raise Refused(f"a group may have {max_bytes} bytes, this one has more")
    shared = iter(packed.shared)

    def join(previous: Call | None, call: Call) -> tuple[Call, Call]:
        ids = _ids(previous)
        if not 0 <= (num := next(shared, -1)) <= len(ids):
            raise Refused("malformed group: a prompt shares more than there is")
        call = replace(_xor_routes(call, previous, num), prompt_ids=ids[:num] + call.prompt_ids)
        return call, call

    group = _each_call(packed.group, join)
    if next(shared, None) is not None:
        raise Refused("malformed group: it lists shared prefixes for more prompts than it has")
    return group


def _ids(call: Call | None) -> tuple[int, ...]:
    return () if call is None else call.prompt_ids + call.response_ids


def _xor_routes(call: Call, previous: Call | None, num_shared: int) -> Call:
    """XOR the routes of the first tokens with those of the call before; twice, and they are as they
    were.
    """
    routes, previous_routes = call.routes, previous.routes if previous is not None else None
    if routes is None or previous_routes is None:
        return call
    num = min(
        num_shared * routes.bytes_per_token, len(routes.experts), len(previous_routes.experts)
    )
    if num <= 0:
        return call
    xored = np.frombuffer(routes.experts, np.uint8, num) ^ np.frombuffer(
        previous_routes.experts, np.uint8, num
    )
    return replace(call, routes=replace(routes, experts=xored.tobytes() + routes.experts[num:]))


def _each_call(group: Group, change: Callable[[Call | None, Call], tuple[Call, Call]]) -> Group:
    """Change each call; `change` gets the policy's call before it as it is without the change, and
    returns that of its own, too.
    """
    previous: dict[str, Call] = {}

    def changed(policy: str, call: Call) -> Call:
        call, previous[policy] = change(previous.get(policy), call)
        return call

    return replace(
        group,
        trajectories=tuple(
            replace(
                rollout,
                turns=tuple(
                    replace(turn, calls={name: changed(name, c) for name, c in turn.calls.items()})
                    for turn in rollout.turns
                ),
            )
            for rollout in group.trajectories
        ),
    )


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
        raise Refused("malformed group: it is truncated or has trailing bytes")
    return plain


def _decoder(kind: type) -> msgspec.msgpack.Decoder[Any]:
    """Make the decoder of a record once. msgspec crashes when two threads make one of a kind."""
    with _LOCK:
        if kind not in _DECODERS:
            _DECODERS[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_decode_hook, ext_hook=_array)
        return _DECODERS[kind]


def _encode_hook(value: Any) -> Any:
    if isinstance(value, array) and value.typecode == "i":
        return msgspec.msgpack.Ext(_ARRAY, value.tobytes())
    raise TypeError(f"{type(value).__name__} cannot be part of a message")


def _array(code: int, data: memoryview) -> Any:
    if code != _ARRAY or len(data) % 4:
        raise ValueError(f"extension {code} of {len(data)} bytes is not an array")
    values = array("i")
    values.frombytes(data)
    return values


def _decode_hook(kind: type, value: Any) -> Any:
    if kind is array and isinstance(value, array):
        return value
    raise ValueError(f"{type(value).__name__} is not a {kind.__name__}")


_LOCK = threading.Lock()
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {}
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
