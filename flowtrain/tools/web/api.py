"""JSON over HTTP from the services of a tool, with retries of transient failures in time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from flowtrain import __version__
from flowtrain.records import UserError
from flowtrain.tools.base import ToolError
from flowtrain.utils.net.bodies import ACCEPT_ENCODING, BadBody, no_cookies, read_body, shown
from flowtrain.utils.net.retries import GaveUp, Transient, may_pass, retried, retry_after_s

MAX_BYTES = 8 << 20
"""Bytes of an answer, after decompression; its values take up to 64 times as many."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a service. Keys go into the headers; clients and proxies log the URL."""

    url: str
    params: Mapping[str, str | int] = field(default_factory=dict)
    """Parameters of the query string."""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, object] | None = None
    """Sent as JSON by POST; None: GET."""


class Api:
    """A client for one service; safe to share between tasks."""

    def __init__(
        self, max_connections: int = 32, user_agent: str = f"flowtrain/{__version__}"
    ) -> None:
        limits = httpx2.Limits(
            max_connections=max_connections, max_keepalive_connections=max_connections
        )
        headers = {"User-Agent": user_agent, "Accept-Encoding": ACCEPT_ENCODING}
        self._client = httpx2.AsyncClient(
            headers=headers, limits=limits, cookies=no_cookies(), timeout=None
        )

    async def ask(self, request: Request, deadline_s: float) -> Any:
        """Return the JSON value of the answer; raises ToolError by the deadline.

        The error names the host and what it answered.
        """
        host = httpx2.URL(request.url).host
        try:
            content = await retried(
                lambda: self._attempt(request),
                time.monotonic() + deadline_s,
                (_FIRST_PAUSE_S, _LONGEST_PAUSE_S),
            )
        except GaveUp as end:
            raise ToolError(f"{host}: {end}") from None
        return _value(host, content)

    async def _attempt(self, request: Request) -> bytes:
        """Return the body of an answer with status 200."""
        try:
            async with self._client.stream(
                "GET" if request.body is None else "POST",
                request.url,
                params=dict(request.params),
                headers=dict(request.headers),
                json=request.body,
            ) as response:
                content = await read_body(
                    response.aiter_raw(), response.headers.get("content-encoding", ""), MAX_BYTES
                )
        except httpx2.TransportError as error:
            raise Transient(f"{type(error).__name__}: {str(error)[:200]}") from error
        except BadBody as error:
            raise ToolError(f"{response.url.host} sent {error}") from None
        status = response.status_code
        if may_pass(status):
            pause_s = retry_after_s(response.headers.get("retry-after", ""))
            raise Transient(f"HTTP {status}: {shown(content)}", pause_s)
        if status != 200:
            raise ToolError(f"{response.url.host} refused with HTTP {status}: {shown(content)}")
        return content


def key_from_env(variable: str, key: str, provider: str) -> str:
    """Read an API key from an environment variable; raises UserError when there is none.

    Args:
        key: the config key that names the variable, for the error.
        provider: the service that the key is for, for the error.
    """
    value = os.environ.get(variable, "").strip()
    if not (value and value.isascii() and value.isprintable()):
        raise UserError(
            f"{key}={variable!r}: this environment variable holds no valid key for {provider}; "
            f"export {variable}=..."
        )
    return value


def _value(host: str, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise ToolError(f"{host} sent something that is not JSON: {shown(content)}") from None
