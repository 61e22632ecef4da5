"""Read-only serving of a store to readers on other machines; any static file server that knows byte
ranges does as well.

Nothing but HEAD and the manifests and safetensors files of published versions is served, and only
to who has the token.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from flowtrain.utils import serving
from flowtrain.utils.serving import check_token, is_allowed
from flowtrain.weights.manifest import StoreError
from flowtrain.weights.store import WeightStore

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

_SERVED = re.compile(
    r"/(?:HEAD|v(?P<version>[0-9]{8,18})/(?:manifest\.json|[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors))"
)


def serve(store: WeightStore, host: str, port: int) -> None:
    """Until Ctrl-C or SIGTERM; downloads under way go on from where they are cut."""
    serving.serve(str(store), lambda token: make_app(store, token), host, port)


def make_app(store: WeightStore, token: str) -> ASGIApp:
    """The ASGI application. It looks the paths up in one pattern: a router, which also redirects,
    would serve more than is meant.
    """
    check_token(token)
    serving.require("starlette.concurrency", "starlette.requests")
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server is run without lifespan and websockets"
        response = await run_in_threadpool(_answer, store, token, Request(scope))
        await response(scope, receive, send)

    return app


def _answer(store: WeightStore, token: str, request: Request) -> Response:
    from starlette.responses import FileResponse, PlainTextResponse, Response

    if not is_allowed(request.headers.get("authorization", ""), token):
        return PlainTextResponse(
            "the token is missing or wrong\n", 401, {"WWW-Authenticate": "Bearer"}
        )
    if request.method not in ("GET", "HEAD"):
        return PlainTextResponse("the store is read-only\n", 405, {"Allow": "GET, HEAD"})
    path = _find(store, request.scope["path"])
    if path is None:
        return PlainTextResponse("there is no such file\n", 404)
    fresh = {"Cache-Control": "no-cache"}
    if path.suffix == ".safetensors":
        return FileResponse(path, media_type="application/octet-stream", headers=fresh)
    return Response(
        path.read_bytes(),
        headers=fresh,
        media_type="application/json" if path.suffix else "text/plain",
    )


def _find(store: WeightStore, path: str) -> Path | None:
    """The file that a path of a URL asks for; None where there is none, or none to be seen from
    outside.
    """
    asked = _SERVED.fullmatch(path)
    if asked is None or (
        asked["version"] is not None and not _is_published(store, int(asked["version"]))
    ):
        return None
    root, found = Path(os.path.realpath(store.root)), Path(os.path.realpath(store.root / path[1:]))
    return found if found.is_relative_to(root) and found.is_file() else None


def _is_published(store: WeightStore, version: int) -> bool:
    try:
        head = store.head()
    except StoreError:  # HEAD is damaged, as whoever asks for it will see
        return False
    return head is not None and version <= head
