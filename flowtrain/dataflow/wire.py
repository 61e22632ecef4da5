"""The dataflow over HTTP, as service and client agree on it.

POST /v1/<method of `contract.Dataflow`> with the request as a MessagePack body and `Authorization:
Bearer <token>`. Status 200 comes with the answer, any other one with a `Problem`: after 4xx it does
not help to ask again, after 408, 425, 429 and 5xx it may.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from flowtrain.dataflow.contract import Dataflow

PREFIX = "/v1/"
MEDIA_TYPE = "application/vnd.msgpack"
RUN_HEADER = "Flowtrain-Run"
"""`Joined.run` or `Registered.run`, in every request but those two."""
MAX_WAIT_S = 30.0
"""For which an answer may wait for a batch to fill."""
SLOWEST = 64 << 10
"""Bytes per second; a body that comes slower counts as cut, so nobody can hold anybody for ever."""
PASSING = (408, 425, 429)
"""Besides 5xx: asked again, the answer may be another."""
_MAX_BYTES, _MAX_PUSH_BYTES = 1 << 20, 64 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """Instead of an answer."""

    error: str


@dataclass(frozen=True, slots=True)
class Method:
    request: type | None
    """None: it takes none."""
    answer: Any
    """The type."""
    max_bytes: int
    """Of the request's body."""


def _methods() -> Mapping[str, Method]:
    found = {}
    for name, function in inspect.getmembers(Dataflow, inspect.isfunction):
        if not name.startswith("_"):
            kinds = typing.get_type_hints(function)
            found[name] = Method(
                kinds.get("request"),
                kinds["return"],
                _MAX_PUSH_BYTES if name == "push" else _MAX_BYTES,
            )
    return MappingProxyType(found)


METHODS = _methods()
