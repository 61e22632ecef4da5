"""Serves the pages of runs to browsers on this machine, with the standard library alone.

A page is an empty shell that anybody may load. It asks for its data with the token, which is in the
fragment of the printed address: browsers send that neither to a server nor as Referer. It asks
again and again, and is answered 304 until files of the run have changed. A request whose Host is a
name that is not ours is refused, so that no other site can pose as this one (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from flowtrain.types import UserError
from flowtrain.utils.errors import user_error
from flowtrain.view.page import json_block, live_page, page_data
from flowtrain.view.run import is_run, signature
from flowtrain.view.runs import find_runs, table_data, table_signature

_log = logging.getLogger(__name__)
_HOST = "127.0.0.1"
_NAMES = (_HOST, "localhost")
_MOST_CONNECTIONS = 64
_PAUSE = 5
"""Data are made again after so many times as long as making them took, at the earliest."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _Refused(Exception):
    """The answer to a request is this status with this message."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Made(NamedTuple):
    """Data of a run as JSON, and what its files were like then."""

    signature: object
    json: bytes
    tag: str
    until_s: float


class Pages:
    """The page of a run, or those of a folder of runs, or of a path where one of these will be."""

    def __init__(self, root: Path, num_rollouts: int) -> None:
        self.root, self._num_rollouts = root, num_rollouts
        self._lock = threading.Lock()
        self._made: dict[str, _Made] = {}

    def shell(self, path: str) -> str:
        """Return the page at a path of the address; it holds nothing of a run."""
        if path == "/":
            return live_page(self.root.resolve().name, self._is_table(), "")
        name = unquote(path.removeprefix("/run/"))
        if not path.startswith("/run/") or not name:
            raise _Refused(404, "there is no such page")
        return live_page(name, False, name)

    def data(self, name: str) -> _Made:
        """Return the data of a run; "" names what `root` is."""
        with self._lock:
            # Names are looked up, never joined to a path unseen.
            if name and name not in find_runs(self.root):
                raise _Refused(404, "there is no such run")
            path, is_table = self.root / name, not name and self._is_table()
            made, sign = self._made.get(name), (table_signature if is_table else signature)(path)
            start_s = time.monotonic()
            if made is None or (made.signature != sign and start_s > made.until_s):
                data = table_data(path) if is_table else page_data(path, self._num_rollouts)
                text = json_block(data).encode("ascii")
                tag = f'"{hashlib.blake2b(text, digest_size=9).hexdigest()}"'
                now_s = time.monotonic()
                made = _Made(sign, text, tag, now_s + _PAUSE * (now_s - start_s))
                self._made = {name: made}  # one run at a time; another one is read again
            return made

    def _is_table(self) -> bool:
        return not is_run(self.root) and bool(find_runs(self.root))


class Server(ThreadingHTTPServer):
    """Serves `Pages` to those on this machine who have the token. A connection is a thread; beyond
    64 of them new ones are closed.
    """

    daemon_threads = True

    def __init__(self, pages: Pages, port: int = 0) -> None:
        """Listen from now on, at any free port for 0; UserError where that is not possible."""
        self.pages, self.token = pages, secrets.token_urlsafe(24)
        self._room = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        with user_error(f"cannot listen at {_HOST} port {port}", OSError, OverflowError):
            super().__init__((_HOST, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server who we are, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = self.socket.getsockname()

    @property
    def url(self) -> str:
        """The address, with the token in its fragment."""
        return f"http://{_HOST}:{self.server_port}/#token={self.token}"

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that break, which strangers could fill the terminal with."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("an answer failed")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    server: Server

    def do_GET(self) -> None:
        if self.headers.get("Content-Length") or self.headers.get("Transfer-Encoding"):
            self.close_connection = True  # the body is not read
        try:
            self._answer()
        except _Refused as refused:
            self._send(refused.status, f"{refused}\n".encode(), "text/plain; charset=utf-8")

    def _answer(self) -> None:
        host = self.headers.get("Host", "").lower()
        if host.partition(":")[0] not in _NAMES:
            raise _Refused(403, "this server has another name: open the address that it printed")
        parts = urlsplit(self.path)
        if parts.path != "/data":
            page = self.server.pages.shell(parts.path).encode("utf-8")
            return self._send(200, page, "text/html; charset=utf-8")
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        is_right = hmac.compare_digest(token.encode(), self.server.token.encode())
        if scheme != "Bearer" or not is_right:
            raise _Refused(401, "the token is missing or wrong: open the address that was printed")
        try:
            made = self.server.pages.data(parse_qs(parts.query).get("run", [""])[-1])
        except (OSError, UserError) as error:
            raise _Refused(503, f"{error}") from error
        if self.headers.get("If-None-Match") == made.tag:
            return self._send(304, b"", "application/json", made.tag)
        return self._send(200, made.json, "application/json", made.tag)

    def _send(self, status: int, data: bytes, kind: str, tag: str = "") -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if tag:
            self.send_header("ETag", tag)
        if self.close_connection:
            self.send_header("Connection", "close")
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        # The page has a policy of its own; this holds for whatever else is opened.
        only = "" if kind.startswith("text/html") else "default-src 'none'; "
        self.send_header("Content-Security-Policy", f"{only}frame-ancestors 'none'")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def version_string(self) -> str:
        return "flowtrain"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""
