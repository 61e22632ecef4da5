"""The page that follows runs, over HTTP: the standard library's server, which needs no extra
package.

Pages are empty shells that anybody may load; what they show they ask for with the token, which is
in the fragment of the printed address: browsers send that neither to a server nor as Referer. A
request whose Host is a name that is not ours is refused, so that no other site can pose as this one
(DNS rebinding).
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import secrets
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from flowtrain.net.serving import check_token
from flowtrain.types import UserError
from flowtrain.utils.errors import user_error
from flowtrain.view.flow import DataflowWatch, check_own
from flowtrain.view.live import Cursor, LiveRun, to_json
from flowtrain.view.page import live_page
from flowtrain.view.run import is_run, read_config
from flowtrain.view.runs import RunTable, find_runs
from flowtrain.view.state import run_state

_log = logging.getLogger(__name__)
TOKEN_VARIABLE = "FLOWTRAIN_VIEW_TOKEN"
"""Not FLOWTRAIN_TOKEN: whoever may look must not be able to write to a dataflow."""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_MOST_CONNECTIONS = 64
_MOST_RUNS = 8
"""Runs that are kept in memory at a time; one that nobody looks at is read again later."""
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


def make_token(given: str, host: str) -> str:
    """Return the given token, or a new one where only this machine can ask.

    Raises UserError where others can ask and none is given, or the token cannot be used.
    """
    if not given and host not in _LOOPBACK:
        raise UserError(
            f"--host {host} lets other machines ask: set {TOKEN_VARIABLE} to a token of your own"
        )
    return check_token(given) if given else secrets.token_urlsafe(24)


class View:
    """What is served: a run, or a folder of runs, or a path where one of these will be."""

    def __init__(self, root: Path, num_rollouts: int, dataflow: str = "") -> None:
        """Read nothing yet. `dataflow`: address to ask in place of those in the runs' configs."""
        self.root = root
        self._num_rollouts, self._dataflow = num_rollouts, dataflow
        self._lock = threading.Lock()
        self._table = RunTable(root)
        self._runs: OrderedDict[str, LiveRun] = OrderedDict()
        self._watches: dict[str, DataflowWatch] = {}

    def page(self, path: str) -> str:
        """Return the page at a path of the address; it holds nothing of a run."""
        if path == "/":
            kind = self._kind()
            name = self.root.resolve().name
            return live_page(name, {"kind": "table" if kind == "table" else "run", "run": ""})
        name = unquote(path.removeprefix("/run/"))
        if not path.startswith("/run/") or not name:
            raise _Refused(404, "there is no such page")
        return live_page(name, {"kind": "run", "run": name, "is_inside": True})

    def _kind(self) -> str:
        if is_run(self.root):
            return "run"
        return "table" if find_runs(self.root) else ""

    def answer(self, path: str, query: Mapping[str, str]) -> bytes:
        """Return what a page asks for, as JSON."""
        if path == "/api/table":
            table = self._table.answer()
            is_known = table["id"] == query.get("id")
            return json.dumps({"id": table["id"]} if is_known else table).encode("ascii")
        name = query.get("run", "")
        if path == "/api/run":
            if not name and self._kind() == "table":
                return b'{"kind": "table"}'
            return to_json(self._run(name).answer(_cursor(query)))
        if path == "/api/dataflow":
            return json.dumps(self._dataflow_of(self._path(name))).encode("ascii")
        raise _Refused(404, "there is no such page")

    def _path(self, name: str) -> Path:
        """The folder of a run; names are looked up, never joined to a path unseen."""
        if not name:
            return self.root
        if name not in self._table.names():
            raise _Refused(404, "there is no such run")
        return self.root / name

    def _run(self, name: str) -> LiveRun:
        path = self._path(name)
        with self._lock:
            run = self._runs.pop(name, None) or LiveRun(path, self._num_rollouts)
            self._runs[name] = run
            if len(self._runs) > _MOST_RUNS:
                self._runs.popitem(last=False)
        return run

    def _dataflow_of(self, path: Path) -> dict[str, Any]:
        try:
            url = self._dataflow or read_config(path).get("dataflow", {}).get("url", "")
            if not url:
                return {}
            if not self._dataflow:
                check_own(url)
            with self._lock:
                watch = self._watches.get(url) or DataflowWatch(url)
                self._watches[url] = watch
        except UserError as error:
            return {"problem": str(error)}
        answer = watch.answer()
        is_over = "problem" in answer and run_state(path).name == "ended"
        # The service of a run that is complete may be gone as well, unless somebody asks for it.
        return {} if is_over and not self._dataflow else answer

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()


def _cursor(query: Mapping[str, str]) -> Cursor:
    try:
        epoch, record, low, high = (
            int(query.get(name, "-1")) for name in ("epoch", "record", "low", "high")
        )
    except ValueError:
        raise _Refused(400, "epoch, record, low and high must be numbers") from None
    return Cursor(epoch, record, low, high, query.get("head", ""))


class Server(ThreadingHTTPServer):
    """Serves a `View` to those who have the token. A connection is a thread; beyond 64 of them new
    ones are closed.
    """

    daemon_threads = True

    def __init__(self, view: View, token: str, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen from now on, at any free port for 0; UserError where that is not possible."""
        self.view, self.token = view, token
        self._host = host.lower()
        self._room = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with user_error(f"cannot listen at {host} port {port}", OSError, OverflowError):
            super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server who we are, which may take seconds."""
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self._host, self.server_address[1]

    @property
    def url(self) -> str:
        """The address, with the token in its fragment."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.server_port}/#token={quote(self.token, safe='')}"

    def is_ours(self, host: str) -> bool:
        """Tell whether a Host header names us: an address, which no name server gives away, or a
        name of this machine.
        """
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in ("localhost", self._host, socket.gethostname().lower()):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or self._host not in _LOOPBACK

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
            data, kind = self._answer()
            self._send(200, data, kind)
        except _Refused as refused:
            self._send(refused.status, f"{refused}\n".encode(), "text/plain; charset=utf-8")

    def _answer(self) -> tuple[bytes, str]:
        if not self.server.is_ours(self.headers.get("Host", "")):
            raise _Refused(403, "this server has another name: open the address that it printed")
        parts = urlsplit(self.path)
        if not parts.path.startswith("/api/"):
            return self.server.view.page(parts.path).encode("utf-8"), "text/html; charset=utf-8"
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        is_right = hmac.compare_digest(token.encode(), self.server.token.encode())
        if scheme != "Bearer" or not is_right:
            raise _Refused(401, "the token is missing or wrong: open the address that was printed")
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        try:
            return self.server.view.answer(parts.path, query), "application/json"
        except OSError as error:
            raise _Refused(503, f"the run cannot be read: {error}") from error

    def _send(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        # The page has a policy of its own; this holds for whatever else is opened.
        self.send_header(
            "Content-Security-Policy",
            "frame-ancestors 'none'"
            if kind.startswith("text/html")
            else "default-src 'none'; frame-ancestors 'none'",
        )
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def version_string(self) -> str:
        return "flowtrain"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""
