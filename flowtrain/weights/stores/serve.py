"""Serve a store, read-only, to readers on other machines. Any static file server that knows byte
ranges would do as well.

A file that is asked for with its checksum (`?xxh3=...`) never changes at that address, so that
caches between may keep it; manifests have the checksums of data files.

The server exposes only HEAD, manifests and safetensors files of published versions, and only to
clients with the token.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from flowtrain.utils.net import serving
from flowtrain.utils.net.credentials import Access, TokenFile
from flowtrain.utils.net.monitoring import OTHER, Cached, Monitor, gauge
from flowtrain.weights.format.manifest import MAX_MANIFEST, Manifest, StoreError, read_whole
from flowtrain.weights.stores.folder import WeightStore

if TYPE_CHECKING:
    from prometheus_client import Metric
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

_SERVED = re.compile(
    r"/(?:HEAD|v(?P<version>[0-9]{8,18})/"
    r"(?P<name>manifest\.json|[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors))"
)
_FOR_EVER = "max-age=31536000, immutable"


def serve(
    store: WeightStore,
    host: str,
    port: int,
    *,
    tokens: TokenFile | None,
    open_metrics: bool,
) -> None:
    """Serve the store until Ctrl-C or SIGTERM; clients resume interrupted downloads.

    `open_metrics`: serve metrics without a token.
    """

    def app_for(token: str) -> ASGIApp:
        readers = None if open_metrics else Access(token, tokens)
        return monitor(store, readers).watching(make_app(store, token, tokens))

    serving.serve(str(store), app_for, host, port, has_tokens=tokens is not None)


def monitor(store: WeightStore, access: Access | None) -> Monitor:
    """Return the monitor of a server; docs/metrics.md lists its metrics. `access` decides who may
    read `/metrics`; None: everybody.
    """
    name = "flowtrain_weights"
    newest = Cached(store.head, StoreError, OSError)
    server_monitor = Monitor(name, access, label="file", value_of=_kind)

    def collect() -> Iterator[Metric]:
        version = newest.get()
        text = "Newest version that is served; missing while there is none."
        yield gauge(f"{name}_head_version", text, {} if version is None else {(): version})

    server_monitor.add(collect)
    return server_monitor


def _kind(path: str) -> str:
    match = _SERVED.fullmatch(path)
    if match is None:
        return OTHER
    return {None: "head", "manifest.json": "manifest"}.get(match["name"], "data")


def make_app(store: WeightStore, token: str, tokens: TokenFile | None = None) -> ASGIApp:
    """Return the ASGI application, which accepts `token` and the tokens in `tokens`. The
    application matches paths against one pattern, because a router would also redirect.
    """
    access = Access(token, tokens)
    serving.require("starlette.requests")
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server is run without lifespan and websockets"
        request = Request(scope)
        if access.caller(request.headers.get("authorization", "")) is None:
            headers = {"WWW-Authenticate": "Bearer"}
            response: ASGIApp = PlainTextResponse("the token is missing or wrong\n", 401, headers)
        else:
            if request.method in ("GET", "HEAD"):
                response = await run_in_threadpool(_answer, store, request)
            else:
                headers = {"Allow": "GET, HEAD"}
                response = PlainTextResponse("the store is read-only\n", 405, headers)
        await response(scope, receive, send)

    return app


def _answer(store: WeightStore, request: Request) -> Response:
    from starlette.responses import FileResponse, PlainTextResponse, Response

    path = _find(store, request.scope["path"])
    checksum = request.query_params.get("xxh3", "")
    if path is None or (checksum and not _has_checksum(path, checksum)):
        return PlainTextResponse("there is no such file\n", 404)
    headers = {"Cache-Control": _FOR_EVER if checksum else "no-cache"}
    if path.suffix == ".safetensors":
        return FileResponse(path, headers=headers, media_type="application/octet-stream")
    media_type = "application/json" if path.suffix else "text/plain"
    try:
        data = read_whole(path, MAX_MANIFEST)
    except StoreError as error:
        return PlainTextResponse(f"{error}\n", 404)
    return Response(data, headers=headers, media_type=media_type)


def _find(store: WeightStore, path: str) -> Path | None:
    """Return the file for the path of a URL; None for a missing or private file."""
    match = _SERVED.fullmatch(path)
    if match is None:
        return None
    if match["version"] is not None and not _is_published(store, int(match["version"])):
        return None
    # A link in the store must not lead out of it.
    root = Path(os.path.realpath(store.root))
    file = Path(os.path.realpath(store.root / path[1:]))
    return file if file.is_relative_to(root) and file.is_file() else None


def _has_checksum(path: Path, checksum: str) -> bool:
    """Return whether the manifest lists the file with this checksum."""
    manifest = path.with_name("manifest.json")
    try:
        # A version that was rolled back and published again has another inode and time.
        stat = manifest.stat()
        return (path.name, checksum) in _files_of(manifest, stat.st_ino, stat.st_mtime_ns)
    except (StoreError, FileNotFoundError):  # or it is collected just now
        return False


@lru_cache(256)
def _files_of(manifest: Path, _inode: int, _mtime_ns: int) -> frozenset[tuple[str, str]]:
    """Return names and checksums of files: a manifest is parsed once for all parts of them."""
    text = read_whole(manifest, MAX_MANIFEST).decode(errors="replace")
    return frozenset((f.name, f.xxh3) for f in Manifest.from_json(text, str(manifest)).files)


def _is_published(store: WeightStore, version: int) -> bool:
    try:
        head = store.head()
    except StoreError:  # HEAD is damaged; its own request shows that
        return False
    return head is not None and version <= head
