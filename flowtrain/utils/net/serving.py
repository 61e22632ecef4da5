"""HTTP servers: token, address, start and end; and the checks that their clients share.

All of it is plain HTTP, and bounds only what one request may cost: where strangers reach it put a
proxy in front, with TLS and with limits to connections (examples/nginx.conf).
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from flowtrain.records import UserError
from flowtrain.utils.errors import user_error
from flowtrain.utils.net import bodies
from flowtrain.utils.net.bodies import SLOWEST, TooLong

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

TOKEN_VARIABLE = "FLOWTRAIN_TOKEN"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_GRACE_S = 3
"""Time for answers under way when a server is asked to end."""
_KEEP_ALIVE_S = 60
_MAX_HEAD_BYTES = 16 << 10
"""Longest request line with its headers, unless they come at once."""
_MOST = 4096
"""Connections; who comes when there are as many is told to come back."""
_OTHER_FILES = 128
"""Descriptors for the database, for modules, for the event loop."""
BODY_S = 20.0
"""Seconds to receive a body, plus the time that its length may take."""


class Rejected(Exception):
    """The answer to a request is this status with this message."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


def serve(
    what: str,
    make_app: Callable[[str], ASGIApp],
    host: str,
    port: int,
    *,
    has_tokens: bool,
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    `make_app` gets the token that opens everything: FLOWTRAIN_TOKEN, or else a new one, which is
    printed. Where the application `has_tokens` of its own none is made, and it may be empty.
    """
    require("starlette.responses", "uvicorn")
    set_token = os.environ.get(TOKEN_VARIABLE, "")
    token = set_token or ("" if has_tokens else secrets.token_urlsafe(24))

    def announce() -> None:
        print(f"serving {what} at {address(listener)}", flush=True)
        if token and not set_token:
            print(
                f"{TOKEN_VARIABLE}={token}  (generated for this run; set the variable to keep a "
                "fixed token)",
                flush=True,
            )
        if host not in _LOOPBACK:
            print(
                "this is plain HTTP: anybody on the network path can read all traffic, including "
                "the token; put TLS in front of it",
                flush=True,
            )

    server, listener = make_server(make_app(token), host, port, announce)
    with listener:
        server.run(sockets=[listener])


def make_server(
    app: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 0,
    on_start: Callable[[], None] = lambda: None,
) -> tuple[uvicorn.Server, socket.socket]:
    """Return a server, to be run with `run(sockets=[socket])`, and its socket, which accepts
    connections from now on. Port 0 is any free one. `on_start` is called once the server runs and a
    signal ends it: before, the exception of a signal may get lost in what is being imported.

    In the scope of a request, `is_ending()` tells a slow answer whether the server waits for it.

    Raises:
        UserError: a package is missing, or the address is not available.
    """
    require("starlette.responses", "uvicorn")
    import uvicorn

    from flowtrain.utils.net.protocol import Protocol

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with user_error(f"cannot listen at {host} port {port}", OSError, OverflowError):
        listener = socket.create_server((host, port), family=family)
    # Connections inherit it; without it the body of an answer waits 40 ms until its headers are
    # acknowledged.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def with_end(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "is_ending": lambda: server.should_exit}, receive, send)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            on_start()

    options = uvicorn.Config(
        with_end,
        lifespan="off",
        ws="none",
        log_level="error",  # a warning per malformed request would let strangers fill the log
        use_colors=False,  # which would be escaped, see terminal.py
        access_log=False,
        server_header=False,
        http=Protocol,
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
        limit_concurrency=_max_connections(),
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    server = Server(options)
    return server, listener


def _max_connections() -> int:
    """Let this process open as many files as `_MOST` connections need, as far as it may. Return how
    many it may have: each may need a file beside itself, for its answer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    num_files = 2 * _MOST + _OTHER_FILES
    soft = max(soft, num_files if hard == resource.RLIM_INFINITY else min(num_files, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(_MOST, (soft - _OTHER_FILES) // 2))


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Receive the body of a request. Raises Rejected when it is too long, too slow or cut."""
    from starlette.requests import ClientDisconnect

    # The number is one, and not long: the server has seen to that.
    length = int(request.headers.get("content-length", 0))
    try:
        if length > max_bytes:
            raise TooLong
        async with asyncio.timeout(BODY_S) as patience:
            return await bodies.read_body(_parts(request, length, patience), "", max_bytes)
    except TooLong:
        raise Rejected(413, f"a request of more than {max_bytes} bytes") from None
    except TimeoutError:
        raise Rejected(
            408, f"the request arrived at less than {SLOWEST >> 10} KiB per second"
        ) from None
    except ClientDisconnect:
        raise Rejected(400, "the request is truncated") from None


async def _parts(request: Request, length: int, patience: asyncio.Timeout) -> AsyncIterator[bytes]:
    """Yield the parts of a body, each of which brings the time for as many more bytes."""
    num_received = 0
    async for part in request.stream():
        num_received += len(part)
        if num_received != length:  # there is more to come, and a timer is not free
            patience.reschedule((patience.when() or 0.0) + len(part) / SLOWEST)
        yield part


def require(*modules: str) -> None:
    """Raise UserError if a module cannot be imported."""
    for module in modules:
        try:
            __import__(module)
        except ImportError as error:
            raise UserError(f"a server needs {error.name}: pip install -e '.[serve]'") from error


def address(listener: socket.socket) -> str:
    """Return the URL of a server's socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def check_token(token: str) -> str:
    """Return the token; raises UserError, which does not show it, if it does not fit a header."""
    if not re.fullmatch(r"[!-~]+", token):
        raise UserError(f"the token must be printable ASCII without spaces ({TOKEN_VARIABLE})")
    return token


def check_url(url: str) -> str:
    """Return the URL without a final slash; raises UserError if it is malformed or holds more than
    host, port and path.
    """
    try:
        parts = urlsplit(url)
        is_fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_fine = False
    if not is_fine:
        raise UserError(f"url must be like http://host:port/path, not {url!r}")
    if (
        parts.username is not None
        or parts.query
        or parts.fragment
        or not re.fullmatch(r"[!-~]+", url)
    ):
        raise UserError(
            "url must be of the form http://host:port/path, without a user, query or spaces; a "
            f"token goes into {TOKEN_VARIABLE}"
        )
    return url.rstrip("/")
