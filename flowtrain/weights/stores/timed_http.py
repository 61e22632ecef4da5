"""HTTP whose answers have a time limit as a whole, for `urllib`."""

from __future__ import annotations

import io
import time
from http.client import HTTPConnection, HTTPResponse
from socket import socket
from typing import Any
from urllib.request import AbstractHTTPHandler, HTTPHandler, HTTPSHandler, Request

from flowtrain.utils.net.bodies import SLOWEST


class _Timed(io.RawIOBase):
    """Reads a socket until a deadline, however little comes at a time."""

    def __init__(self, source: io.RawIOBase, limit_s: float) -> None:
        self._source = source
        self.deadline = time.monotonic() + limit_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"the answer came slower than {SLOWEST >> 10} KiB per second")
        return self._source.readinto(buffer)

    def close(self) -> None:
        self._source.close()
        super().close()


class Response(HTTPResponse):
    """Bounds the time of the whole answer: the timeout of a socket bounds only a single read, and
    headers, sizes of chunks and trailers may come byte by byte, or without end.
    """

    def __init__(self, sock: socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self._timed = _Timed(self.fp.detach(), sock.gettimeout() or 0.0)
        self.fp = io.BufferedReader(self._timed)

    def end_after(self, limit_s: float) -> None:
        """Set the time for the body; until then the headers have the timeout of the socket."""
        self._timed.deadline = time.monotonic() + limit_s


class _Handler(AbstractHTTPHandler):
    def do_open(self, http_class: Any, req: Request, **options: Any) -> Any:
        def connect(host: str, **given: Any) -> HTTPConnection:
            connection: HTTPConnection = http_class(host, **given)
            connection.response_class = Response
            return connection

        return super().do_open(connect, req, **options)


class TimedHttp(_Handler, HTTPHandler):
    """Its answers are a `Response`."""


class TimedHttps(_Handler, HTTPSHandler):
    """Its answers are a `Response`."""
