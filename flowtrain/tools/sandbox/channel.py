"""The host's end of a socket to a fork server."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from flowtrain.tools.sandbox.clocks import Clock, TimeLimit, state

STOP_S = 10.0
"""Wall time that the other end may take to end a run and to answer."""
LOOK_S = 0.05
"""Wall time between two looks at the clocks of a run."""
_CREDENTIALS = struct.Struct("3i")
"""Of a message's sender: process, user, group."""


class Channel:
    """Messages to and from another process. One thread at a time uses it; any may close it."""

    def __init__(self, ours: socket.socket) -> None:
        self.pid = 0
        """The process at the other end, where that has been found out."""
        self._socket = ours
        self._socket.setblocking(False)
        # The kernel then tells which process sent a message, by its number in our namespace.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        # Keeps the descriptor open until this object is gone, so that `close` in one thread cannot
        # pull it from under a read in another.
        self._keeper = self._socket.makefile("rb")

    def finish(self, clock: Clock, limit: TimeLimit) -> dict[str, Any]:
        """Return the answer to a request whose run has begun, within the limit's wall time and
        STOP_S; raises ConnectionError when the other end is lost.
        """
        reason = ""
        while not self._wait(select.POLLIN, time.monotonic() + LOOK_S):
            if reason := limit.exceeded(clock):
                break
        until = time.monotonic() + STOP_S
        try:
            if reason:
                self.send({"stop": reason}, until)
            return self.receive(until)[0]
        except TimeoutError:
            raise ConnectionResetError("the fork server does not answer") from None

    def close(self) -> None:
        """End the connection; whoever waits at it, on either side, sees that."""
        with contextlib.suppress(OSError):  # the other end has closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the other end: code without a filter can."""
        return self.pid > 0 and state(self.pid) == "T"

    def _wait(self, event: int, until: float) -> bool:
        """Wait for an event of the socket; False when there was none by then.

        Raises ConnectionError when the server has been stopped.
        """
        poll = select.poll()
        poll.register(self._socket, event)
        while not poll.poll(1e3 * max(0.0, min(LOOK_S, until - time.monotonic()))):
            if self.is_stopped():
                raise ConnectionAbortedError("the fork server was stopped")
            if time.monotonic() >= until:
                return False
        return True

    def send(self, message: Mapping[str, Any], until: float) -> None:
        """Send a message; raises TimeoutError, ConnectionError."""
        body = json.dumps(message).encode()
        data = memoryview(len(body).to_bytes(4, "big") + body)
        while data:
            if not self._wait(select.POLLOUT, until):
                raise TimeoutError
            data = data[self._socket.send(data) :]

    def receive(self, until: float) -> tuple[dict[str, Any], int]:
        """Return the next message and the process that sent it; raises TimeoutError,
        ConnectionError.
        """
        header, _ = self._read(4, until)
        body, pid = self._read(int.from_bytes(header, "big"), until)
        return json.loads(body), pid

    def _read(self, num_bytes: int, until: float) -> tuple[bytes, int]:
        """Return so many bytes and the process that sent the last of them."""
        data, pid = b"", 0
        while len(data) < num_bytes:
            if not self._wait(select.POLLIN, until):
                raise TimeoutError
            part, credentials, _, _ = self._socket.recvmsg(
                num_bytes - len(data), socket.CMSG_SPACE(_CREDENTIALS.size)
            )
            if not part:
                raise ConnectionResetError("the fork server has closed its end")
            data += part
            pid = _CREDENTIALS.unpack(credentials[0][2])[0]
        return data, pid
