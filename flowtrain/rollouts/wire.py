"""The HTTP interface on which service and client agree.

POST /v6/<method of `contract.Dataflow`> with the request as a MessagePack body and `Authorization:
Bearer <token>`; 6 is `contract.PROTOCOL`. Status 200 comes with the answer, any other one with a
`Problem`: after 4xx it does not help to ask again, after 408, 425, 429 and 5xx it may.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from flowtrain.rollouts.contract import PROTOCOL, Dataflow
from flowtrain.utils.net.credentials import Role

PREFIX = f"/v{PROTOCOL}/"
MEDIA_TYPE = "application/vnd.msgpack"
RUN_HEADER = "Flowtrain-Run"
"""Header of every request but join and register: `Joined.run` or `Registered.run`."""
MAX_WAIT_S = 30.0
"""Longest time that an answer may wait for a batch to fill, or for something to lease."""
PASSING = (408, 425, 429)
"""Statuses besides 5xx after which a repeated request may succeed."""
_ASKERS = {"node": Role.NODE, "policy": Role.TRAINER}
"""Which field of a request names who asks, and the role of whoever has a name there."""
_MAX_BYTES, MAX_PUSH_BYTES = 1 << 20, 64 << 20
"""Largest bodies: of any request, and of a push, which is also the largest payload, or of questions
to evaluate."""


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
    roles: tuple[Role, ...]
    """Who may ask, besides the owner of the shared token; (): everybody with a token."""
    named_by: str
    """The field of the request that names who asks; empty where everybody may."""


def _methods() -> Mapping[str, Method]:
    methods = {}
    for name, function in inspect.getmembers(Dataflow, inspect.isfunction):
        if not name.startswith("_"):
            kinds = typing.get_type_hints(function)
            request = kinds.get("request")
            max_bytes = MAX_PUSH_BYTES if name in ("push", "evaluate") else _MAX_BYTES
            roles, named_by = _askers(request)
            methods[name] = Method(request, kinds["return"], max_bytes, roles, named_by)
    return MappingProxyType(methods)


def _askers(request: type | None) -> tuple[tuple[Role, ...], str]:
    """Return who sends such requests, and the field that names it."""
    if request is None:
        return (), ""
    names = {field.name for field in fields(request)}
    ((role, field),) = ((role, field) for field, role in _ASKERS.items() if field in names)
    return (role,), field


METHODS = _methods()
