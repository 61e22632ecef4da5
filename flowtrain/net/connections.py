"""Connections of a server: how long, how slow and how many they may be.

A stranger may open many, send half a request, a byte now and then, or never read an answer. None of
that holds a place for long, and where places run out, those under way by somebody with a token are
the last to go. uvicorn and h11 speak HTTP; this module adds the limits that they lack.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import h11
from starlette.responses import PlainTextResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from flowtrain.net.bodies import SLOWEST

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_HEAD_BYTES = 16 << 10
"""Longest request line with its headers."""
_HEAD_S = 10.0
"""Seconds for the head of a request, from the connection or from its first byte."""
_LINGER_S = 2.0
"""Seconds in which the rest of a refused request is read and dropped. Closed at once, TCP would
reset the connection, and the client might never see why."""
_PATIENCE_S = 30.0
"""Seconds to read an answer, plus the time that its length may take; no pause may be longer."""
_MOST = 4096
_MOST_REFUSED = 32
"""Connections without a place that may send a request, to be told that there is none."""
_COME_BACK_S = 5
_BACKLOG = 2048
_OTHER_FILES = 128
"""Descriptors for the database, for modules, for the event loop."""


class Rank(IntEnum):
    """The worth of a connection: the lowest rank is closed first, in it the oldest."""

    STRANGER = 0
    """It has not shown a token."""
    KNOWN = 1
    """It has, and waits for the next request."""
    UNDER_WAY = 2
    """A request with a token is being answered; it is never closed to make room."""


class Room:
    """The places of a server."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ranks: tuple[dict[Connection, None], ...] = tuple({} for _ in Rank)
        """Connections in the order in which they came to their rank."""
        self._refused: dict[Connection, None] = {}

    def enter(self, connection: Connection) -> bool:
        """Take a place for a new connection, where need be that of another one, which is closed.
        Returns whether there was one.
        """
        if sum(map(len, self._ranks)) >= self._most:
            idle = self._ranks[Rank.STRANGER] or self._ranks[Rank.KNOWN]
            if not idle:
                if len(self._refused) >= _MOST_REFUSED:
                    self._close(next(iter(self._refused)))
                self._refused[connection] = None
                return False
            self._close(next(iter(idle)))
        self.move(connection, Rank.STRANGER)
        return True

    def move(self, connection: Connection, rank: Rank) -> None:
        """Give a connection another rank, in which it is the youngest."""
        self.leave(connection)
        connection.rank = rank
        self._ranks[rank][connection] = None

    def leave(self, connection: Connection) -> None:
        for connections in (*self._ranks, self._refused):
            connections.pop(connection, None)

    def _close(self, connection: Connection) -> None:
        self.leave(connection)
        connection.transport.abort()


