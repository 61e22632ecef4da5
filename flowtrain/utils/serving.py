"""What the servers of the house have in common: a token, an address, and how they start and end;
and what their clients check alike.

All of it is plain HTTP: beyond a network that is trusted, put a proxy with TLS in front.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flowtrain.types import UserError

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp, Receive, Scope, Send

TOKEN_VARIABLE = "FLOWTRAIN_TOKEN"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_GRACE_S = 3
"""For answers under way when a server is asked to end."""
_KEEP_ALIVE_S = 60
_MAX_CONNECTIONS = 4096
_MAX_HEADER_BYTES = 16 << 10


def serve(what: str, make_app: Callable[[str], ASGIApp], host: str, port: int) -> None:
    """Until Ctrl-C or SIGTERM. The token, which `make_app` gets, is FLOWTRAIN_TOKEN, or a new one,
    which is printed.
    """
    given = os.environ.get(TOKEN_VARIABLE, "")
    token = given or secrets.token_urlsafe(24)
    server, listener = make_server(make_app(token), host, port)
    with listener:
        print(f"serving {what} at {address(listener)}", flush=True)
        if not given:
            print(
                f"{TOKEN_VARIABLE}={token}  (made for this run; set it here too to keep one)",
                flush=True,
            )
        if host not in _LOOPBACK:
            print(
                "this is plain HTTP: whoever is on the way can read what is sent, the token too; "
                "put TLS in front of it",
                flush=True,
            )
        server.run(sockets=[listener])


def make_server(
    app: ASGIApp, host: str = "127.0.0.1", port: int = 0
) -> tuple[uvicorn.Server, socket.socket]:
    """A server, to be run with `run(sockets=[the socket])`; connections are accepted from now on,
    port 0 is any free one.

    In the scope of a request, `is_ending()` tells who takes his time whether the server waits for
    him.

    Raises:
        UserError: uvicorn is missing, or the address cannot be had.
    """
    require("uvicorn")
    import uvicorn

    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen at {host} port {port}: {error}") from error
    # Connections take it over. Without it the body of an answer waits 40 ms for the receipt of its
    # headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    options: dict[str, Any] = {
        "lifespan": "off",
        "ws": "none",
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
    }
    # h11 by name: the other parser that uvicorn may find has no limit for headers.
    limits: dict[str, Any] = {
        "http": "h11",
        "h11_max_incomplete_event_size": _MAX_HEADER_BYTES,
        "limit_concurrency": _MAX_CONNECTIONS,
    }
    times: dict[str, Any] = {
        "timeout_graceful_shutdown": _GRACE_S,
        "timeout_keep_alive": _KEEP_ALIVE_S,
    }

    async def with_end(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "is_ending": lambda: server.should_exit}, receive, send)

    server = uvicorn.Server(uvicorn.Config(with_end, **options, **limits, **times))
    return server, listener


def require(*modules: str) -> None:
    """Raises UserError where one cannot be imported."""
    for module in modules:
        try:
            __import__(module)
        except ImportError as error:
            raise UserError(
                f"a server needs {error.name}: pip install 'flowtrain[serve]'"
            ) from error


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_allowed(authorization: str, token: str) -> bool:
    """Whether a header carries the token."""
    scheme, _, given = authorization.partition(" ")
    # Compared as bytes: text must be ASCII for this, and what a stranger sends need not be.
    return (
        hmac.compare_digest(given.strip().encode(), token.encode()) and scheme.lower() == "bearer"
    )


def check_token(token: str) -> str:
    """Raises UserError, without the token, when it does not fit into a header."""
    if not re.fullmatch(r"[!-~]+", token):
        raise UserError(f"the token must be printable ASCII without spaces ({TOKEN_VARIABLE})")
    return token


def check_url(url: str) -> str:
    """Without the slash at its end. Raises UserError when it is none, or holds more than host, port
    and path.
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
