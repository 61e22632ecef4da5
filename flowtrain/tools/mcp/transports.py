"""The two ways to an MCP server, by the SDK: a child process's pipes, and streamable HTTP, of which
the SDK bounds no body that is JSON.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import httpx2
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from flowtrain.net.bodies import no_cookies

MAX_BYTES = 8 << 20
"""Bytes of a message over HTTP."""
_STDERR_CHARS = 300
_END_OF_EVENT = re.compile(rb"\n\n|\r\r|\r\n\r\n")
Streams: TypeAlias = tuple[Any, Any]
"""Where the SDK's session reads and writes."""


class Program:
    """A server that is a child process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """`environment` comes on top of the SDK's HOME, LOGNAME, PATH, SHELL, TERM and USER."""
        program, *args = command
        self._parameters = StdioServerParameters(command=program, args=args, env=dict(environment))
        self._last_words = b""

    @property
    def last_words(self) -> str:
        """The end of what the program wrote to stderr, on one line."""
        return " ".join(self._last_words.decode(errors="replace").split())[-_STDERR_CHARS:]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Streams]:
        """Start it, and end it with all that it started. Raises OSError if it cannot start."""
        loop = asyncio.get_running_loop()
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        loop.add_reader(reader, self._listen, reader)
        try:
            with os.fdopen(writer, "w") as stderr:
                async with stdio_client(self._parameters, errlog=stderr) as streams:
                    yield streams
        finally:
            loop.remove_reader(reader)
            os.close(reader)

    def _listen(self, reader: int) -> None:
        self._last_words = (self._last_words + os.read(reader, 1 << 16))[-4 * _STDERR_CHARS :]


@asynccontextmanager
async def http(url: str, token: str, timeout_s: float) -> AsyncIterator[Streams]:
    """Connect to a server over streamable HTTP; "" for no token."""
    authorization = {"Authorization": f"Bearer {token}"} if token else {}
    client = httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity", **authorization},
        timeout=httpx2.Timeout(timeout_s, read=None),
        cookies=no_cookies(),
        event_hooks={"response": [_bound]},
    )
    async with client, streamable_http_client(url, http_client=client) as streams:
        yield streams


async def _bound(response: httpx2.Response) -> None:
    """Refuse compression, which was not asked for, and messages beyond the limit."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise httpx2.DecodingError("the answer is compressed", request=response.request)
    is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
    response.stream = _Bounded(response.stream, is_stream)


class _Bounded(httpx2.AsyncByteStream):
    """A body with a limit, or a stream of events with one for each."""

    def __init__(self, body: Any, is_stream: bool) -> None:
        self._body = body
        self._is_stream = is_stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        end = b""
        async for part in self._body:
            end = end[-3:] + part
            if self._is_stream and _END_OF_EVENT.search(end):
                num_bytes = 0
            num_bytes += len(part)
            if num_bytes > MAX_BYTES:
                raise httpx2.ReadError(f"a message of more than {MAX_BYTES} bytes")
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()
