"""JSON over HTTP from the services that a tool leans on: their failures that may pass are tried
again, as long as there is time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from flowtrain import __version__
from flowtrain.tools.base import ToolError
from flowtrain.tools.web.per_loop import PerLoop
from flowtrain.types import UserError

MAX_BYTES = 16 << 20
"""Of an answer, after decompression."""
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a service. A key belongs into the headers, never into the URL, which clients
    and proxies log.
    """

    url: str
    params: Mapping[str, str | int] = field(default_factory=dict)
    """Of the query string."""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, object] | None = None
    """Sent as JSON by POST; None: GET."""


class _Passing(Exception):
    """This attempt failed; another may not, after a pause of at least so many seconds."""

    def __init__(self, problem: str, pause_s: float = 0.0) -> None:
        super().__init__(problem)
        self.pause_s = pause_s


class Api:
    """A client for one service; safe to share between tasks and event loops."""

    def __init__(
        self, max_connections: int = 32, user_agent: str = f"flowtrain/{__version__}"
    ) -> None:
        limits = httpx2.Limits(
            max_connections=max_connections, max_keepalive_connections=max_connections
        )
        headers = {"User-Agent": user_agent}
        self._client = PerLoop(
            lambda: httpx2.AsyncClient(headers=headers, limits=limits, timeout=None)
        )

    async def ask(self, request: Request, deadline_s: float) -> Any:
        """The JSON value of the answer; raises ToolError, which names the host and what it said, by
        the deadline.
        """
        host, problem = httpx2.URL(request.url).host, "it is silent"
        end = asyncio.get_running_loop().time() + deadline_s
        try:
            async with asyncio.timeout_at(end):
                for attempt in itertools.count():
                    try:
                        return _value(host, await self._attempt(request))
                    except _Passing as failed:
                        problem, pause_s = str(failed), max(failed.pause_s, _pause(attempt))
                    if asyncio.get_running_loop().time() + pause_s >= end:
                        raise ToolError(f"{host}: {problem}; no time is left to ask again")
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            raise ToolError(f"{host} did not answer within {deadline_s:g} s: {problem}") from None
        raise AssertionError("the attempts end by themselves")

    async def _attempt(self, request: Request) -> bytes:
        """The body of an answer that is no error."""
        client, method = await self._client.get(), "GET" if request.body is None else "POST"
        params, headers = dict(request.params), dict(request.headers)
        try:
            async with client.stream(
                method, request.url, params=params, headers=headers, json=request.body
            ) as response:
                content = await _read(response)
        except httpx2.TransportError as error:
            raise _Passing(f"{type(error).__name__}: {str(error)[:200]}") from error
        except httpx2.DecodingError as error:
            raise ToolError(
                f"{response.url.host} sent a body that cannot be decompressed"
            ) from error
        if response.status_code in _PASSING:
            raise _Passing(
                f"HTTP {response.status_code}: {_shown(content)}",
                _seconds(response.headers.get("retry-after", "")),
            )
        if response.status_code != 200:
            raise ToolError(
                f"{response.url.host} refused with HTTP {response.status_code}: {_shown(content)}"
            )
        return content


def key_from_env(variable: str, key: str, provider: str) -> str:
    """What an environment variable holds; UserError, which names config key, provider and variable,
    when that is nothing.
    """
    value = os.environ.get(variable, "").strip()
    if not (value and value.isascii() and value.isprintable()):
        raise UserError(
            f"{key}={variable!r}: this environment variable holds nothing that {provider} could "
            f"use; export {variable}=..."
        )
    return value


async def _read(response: httpx2.Response) -> bytes:
    content = bytearray()
    async for part in response.aiter_bytes(1 << 16):
        content += part
        if len(content) > MAX_BYTES:
            raise ToolError(f"{response.url.host} sent more than {MAX_BYTES} bytes")
    return bytes(content)


def _value(host: str, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise ToolError(f"{host} sent something that is not JSON: {_shown(content)}") from None


def _pause(attempt: int) -> float:
    """Twice as long from attempt to attempt, give or take a half, so that calls that were refused
    together do not come back together.
    """
    return float(
        min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempt, 10)) * random.uniform(0.5, 1.5)
    )


def _seconds(header: str) -> float:
    """Of Retry-After; 0 for a date, which the services asked here do not send."""
    return float(header) if header.isdecimal() and len(header) < 6 else 0.0


def _shown(content: bytes) -> str:
    """The beginning of a body on one line."""
    return repr(" ".join(content[:400].decode(errors="replace").split())[:200])
