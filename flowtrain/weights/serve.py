"""Read-only serving of a store to readers on other machines; any static file server that knows byte ranges does as well.

Nothing but HEAD and the manifests and safetensors files of published versions is served, and only to who has the token. It is plain HTTP:
beyond a network that is trusted, put a proxy with TLS in front.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowtrain.types import UserError
from flowtrain.weights.manifest import StoreError
from flowtrain.weights.remote import check_token
from flowtrain.weights.store import WeightStore

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

_SERVED = re.compile(r"/(?:HEAD|v(?P<version>[0-9]{8,18})/(?:manifest\.json|[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors))")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_GRACE_S = 3
"""For downloads under way when the server is asked to end; they go on from where they are cut."""


def serve(store: WeightStore, host: str, port: int) -> None:
    """Until Ctrl-C or SIGTERM. The token is FLOWTRAIN_TOKEN, or a new one, which is printed."""
    given = os.environ.get("FLOWTRAIN_TOKEN", "")
    token = given or secrets.token_urlsafe(24)
    server, listener = make_server(store, token, host, port)
    with listener:
        print(f"serving {store} at {address(listener)}", flush=True)
        if not given:
            print(f"FLOWTRAIN_TOKEN={token}  (made for this run; set it here too to keep one)", flush=True)
        if host not in _LOOPBACK:
            print("this is plain HTTP: whoever is on the way can read weights and token; put TLS in front of it", flush=True)
        server.run(sockets=[listener])


def make_server(store: WeightStore, token: str, host: str = "127.0.0.1", port: int = 0) -> tuple[uvicorn.Server, socket.socket]:
    """A server, to be run with `run(sockets=[the socket])`; connections are accepted from now on, port 0 is any free one.

    Raises:
        UserError: starlette or uvicorn are missing, or the address cannot be had.
    """
    app = make_app(store, token)
    import uvicorn

    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen at {host} port {port}: {error}") from error
    options: dict[str, Any] = {"lifespan": "off", "ws": "none", "log_level": "warning", "access_log": False, "server_header": False}
    return uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=_GRACE_S, **options)), listener


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_app(store: WeightStore, token: str) -> ASGIApp:
    """The ASGI application. It looks the paths up in one pattern: a router, which also redirects, would serve more than is meant."""
    check_token(token)
    try:
        import uvicorn  # noqa: F401
        from starlette.concurrency import run_in_threadpool
        from starlette.requests import Request
    except ImportError as error:
        raise UserError(f"serving a store needs {error.name}: pip install 'flowtrain[serve]'") from error

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server is run without lifespan and websockets"
        response = await run_in_threadpool(_answer, store, token, Request(scope))
        await response(scope, receive, send)

    return app


def _answer(store: WeightStore, token: str, request: Request) -> Response:
    from starlette.responses import FileResponse, PlainTextResponse, Response

    if not _is_allowed(request.headers.get("authorization", ""), token):
        return PlainTextResponse("the token is missing or wrong\n", 401, {"WWW-Authenticate": "Bearer"})
    if request.method not in ("GET", "HEAD"):
        return PlainTextResponse("the store is read-only\n", 405, {"Allow": "GET, HEAD"})
    path = _find(store, request.scope["path"])
    if path is None:
        return PlainTextResponse("there is no such file\n", 404)
    fresh = {"Cache-Control": "no-cache"}
    if path.suffix == ".safetensors":
        return FileResponse(path, media_type="application/octet-stream", headers=fresh)
    return Response(path.read_bytes(), headers=fresh, media_type="application/json" if path.suffix else "text/plain")


def _is_allowed(authorization: str, token: str) -> bool:
    scheme, _, given = authorization.partition(" ")
    # Compared as bytes: text must be ASCII for this, and what a stranger sends need not be.
    return hmac.compare_digest(given.strip().encode(), token.encode()) and scheme.lower() == "bearer"


def _find(store: WeightStore, path: str) -> Path | None:
    """The file that a path of a URL asks for; None where there is none, or none to be seen from outside."""
    asked = _SERVED.fullmatch(path)
    if asked is None or (asked["version"] is not None and not _is_published(store, int(asked["version"]))):
        return None
    root, found = Path(os.path.realpath(store.root)), Path(os.path.realpath(store.root / path[1:]))
    return found if found.is_relative_to(root) and found.is_file() else None


def _is_published(store: WeightStore, version: int) -> bool:
    try:
        head = store.head()
    except StoreError:  # HEAD is damaged, as whoever asks for it will see
        return False
    return head is not None and version <= head
