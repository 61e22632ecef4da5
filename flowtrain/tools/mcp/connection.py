"""A connection to an MCP server, shared by all rollouts of a process.

A server that has died, or does not even list its tools after a call failed, is started once more,
and so after each later call that fails so.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import httpx2
from mcp import Client, MCPError
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from flowtrain.config import McpServer
from flowtrain.records import UserError
from flowtrain.tools.base import ToolError
from flowtrain.utils.event_loop import run_to_end
from flowtrain.utils.net.bodies import no_cookies
from flowtrain.utils.text import printable

_MAX_PROBLEM = 300
_STDERR_CHARS = 300
_LOOK_S = 5.0
"""Seconds in which a server must list its tools after a call has failed."""
_CLOSE_S = 10.0


class Connection:
    """Lists and calls the tools of a server."""

    def __init__(self, name: str, options: McpServer, token: str, environment: Mapping[str, str]):
        """Start nothing yet.

        Args:
            name: of the table [mcp.NAME], for errors.
            token: for the server at `options.url`, or "".
            environment: variables for `options.command`, on top of the SDK's HOME, LOGNAME, PATH,
                SHELL, TERM and USER.
        """
        self.name = name
        self._options, self._token, self._environment = options, token, environment
        self._link: _Link | None = None
        self._look = asyncio.Lock()
        self._stderr = b""

    def open(self) -> list[Any]:
        """Connect and return the server's tools. Raises UserError where that fails."""
        try:
            return run_to_end(self._open(), self._options.timeout_s + _CLOSE_S)
        # Whatever the SDK, the program or the network raises is this server's failure.
        except Exception as error:
            raise UserError(f"mcp.{self.name}: {self._problem(error)}") from error

    def close(self) -> None:
        """End the session and the program; may be called twice."""
        with suppress(TimeoutError):
            run_to_end(self._leave(), _CLOSE_S)

    async def _open(self) -> list[Any]:
        async with asyncio.timeout(self._options.timeout_s):
            self._link = _Link(self._transport())
            client, tools, cursor = await self._link.client(), list[Any](), None
            while True:
                page = await client.list_tools(cursor=cursor, cache_mode="bypass")
                tools += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    return tools

    async def call(self, tool: str, arguments: Mapping[str, object]) -> Any:
        """Return the result of a call. Raises ToolError within `timeout_s`, and a little more where
        the server must be looked after.
        """
        link = self._link
        if link is None:
            raise ToolError(f"the server {self.name!r} is closed")
        timeout_s = self._options.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await (await link.client()).call_tool(tool, dict(arguments))
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
            if self._link is not link:  # another caller has restarted it meanwhile
                return
            try:
                async with asyncio.timeout(min(_LOOK_S, self._options.timeout_s)):
                    await (await link.client()).list_tools(cache_mode="bypass")
            except Exception:  # noqa: BLE001  as in `open`
                await link.close()
                if self._link is link:  # nobody has closed the connection meanwhile
                    self._link = _Link(self._transport())

    async def _leave(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    def _transport(self) -> AbstractAsyncContextManager[Any]:
        return self._program() if self._options.command else self._http()

    @asynccontextmanager
    async def _program(self) -> AsyncIterator[Any]:
        """Start a child process, keep the end of what it writes to stderr, and end it with all that
        it started.
        """
        program, *args = self._options.command
        parameters = StdioServerParameters(command=program, args=args, env=dict(self._environment))
        loop = asyncio.get_running_loop()
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        loop.add_reader(reader, self._listen, reader)
        try:
            with os.fdopen(writer, "w") as stderr:
                async with stdio_client(parameters, errlog=stderr) as streams:
                    yield streams
        finally:
            loop.remove_reader(reader)
            os.close(reader)

    def _listen(self, reader: int) -> None:
        self._stderr = (self._stderr + os.read(reader, 1 << 16))[-4 * _STDERR_CHARS :]

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[Any]:
        client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
            timeout=httpx2.Timeout(self._options.timeout_s, read=None),
            cookies=no_cookies(),
        )
        async with client, streamable_http_client(self._options.url, http_client=client) as streams:
            yield streams

    def _problem(self, error: BaseException) -> str:
        """Return the cause of a failure in one line, in the server's words if available."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        text = str(error) if isinstance(error, MCPError | OSError) else ""
        if isinstance(error, TimeoutError):
            text = f"no answer within {self._options.timeout_s:g} s"
        text = text or f"{type(error).__name__}: {error}"
        words = " ".join(self._stderr.decode(errors="replace").split())[-_STDERR_CHARS:]
        line = " ".join(f"{text[:_MAX_PROBLEM]}{f' (it said: {words})' if words else ''}".split())
        return printable(line, keep="")


class _Link:
    """A client from its start to its end, in a task of its own: the SDK wants it opened and closed
    by one.
    """

    def __init__(self, transport: AbstractAsyncContextManager[Any]) -> None:
        self._over = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.exception())  # nobody may wait for it
        self._task = asyncio.create_task(self._live(transport))
        self._task.add_done_callback(self._end)

    async def client(self) -> Client:
        """Wait for the client; one caller's cancellation is no other's."""
        return await asyncio.shield(self._ready)

    async def close(self) -> None:
        self._over.set()
        if not self._ready.done():
            self._task.cancel()
        try:
            await asyncio.wait({self._task}, timeout=_CLOSE_S)
        finally:
            self._task.cancel()

    async def _live(self, transport: AbstractAsyncContextManager[Any]) -> None:
        async with Client(transport) as client:
            self._ready.set_result(client)
            await self._over.wait()

    def _end(self, task: asyncio.Task[None]) -> None:
        """Pass the cause of a failed connection to the waiting callers."""
        error = None if task.cancelled() else task.exception()
        if not self._ready.done():
            cancelled = ConnectionError("it was cancelled")
            self._ready.set_exception(error if isinstance(error, Exception) else cancelled)
