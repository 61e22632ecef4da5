"""Mend what uvicorn's HTTP lacks: a deadline for the head of a request, and an answer to a
malformed one that fills no log. Limits to connections are the part of a proxy in front.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_HEAD_S = 10.0
"""Seconds for the head of a request, from the connection or from its first byte."""


class Protocol(H11Protocol):
    """A connection of a server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        if not self._is_idle:
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(_HEAD_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @property
    def _is_idle(self) -> bool:
        """No complete head has come, but for those that are answered."""
        return self.cycle is None or self.cycle.response_complete

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request, in place of the application where that is at work already."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        if not self._is_idle:
            self.cycle.disconnected = True  # it gets no more, and what it answers is dropped
            self.cycle.message_event.set()
        super().send_400_response(msg)
