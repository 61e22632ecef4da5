"""Serve the page of a run to a browser on this machine; each time it is loaded it is made anew."""

from __future__ import annotations

import hmac
import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from flowtrain.logging.page.page import build_page
from flowtrain.records import UserError
from flowtrain.utils.errors import user_error

_HOST = "127.0.0.1"


class Server(ThreadingHTTPServer):
    """Serves the page at an address that holds a token, so that no other user of the machine and no
    other site in the browser finds it.
    """

    daemon_threads = True

    def __init__(self, run_dir: Path, num_rollouts: int, port: int = 0) -> None:
        """Listen from now on, at any free port for 0; UserError where that is not possible."""
        self.run_dir, self.num_rollouts = run_dir, num_rollouts
        self.path = f"/{secrets.token_urlsafe(24)}"
        with user_error(f"cannot listen at {_HOST} port {port}", OSError, OverflowError):
            super().__init__((_HOST, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{_HOST}:{self.server_port}{self.path}"


class _Handler(BaseHTTPRequestHandler):
    timeout = 30
    server: Server

    def do_GET(self) -> None:
        if not hmac.compare_digest(self.path.encode(), self.server.path.encode()):
            return self._send(404, "open the address that was printed\n", "text/plain")
        try:
            page = build_page(self.server.run_dir, self.server.num_rollouts)
        except (OSError, UserError) as error:  # there is no run yet, or its files are not ours
            return self._send(503, f"{error}\n", "text/plain")
        return self._send(200, page, "text/html")

    def _send(self, status: int, text: str, kind: str) -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: the address holds the token."""
