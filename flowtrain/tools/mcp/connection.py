"""One connection to an MCP server, which all rollouts of a process share.

It lives on a thread and an event loop of its own. A server that has died, or does not even list its
tools after a call failed, is started once more; if it fails again before a call has worked, every
later call is an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from mcp import ClientSession, MCPError
from mcp.client.stdio import get_default_environment
from mcp_types import PaginatedRequestParams

from flowtrain.config import McpServer
from flowtrain.tools.base import ToolError
from flowtrain.tools.mcp.transports import Program, Streams, http
from flowtrain.types import UserError
from flowtrain.utils.text import printable
from flowtrain.utils.threads import Ended, LoopThread

MAX_TOOLS = 1000
"""Tools of a server."""
MAX_PAGES = 100
"""Pages of its list of tools."""
_MAX_PROBLEM = 300
_LOOK_S = 5.0
"""Seconds in which a server must list its tools after a call has failed."""
_CLOSE_S = 10.0


class _Session(ClientSession):
    async def validate_tool_result(self, name: str, result: Any) -> None:
        """Leave out the check by the server's own schema: a pattern in it could take for ever."""


@dataclass(slots=True)
class _Link:
    """A session from its start to its end."""

    ready: asyncio.Future[ClientSession]
    """Awaited under `shield`: one caller's cancellation is no other's."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to end it."""
    task: asyncio.Task[None] | None = None

    def end(self, task: asyncio.Task[None]) -> None:
        """Tell those who wait for the session why it has not come."""
        if not self.ready.done():
            error = None if task.cancelled() else task.exception()
            self.ready.set_exception(
                error if isinstance(error, Exception) else ConnectionError("it was cancelled")
            )

    async def list_tools(self) -> None:
        await (await asyncio.shield(self.ready)).list_tools()


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
        self._environment = {**get_default_environment(), **environment}
        self._thread = LoopThread(f"mcp {name}")
        self._program: Program | None = None
        self._link: _Link | None = None
        self._look = asyncio.Lock()
        self._has_restarted = False
        """Since a call has worked."""
        self._failed = ""
        """Why there will be no further session."""

    def open(self) -> list[Any]:
        """Connect and return the server's tools. Raises UserError where that fails."""
        timeout_s = self._options.timeout_s
        try:
            return self._thread.run(self._open(), time.monotonic() + timeout_s + _CLOSE_S)
        except UserError:
            raise
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
            self._link = self._connect()
            return await self._list(await asyncio.shield(self._link.ready))

    async def _list(self, session: ClientSession) -> list[Any]:
        found: list[Any] = []
        cursor = None
        for _ in range(MAX_PAGES):
            page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
            found += page.tools
            cursor = page.next_cursor
            if len(found) > MAX_TOOLS:
                break
            if cursor is None:
                return found
        raise UserError(
            f"mcp.{self.name}: its list of tools has no end after {len(found)} tools; {MAX_TOOLS} "
            f"tools on {MAX_PAGES} pages are allowed"
        )

    async def _call(self, tool: str, arguments: dict[str, object]) -> Any:
        link = self._link
        if link is None or self._failed:
            raise ToolError(self._failed or f"the server {self.name!r} is closed")
        timeout_s = self._options.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                session = await asyncio.shield(link.ready)
                result = await session.call_tool(tool, arguments)
        except TimeoutError:
            await self._look_after(link)
            raise ToolError(f"timed out after {timeout_s:g} s") from None
        # The SDK raises errors of the protocol, of streams, of HTTP and of values.
        except Exception as error:  # noqa: BLE001
            await self._look_after(link)
            raise ToolError(self._failed or self._problem(error)) from None
        self._has_restarted = False
        return result

    async def _look_after(self, link: _Link) -> None:
        """Start the server again if it does not even list its tools, once for all who ask."""
        async with self._look:
            if self._link is not link or self._failed:
                return
            if not await self._trouble(link.list_tools(), min(_LOOK_S, self._options.timeout_s)):
                return
            await self._leave()
            again = self._has_restarted
            self._has_restarted = True
            problem = "it has ended or hangs once more after a new start"
            if not again:
                self._link = self._connect()
                ready = asyncio.shield(self._link.ready)
                if not (problem := await self._trouble(ready, self._options.timeout_s)):
                    return
            self._failed = f"the server {self.name!r} is gone: {problem}"

    async def _trouble(self, work: Awaitable[object], timeout_s: float) -> str:
        """Return what is wrong where the work fails or takes longer; else ""."""
        try:
            async with asyncio.timeout(timeout_s):
                await work
        except Exception as error:  # noqa: BLE001  as in `open`
            return self._problem(error)
        return ""

    def _connect(self) -> _Link:
        """Begin a session, in a task of its own: the SDK wants it opened and closed by one."""
        link = _Link(asyncio.get_running_loop().create_future())
        link.ready.add_done_callback(lambda ready: ready.exception())  # nobody may wait for it
        link.task = asyncio.create_task(self._live(link))
        link.task.add_done_callback(link.end)
        return link

    async def _live(self, link: _Link) -> None:
        async with self._transport() as streams, _Session(*streams) as session:
            await _greet(session)
            link.ready.set_result(session)
            await link.over.wait()

    async def _leave(self) -> None:
        link, self._link = self._link, None
        if link is not None and link.task is not None:
            link.over.set()
            if not link.ready.done():
                link.task.cancel()
            await asyncio.wait({link.task}, timeout=_CLOSE_S)

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
