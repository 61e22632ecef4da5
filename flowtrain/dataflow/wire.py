"""The HTTP interface on which service and client agree.

POST /v2/<method of `contract.Dataflow`> with the request as a MessagePack body and `Authorization:
Bearer <token>`; 2 is `contract.PROTOCOL`. Status 200 comes with the answer, any other one with a
`Problem`: after 4xx it does not help to ask again, after 408, 425, 429 and 5xx it may.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from flowtrain.dataflow.contract import PROTOCOL, Dataflow

PREFIX = f"/v{PROTOCOL}/"
MEDIA_TYPE = "application/vnd.msgpack"
RUN_HEADER = "Flowtrain-Run"
"""Header of every request but join and register: `Joined.run` or `Registered.run`."""
MAX_WAIT_S = 30.0
"""Longest time that an answer may wait for a batch to fill."""
PASSING = (408, 425, 429)
"""Statuses besides 5xx after which a repeated request may succeed."""
_MAX_BYTES, _MAX_PUSH_BYTES = 1 << 20, 64 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """The body of every response that is not 200."""

    error: str


@dataclass(frozen=True, slots=True)
class Method:
    request: type | None
    """Type of the request; None: the method takes none."""
    answer: Any
    """Type of the answer."""
    max_bytes: int
    """Largest body of a request."""


def _methods() -> Mapping[str, Method]:
    found = {}
    for name, function in inspect.getmembers(Dataflow, inspect.isfunction):
        if not name.startswith("_"):
            kinds = typing.get_type_hints(function)
            max_bytes = _MAX_PUSH_BYTES if name == "push" else _MAX_BYTES
            found[name] = Method(kinds.get("request"), kinds["return"], max_bytes)
    return MappingProxyType(found)


METHODS = _methods()