class Connection(H11Protocol):
    """HTTP with a deadline for every head and for the reading of every answer.

    Applications find `admit` in the scope, to be called for a request with a valid token. An answer
    that is an error ends its connection.
    """

    room: Room
    """Set by `protocol`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rank = Rank.STRANGER
        self._has_place = True
        self._application: ASGIApp = self.app
        self.app = self._answer
        self._answer_began = 0.0
        self._num_sent = 0
        self._num_left = 0
        """Bytes that were not read when reading was looked at."""
        self._for_head: asyncio.TimerHandle | None = None
        self._for_reading: asyncio.TimerHandle | None = None

    # ---- what the event loop tells

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that `pause_writing` tells of every delay
        self._expect_head()
        self._has_place = self.room.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_head()
        self._has_read()
        self.room.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_idle and self._for_head is None:
            self._expect_head()
        super().data_received(data)
        if not self._is_idle:
            self._has_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        self._has_read()
        super().resume_writing()

    def _expect_head(self) -> None:
        self._for_head = self.loop.call_later(_HEAD_S, self.transport.abort)

    def _has_head(self) -> None:
        if self._for_head is not None:
            self._for_head.cancel()
            self._for_head = None

    def _expect_reading(self) -> None:
        """Look again after the longest pause, or when the answer should have been read."""
        self._has_read()
        self._num_left = self.transport.get_write_buffer_size()
        wait_s = _PATIENCE_S + min(0.0, self._time_left_s)
        self._for_reading = self.loop.call_later(wait_s, self._check_reading)

    def _has_read(self) -> None:
        if self._for_reading is not None:
            self._for_reading.cancel()
            self._for_reading = None

    def _check_reading(self) -> None:
        has_stopped = self.transport.get_write_buffer_size() == self._num_left
        if has_stopped or self._time_left_s < -_PATIENCE_S:
            self.transport.abort()
        else:
            self._expect_reading()

    @property
    def _time_left_s(self) -> float:
        """Seconds, without the patience, for what was sent of the answer; below 0: it is late."""
        return self._num_sent / SLOWEST - (self.loop.time() - self._answer_began)

    # ---- what uvicorn tells

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request, in place of the application where that is at work already."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        if not self._is_idle:
            self.cycle.disconnected = True  # it gets no more, and what it answers is dropped
            self.cycle.message_event.set()
        super().send_400_response(msg)

    def on_response_complete(self) -> None:
        if self.rank == Rank.UNDER_WAY:
            self.room.move(self, Rank.KNOWN)
        super().on_response_complete()  # may begin the next request, if it has come already

    @property
    def _is_idle(self) -> bool:
        """No complete head has come, but for those that are answered."""
        return self.cycle is None or self.cycle.response_complete

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(receive, send, self._note)
        app = self._application
        if problem := _problem(scope):
            app = PlainTextResponse(f"{problem}\n", 400)
        elif not self._has_place:
            headers = {"Retry-After": str(_COME_BACK_S)}
            app = PlainTextResponse("all places are taken\n", 503, headers)
        await app({**scope, "admit": self._admit}, exchange.receive, exchange.send)

    def _note(self, message: Message) -> None:
        """Take note of a part of an answer that is about to be sent."""
        if message["type"] == "http.response.start":
            self._answer_began, self._num_sent = self.loop.time(), 0
        self._num_sent += len(message.get("body", b""))

    def _admit(self) -> None:
        if not self.transport.is_closing():
            self.room.move(self, Rank.UNDER_WAY)


class _Exchange:
    """A request and its answer. After an error the connection ends, but not before the rest of the
    request was read for a while.
    """

    def __init__(self, receive: Receive, send: Send, note: Callable[[Message], None]) -> None:
        self._receive, self._send, self._note = receive, send, note
        self._is_read = self._is_error = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_read = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        self._note(message)
        if message["type"] == "http.response.start":
            self._is_error = message["status"] >= 400
            if self._is_error:
                headers = [pair for pair in message["headers"] if pair[0].lower() != b"connection"]
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
        elif self._is_error and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    while not self._is_read:
                        await self.receive()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)


def protocol(room: Room) -> type[Connection]:
    """Return the class of connections of one server."""

    class OfServer(Connection):
        pass

    OfServer.room = room
    return OfServer


def places() -> tuple[int, int]:
    """Return how many connections this process may have with the files that it may open, and how
    many more it may accept at a time. A connection may need a file beside itself, for its answer.
    """
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        return _MOST, _BACKLOG
    backlog = min(_BACKLOG, num_files // 4)
    return max(1, min(_MOST, (num_files - backlog - _OTHER_FILES) // 2)), backlog


def allow_files() -> None:
    """Let this process open as many files as `_MOST` connections need, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _MOST + _BACKLOG + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _problem(scope: Scope) -> str:
    """Return what is wrong with the head of a request that h11 lets pass; empty if nothing is."""
    names = [name for name, _ in scope["headers"]]
    if b"content-length" in names and b"transfer-encoding" in names:
        return "a request has a Content-Length or a Transfer-Encoding, not both"
    num_bytes = len(scope["method"]) + len(scope["raw_path"]) + len(scope["query_string"])
    num_bytes += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return "" if num_bytes <= MAX_HEAD_BYTES else f"the head has more than {MAX_HEAD_BYTES} bytes"
