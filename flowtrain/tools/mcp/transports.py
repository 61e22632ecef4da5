"""The two ways to an MCP server: a child process's pipes, and streamable HTTP.

The SDK's own pipes read lines without a limit and its HTTP client reads JSON without one, so both
have theirs here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import anyio
import httpx2
import mcp_types
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from flowtrain.net.bodies import no_cookies

MAX_BYTES = 8 << 20
"""Bytes of a message."""
MAX_UNASKED = 10_000
"""Messages that a program may send one after the other without being asked for anything."""
_STDERR_CHARS = 300
_END_OF_EVENT = re.compile(rb"\n\n|\r\r|\r\n\r\n")
_END_S = 2.0
"""Seconds that a program has to end by itself once its stdin is closed."""
Streams: TypeAlias = tuple[Any, Any]
"""Where the SDK's session reads and writes."""


class Program:
    """A server that is a child process, in a process group of its own."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = dict(environment)
        self._last_words = b""

    @property
    def last_words(self) -> str:
        """The end of what the program wrote to stderr, on one line."""
        return " ".join(self._last_words.decode(errors="replace").split())[-_STDERR_CHARS:]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Streams]:
        """Start it; end its whole process group at the end. Raises OSError if it cannot start."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=self._environment,
            limit=MAX_BYTES,
            start_new_session=True,
        )
        to_session, from_program = anyio.create_memory_object_stream[Any](0)
        to_program, from_session = anyio.create_memory_object_stream[Any](0)
        link = _Pipes(process, to_session, from_session)
        tasks = [
            asyncio.create_task(work) for work in (link.read(), link.write(), self._listen(process))
        ]
        try:
            yield from_program, to_program
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (to_session, from_program, to_program, from_session):
                stream.close()
            await _end(process)

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while text := await process.stderr.read(1 << 16):
            self._last_words = (self._last_words + text)[-4 * _STDERR_CHARS :]


class _Pipes:
    """The two directions between a process and the SDK's session."""

    def __init__(self, process: asyncio.subprocess.Process, to_session: Any, outgoing: Any) -> None:
        self._process = process
        self._to_session = to_session
        self._outgoing = outgoing
        self._num_unasked = 0

    async def read(self) -> None:
        """Pass on messages, a line each, until the program ends or sends too much."""
        assert self._process.stdout is not None
        async with self._to_session:  # its end tells the session
            # ValueError: a line beyond the limit.
            with contextlib.suppress(ValueError, anyio.BrokenResourceError):
                while self._num_unasked < MAX_UNASKED:
                    line = await self._process.stdout.readline()
                    if not line:
                        return
                    self._num_unasked += 1
                    await self._pass_on(line)

    async def _pass_on(self, line: bytes) -> None:
        try:
            message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:  # a word for people, which has no place on stdout
            return
        await self._to_session.send(SessionMessage(message))

    async def write(self) -> None:
        """Pass on what the session sends, until the program is gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            async for item in self._outgoing:
                self._num_unasked = 0
                text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                self._process.stdin.write(f"{text}\n".encode())
                await self._process.stdin.drain()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Let the program end by itself, then kill what is left of its process group."""
    assert process.stdin is not None
    process.stdin.close()
    await _exited(process)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await _exited(process)


async def _exited(process: asyncio.subprocess.Process) -> None:
    """Wait for the exit, but not for ever: a process that has left the group can hold the pipes.
    What is still in them is read, or their end would not be seen.
    """

    async def discard(pipe: asyncio.StreamReader | None) -> None:
        assert pipe is not None
        while await pipe.read(1 << 16):
            pass

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            await asyncio.gather(process.wait(), discard(process.stdout), discard(process.stderr))


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
