from collections.abc import Sequence
from typing import Any

import numpy as np

_U16 = np.ndarray[Any, np.dtype[np.uint16]]
_U32 = np.ndarray[Any, np.dtype[np.uint32]]
_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
_Digest = tuple[int, int]

BLOCK_WORDS: int

class DeltaError(ValueError): ...
class NotADelta(DeltaError): ...
class NewerFormat(DeltaError): ...
class CorruptDelta(DeltaError): ...
class WrongBase(DeltaError): ...
class WrongLayout(DeltaError): ...

def encode(
    old: _U16,
    new: _U16,
    *,
    first: int = 0,
    level: int = 1,
    base_digest: _Digest = (0, 0),
    num_threads: int = 1,
) -> _Bytes: ...
def encode_pairs(
    counts: _U32,
    positions: _U16,
    diffs: _U16,
    num_words: int,
    change: _Digest,
    *,
    first: int = 0,
    base_digest: _Digest = (0, 0),
    num_threads: int = 1,
) -> _Bytes: ...
def info(delta: _Bytes) -> dict[str, Any]: ...
def validate(
    delta: _Bytes, base: _U16 | None = None, *, num_threads: int = 1
) -> dict[str, Any]: ...
def apply(deltas: Sequence[_Bytes], words: Sequence[_U16], *, num_threads: int = 1) -> None: ...
def apply_rounds(
    rounds: Sequence[tuple[Sequence[_Bytes], Sequence[_U16]]], *, num_threads: int = 1
) -> None: ...
def decode_pairs(
    delta: _Bytes,
    base: _U16 | None = None,
    *,
    begin: int = 0,
    end: int | None = None,
    num_threads: int = 1,
) -> tuple[_U32, _U16, _U16]: ...
def scatter(
    words: _U16,
    counts: _U32,
    positions: _U16,
    diffs: _U16,
    *,
    first: int,
    origin: int,
    dims: Sequence[tuple[int, int, int]],
    num_threads: int = 1,
) -> _Digest: ...
def compose(
    deltas: Sequence[_Bytes], base: _U16 | None = None, *, level: int = 1, num_threads: int = 1
) -> _Bytes: ...
def digest(words: _U16, *, first: int = 0, num_threads: int = 1) -> _Digest: ...
def xxh3(bytes: np.ndarray[Any, np.dtype[np.uint8]]) -> int: ...
def isa() -> str: ...
def use_isa(name: str) -> bool: ...
