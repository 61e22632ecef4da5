"""Serve a store, read-only, to readers on other machines. Any static file server that knows byte
ranges would do as well.

A data file that is asked for with its checksum (`?xxh3=...`) never changes at that address, so that
caches and relays between may keep it; HEAD and manifests are always asked for anew.

Only HEAD and the manifests and safetensors files of published versions are served, and only to
clients that have the token.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from flowtrain.utils import serving
from flowtrain.utils.tokens import Access, TokenFile
from flowtrain.weights.manifest import StoreError
from flowtrain.weights.store import WeightStore

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

_SERVED = re.compile(
    r"/(?:HEAD|v(?P<version>[0-9]{8,18})/(?:manifest\.json|[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors))"
)

_FOR_EVER = "max-age=31536000, immutable"


def serve(
    store: WeightStore, host: str, port: int, *, per_address: int, tokens: TokenFile | None
) -> None:
    """Serve until Ctrl-C or SIGTERM; clients resume downloads that are cut. `per_address`:
    connections that one address may have at a time.
    """
    serving.serve(
        str(store),
        lambda token: make_app(store, token, tokens),
        host,
        port,
        per_address=per_address,
        has_tokens=tokens is not None,
    )


def make_app(store: WeightStore, token: str, tokens: TokenFile | None = None) -> ASGIApp:
    """Build the ASGI application, for the owners of `token` and of `tokens`. It matches paths
    against one pattern, because a router also redirects.
    """
    access = Access(token, tokens)
    serving.require("starlette.concurrency", "starlette.requests")
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server is run without lifespan and websockets"
        request = Request(scope)
        if access.caller(request.headers.get("authorization", "")) is not None:
            scope["admit"]()
            response = await run_in_threadpool(_answer, store, request)
        else:
            headers = {"WWW-Authenticate": "Bearer"}
            response = PlainTextResponse("the token is missing or wrong\n", 401, headers)
        await response(scope, receive, send)

    return app


def _answer(store: WeightStore, request: Request) -> Response:
    from starlette.responses import FileResponse, PlainTextResponse, Response

    if request.method not in ("GET", "HEAD"):
        return PlainTextResponse("the store is read-only\n", 405, {"Allow": "GET, HEAD"})
    path = _find(store, request.scope["path"])
    checksum = request.query_params.get("xxh3", "")
    if path is None or (checksum and not _has(store, path, checksum)):
        return PlainTextResponse("there is no such file\n", 404)
    headers = {"Cache-Control": _FOR_EVER if checksum else "no-cache"}
    if path.suffix == ".safetensors":
        return FileResponse(path, headers=headers, media_type="application/octet-stream")
    media_type = "application/json" if path.suffix else "text/plain"
    return Response(path.read_bytes(), headers=headers, media_type=media_type)


def _find(store: WeightStore, path: str) -> Path | None:
    """Return the file for the path of a URL; None when there is none or it must not be seen."""
    match = _SERVED.fullmatch(path)
    if match is None:
        return None
    if match["version"] is not None and not _is_published(store, int(match["version"])):
        return None
    root = Path(os.path.realpath(store.root))
    file = Path(os.path.realpath(store.root / path[1:]))
    return file if file.is_relative_to(root) and file.is_file() else None


def _has(store: WeightStore, path: Path, checksum: str) -> bool:
    """Tell whether the manifest gives the file that checksum."""
    try:
        manifest = store.manifest(int(path.parent.name[1:]))
    except (StoreError, ValueError):
        return False
    return any((file.name, file.xxh3) == (path.name, checksum) for file in manifest.files)


def _is_published(store: WeightStore, version: int) -> bool:
    try:
        head = store.head()
    except StoreError:  # HEAD is damaged; its own request shows that
        return False
    return head is not None and version <= head
