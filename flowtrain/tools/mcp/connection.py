"""One connection to an MCP server, which all rollouts of a process share.

It lives on a thread and an event loop of its own. A server that has died, or does not even list its
tools after a call failed, is started once more, and so after each later call that fails so.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import httpx2
from mcp import ClientSession, MCPError
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import PaginatedRequestParams

from flowtrain.config import McpServer
from flowtrain.net.bodies import no_cookies
from flowtrain.tools.base import ToolError
from flowtrain.types import UserError
from flowtrain.utils.text import printable
from flowtrain.utils.threads import Ended, LoopThread

Streams: TypeAlias = tuple[Any, Any]
"""Where the SDK's session reads and writes."""
_MAX_PROBLEM = 300
_STDERR_CHARS = 300
_LOOK_S = 5.0
"""Seconds in which a server must list its tools after a call has failed."""
_CLOSE_S = 10.0


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
    client = httpx2.AsyncClient(
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=httpx2.Timeout(timeout_s, read=None),
        cookies=no_cookies(),
    )
    async with client, streamable_http_client(url, http_client=client) as streams:
        yield streams


class _Link:
    """A session from its start to its end, in a task of its own: the SDK wants it opened and closed
    by one.
    """

    def __init__(self, transport: AbstractAsyncContextManager[Streams]) -> None:
        self._transport = transport
        self._over = asyncio.Event()
        self._ready: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.exception())  # nobody may wait for it
        self._task = asyncio.create_task(self._live())
        self._task.add_done_callback(self._end)

    async def session(self) -> ClientSession:
        """Wait for the session; one caller's cancellation is no other's."""
        return await asyncio.shield(self._ready)

    async def close(self) -> None:
        self._over.set()
        if not self._ready.done():
            self._task.cancel()
        await asyncio.wait({self._task}, timeout=_CLOSE_S)

    async def _live(self) -> None:
        async with self._transport as streams, ClientSession(*streams) as session:
            await _greet(session)
            self._ready.set_result(session)
            await self._over.wait()

    def _end(self, task: asyncio.Task[None]) -> None:
        """Tell those who wait for the session why it has not come."""
        error = None if task.cancelled() else task.exception()
        if not self._ready.done():
            cancelled = ConnectionError("it was cancelled")
            self._ready.set_exception(error if isinstance(error, Exception) else cancelled)


class Connection:
    """Lists and calls the tools of a server; safe to share between threads and event loops."""

    def __init__(self, name: str, options: McpServer, token: str, environment: Mapping[str, str]):
        """Start nothing yet.

        Args:
            name: of the table [mcp.NAME], for errors.
            token: for the server at `options.url`, or "".
            environment: variables for `options.command`.
        """
        self.name = name
        self._options = options
        self._token = token
        self._environment = environment
        self._thread = LoopThread(f"mcp {name}")
        self._program: Program | None = None
        self._link: _Link | None = None
        self._look = asyncio.Lock()

    def open(self) -> list[Any]:
        """Connect and return the server's tools. Raises UserError where that fails."""
        timeout_s = self._options.timeout_s
        try:
            return self._thread.run(self._open(), time.monotonic() + timeout_s + _CLOSE_S)
        # Whatever the SDK, the program or the network raises is this server's failure.
        except Exception as error:
            raise UserError(f"mcp.{self.name}: {self._problem(error)}") from error

    async def call(self, tool: str, arguments: Mapping[str, object]) -> Any:
        """Return the result of a call. Raises ToolError within `timeout_s`, and a little more where
        the server must be looked after.
        """
        deadline = time.monotonic() + self._options.timeout_s * 2 + _LOOK_S + _CLOSE_S
        try:
            return await self._thread.call(self._call(tool, dict(arguments)), deadline)
        except (TimeoutError, Ended):
            raise ToolError(f"the server {self.name!r} is closed") from None

    def close(self) -> None:
        """End the session and the program; may be called twice."""
        self._thread.close(self._leave, _CLOSE_S)

    # ---- on the connection's loop

    async def _open(self) -> list[Any]:
        async with asyncio.timeout(self._options.timeout_s):
            self._link = _Link(self._transport())
            return await self._list(await self._link.session())

    async def _list(self, session: ClientSession) -> list[Any]:
        found: list[Any] = []
        cursor = None
        while True:
            page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def _call(self, tool: str, arguments: dict[str, object]) -> Any:
        link = self._link
        if link is None:
            raise ToolError(f"the server {self.name!r} is closed")
        timeout_s = self._options.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await (await link.session()).call_tool(tool, arguments)
        except TimeoutError:
            problem = f"timed out after {timeout_s:g} s"
        # The SDK raises errors of the protocol, of streams, of HTTP and of values.
        except Exception as error:  # noqa: BLE001
            problem = self._problem(error)
        await self._look_after(link)
        raise ToolError(problem)

    async def _look_after(self, link: _Link) -> None:
        """Start the server again if it does not even list its tools, once for all who ask."""
        async with self._look:
            if self._link is not link:
                return
            try:
                async with asyncio.timeout(min(_LOOK_S, self._options.timeout_s)):
                    await (await link.session()).list_tools()
            except Exception:  # noqa: BLE001  as in `open`
                await link.close()
                if self._link is link:  # nobody has closed the connection meanwhile
                    self._link = _Link(self._transport())

    async def _leave(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    def _transport(self) -> AbstractAsyncContextManager[Streams]:
        if self._options.command:
            self._program = Program(self._options.command, self._environment)
            return self._program.open()
        return http(self._options.url, self._token, self._options.timeout_s)

    def _problem(self, error: BaseException) -> str:
        """Say on one line what failed, in the server's words where it has any."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        text = str(error) if isinstance(error, MCPError | OSError) else ""
        if isinstance(error, TimeoutError):
            text = f"no answer within {self._options.timeout_s:g} s"
        text = text or f"{type(error).__name__}: {error}"
        words = self._program.last_words if self._program is not None else ""
        line = " ".join(f"{text[:_MAX_PROBLEM]}{f' (it said: {words})' if words else ''}".split())
        return printable(line, keep="")


async def _greet(session: ClientSession) -> None:
    """Agree on a version of the protocol: first as all servers do, then as only new ones do."""
    try:
        await session.initialize()
    except MCPError:
        await session.discover()
