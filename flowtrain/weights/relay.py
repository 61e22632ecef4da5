"""Serve a store at a site: what its nodes ask for comes once from the origin, a server of weights
or another relay.

All but HEAD has an address at which it never changes, so a relay keeps it as long as there is room.
HEAD is asked for anew after a moment. While the origin is silent the last one goes on being served,
for a bounded time and with its age in a header: nodes reach the versions that are here, and
no other one takes their place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flowtrain.net import serving
from flowtrain.net.credentials import Access, TokenFile
from flowtrain.types import UserError
from flowtrain.utils.errors import on_failure
from flowtrain.utils.files import make_folder, replace_file
from flowtrain.utils.lock import Lock
from flowtrain.weights.cache import FileCache, Opened
from flowtrain.weights.checksums import checksum_of
from flowtrain.weights.listing import AGE, ORIGIN_S, Head, Listing
from flowtrain.weights.manifest import File, Manifest, NotThere, Silent, StoreError
from flowtrain.weights.measures import monitor
from flowtrain.weights.remote import HttpStore
from flowtrain.weights.serve import FOR_EVER, SERVED, guarded

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

T = TypeVar("T")
_log = logging.getLogger(__name__)
_CHUNK = 1 << 20
_TICK_S = 0.02
"""Seconds between two looks at a file that is coming."""
_HEAD_TIMEOUT_S = 5.0
_MOST_MANIFESTS = 1024
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})")


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """The room that a relay has for what it fetches."""

    cache_bytes: int
    """Most bytes of data files."""
    head_s: float = 0.25
    """Seconds for which HEAD is not asked for again."""
    stale_s: float = 600.0
    """Seconds for which a silent origin's last HEAD is served."""


def serve(
    url: str,
    folder: Path,
    options: RelayOptions,
    host: str,
    port: int,
    *,
    origin_token: str,
    tokens: TokenFile | None,
    open_metrics: bool,
) -> None:
    """Relay the store at `url` until Ctrl-C or SIGTERM, with its cache in `folder`."""
    lock = Lock.of_folder(folder, "end it, or give this one a folder of its own (--dir)")
    try:
        relay = Relay(url, folder, options, origin_token)

        def app_for(token: str) -> ASGIApp:
            readers = None if open_metrics else Access(token, tokens)
            return monitor(relay.head, readers).watching(relay.make_app(token, tokens))

        serving.serve(
            f"{url} (relay, cache in {folder})",
            app_for,
            host,
            port,
            has_tokens=tokens is not None,
        )
    finally:
        lock.release()


class Relay:
    """The cache of a site, and its answers. `make_app` runs on one event loop."""

    def __init__(self, url: str, folder: Path, options: RelayOptions, token: str = "") -> None:
        """Raises UserError if the URL or the token cannot be used, or the folder not be written."""
        self._url, self._token, self._options = url, token, options
        self._origin = HttpStore(url, folder, token, retries=2)
        self._asked = HttpStore(url, folder, token, timeout_s=_HEAD_TIMEOUT_S, retries=0)
        make_folder(folder / "manifests")
        self._folder = folder
        self._cache = FileCache(folder, options.cache_bytes, self._fetch)
        self._once = _Once()
        self._files: dict[tuple[int, str], dict[str, File]] = {}
        """Data files by version and checksum of the manifest, then by name."""
        self._head: Head | None = self._last_head()
        self._asked_at = -1e9
        self._trouble = self._last_warning = ""

    def make_app(self, token: str, tokens: TokenFile | None = None) -> ASGIApp:
        """Build the ASGI application, for the owners of `token` and of `tokens`."""
        return guarded(self._answer, token, tokens)

    def head(self) -> int | None:
        """Return the newest version that the relay knows of."""
        return None if self._head is None else self._head.listing.head

    async def _answer(self, request: Request) -> ASGIApp:
        from starlette.responses import PlainTextResponse

        try:
            match = SERVED.fullmatch(request.scope["path"])
            if match is None:
                raise NotThere("there is no such file")
            if match["version"] is None:
                return await self._answer_head("manifests" in request.query_params)
            version, checksum = int(match["version"]), request.query_params.get("xxh3", "")
            if match["name"] == "manifest.json":
                return await self._answer_manifest(version, checksum)
            return await self._answer_file(request, version, match["name"], checksum)
        except NotThere as error:
            return PlainTextResponse(f"{error}\n", 404)
        except (UserError, OSError) as error:
            if str(error) != self._last_warning:  # nodes ask many times
                _log.warning("%s", error)
            self._last_warning = str(error)
            return PlainTextResponse(f"{error}\n", 502 if isinstance(error, StoreError) else 507)

    # ---- HEAD

    async def _answer_head(self, has_manifests: bool) -> Response:
        from starlette.responses import Response

        began = time.monotonic()
        head = await self._fresh_head()
        text = head.listing.to_text() if has_manifests else f"{head.listing.head}\n"
        headers = {
            "Cache-Control": "no-cache",
            AGE: f"{max(0.0, time.time() - head.asked_at):.3f}",
            ORIGIN_S: f"{time.monotonic() - began:.3f}",
        }
        return Response(text, headers=headers, media_type="text/plain")

    async def _fresh_head(self) -> Head:
        """Return HEAD, asked for just now, or the last one of a silent origin.

        Raises:
            NotThere: the origin holds no version.
            StoreError: the origin refuses, or has been silent for too long.
        """
        if time.monotonic() - self._asked_at > self._options.head_s:
            await self._once("HEAD", self._ask)
        if self._head is None:
            if self._trouble:
                raise StoreError(self._trouble)
            raise NotThere(f"{self._url} holds no version")
        if time.time() - self._head.asked_at > self._options.stale_s + self._options.head_s:
            raise StoreError(f"HEAD is older than {self._options.stale_s:g} s: {self._trouble}")
        return self._head

    def _ask(self) -> None:
        trouble = ""
        try:
            head = self._asked.ask()
        except Silent as error:
            head, trouble = self._head, str(error)
        except StoreError as error:
            head, trouble = None, str(error)
        if trouble and not self._trouble:
            _log.warning("%s; the last HEAD is %s", trouble, "served on" if head else "dropped")
        if self._trouble and not trouble:
            _log.warning("%s answers again", self._url)
        if self._head is not None and head is not None:
            self._compare(self._head.listing, head.listing)
        if head is not None and not trouble:
            self._keep(head)
        self._head, self._trouble = head, trouble
        self._asked_at = time.monotonic() + (_HEAD_TIMEOUT_S if trouble else 0.0)

    def _compare(self, before: Listing, after: Listing) -> None:
        """Say when versions are other ones now; what is kept of the former ones is in nobody's way,
        because it has other addresses.
        """
        shared = before.manifests.keys() & after.manifests.keys()
        changed = [v for v in shared if after.manifests[v] != before.manifests[v]]
        if changed:
            text = "version %d of %s is another one now: the run was rolled back, or is a new one"
            _log.warning(text, min(changed), self._url)
        elif after.head < before.head:
            text = "HEAD of %s went back from %d to %d: the run was rolled back"
            _log.warning(text, self._url, before.head, after.head)

    def _keep(self, head: Head) -> None:
        """Write HEAD down for the next process; the time of the file is its own."""
        path = self._folder / "head.json"
        if self._head is None or head.listing != self._head.listing or not path.exists():
            record = {"url": self._url, "text": head.listing.to_text()}
            replace_file(path, json.dumps(record).encode())
        os.utime(path, (head.asked_at, head.asked_at))

    def _last_head(self) -> Head | None:
        """Return HEAD as an earlier process of this folder and origin knew it."""
        path = self._folder / "head.json"
        try:
            record = json.loads(path.read_text())
            if record["url"] != self._url:
                return None
            at = path.stat().st_mtime
            return Head(Listing.from_text(record["text"], str(path)), at, at, 0.0)
        except (OSError, ValueError, TypeError, KeyError, StoreError):
            return None  # there is none, or a damaged one: the origin has it

    # ---- manifests

    async def _answer_manifest(self, version: int, checksum: str) -> Response:
        from starlette.responses import Response

        headers = {"Cache-Control": FOR_EVER if checksum else "no-cache"}
        data = await self._manifest(version, checksum or await self._listed(version))
        return Response(data, headers=headers, media_type="application/json")

    async def _listed(self, version: int) -> str:
        """Return the checksum of a manifest; empty where the origin, a plain server, lists none."""
        return (await self._fresh_head()).listing.manifests.get(version, "")

    async def _manifest(self, version: int, checksum: str) -> bytes:
        if not re.fullmatch("([0-9a-f]{16})?", checksum):
            raise NotThere("there is no such file")
        return await self._once((version, checksum), self._get_manifest, version, checksum)

    def _get_manifest(self, version: int, checksum: str) -> bytes:
        path = self._folder / "manifests" / f"{version}-{checksum}.json"
        data = path.read_bytes() if checksum and path.exists() else b""
        if not data or checksum_of(data) != checksum:
            data = self._origin.manifest_bytes(version, checksum)
            path = path.with_name(f"{version}-{checksum_of(data)}.json")
            replace_file(path, data)
            _keep_newest(path.parent, _MOST_MANIFESTS)
        if (key := (version, checksum_of(data))) not in self._files:
            manifest = Manifest.from_json(data.decode(errors="replace"), str(path))
            while len(self._files) >= _MOST_MANIFESTS:
                del self._files[next(iter(self._files))]
            self._files[key] = {file.name: file for file in manifest.files}
        return data

    # ---- data files

    async def _answer_file(
        self, request: Request, version: int, name: str, checksum: str
    ) -> ASGIApp:
        from starlette.concurrency import run_in_threadpool

        file = await self._find(version, name, checksum)
        start, end, headers = _range(request.headers, file.num_bytes)
        headers["Cache-Control"] = FOR_EVER if checksum else "no-cache"
        headers["Content-Type"] = "application/octet-stream"
        if start >= end > 0:
            return _Streamed(416, {"Content-Range": f"bytes */{end}", "Content-Length": "0"})
        status = 206 if "Content-Range" in headers else 200
        if request.method == "HEAD":
            return _Streamed(status, headers)
        opened = await run_in_threadpool(self._cache.open, version, file)
        with on_failure(opened.data.close):
            while opened.num_ready() <= min(start, file.num_bytes - 1):
                await asyncio.sleep(_TICK_S)
        return _Streamed(status, headers, opened, start, end)

    async def _find(self, version: int, name: str, checksum: str) -> File:
        """Return the record of a data file, from a manifest of its version."""
        if checksum and (file := self._known(version, name, checksum)) is not None:
            return file
        for path in (self._folder / "manifests").glob(f"{version}-*.json") if checksum else ():
            await self._manifest(version, path.stem.rpartition("-")[2])
            if (file := self._known(version, name, checksum)) is not None:
                return file
        data = await self._manifest(version, await self._listed(version))
        file = self._files[version, checksum_of(data)].get(name)
        if file is None or checksum not in ("", file.xxh3):
            raise NotThere("there is no such file")
        return file

    def _known(self, version: int, name: str, checksum: str) -> File | None:
        for (of, _), files in list(self._files.items()):
            if of == version and (file := files.get(name)) and file.xxh3 == checksum:
                return file
        return None

    def _fetch(self, folder: Path, version: int, file: File) -> Path:
        return HttpStore(self._url, folder, self._token).fetch(version, file)


class _Streamed:
    """An answer of a part of a file, as it comes; one that cannot go on is cut."""

    def __init__(
        self,
        status: int,
        headers: Mapping[str, str],
        opened: Opened | None = None,
        start: int = 0,
        end: int = 0,
    ) -> None:
        self._status, self._opened, self._at, self._end = status, opened, start, end
        self._headers = [(k.lower().encode(), v.encode()) for k, v in headers.items()]

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        head = {"type": "http.response.start", "status": self._status, "headers": self._headers}
        if self._opened is None:
            await send(head)
            await send({"type": "http.response.body", "body": b""})
            return
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            with self._opened.data:
                await send(head)
                while self._at < self._end and not gone.done():
                    body = await self._next(self._opened)
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (StoreError, OSError) as error:
            _log.warning("an answer is cut: %s", error)  # the server ends the connection
        finally:
            gone.cancel()

    async def _next(self, opened: Opened) -> bytes:
        from starlette.concurrency import run_in_threadpool

        num_ready = min(opened.num_ready(), self._end) - self._at
        if num_ready <= 0:
            await asyncio.sleep(_TICK_S)
            return b""
        num_bytes = min(num_ready, _CHUNK)
        body = await run_in_threadpool(os.pread, opened.data.fileno(), num_bytes, self._at)
        self._at += len(body)
        return body


class _Once:
    """Runs one call at a time for each key, on a thread; those who ask meanwhile share it."""

    def __init__(self) -> None:
        self._tasks: dict[object, asyncio.Future[Any]] = {}

    async def __call__(self, key: object, call: Callable[..., T], *args: object) -> T:
        from starlette.concurrency import run_in_threadpool

        if (task := self._tasks.get(key)) is None:
            task = self._tasks[key] = asyncio.ensure_future(run_in_threadpool(call, *args))
            task.add_done_callback(lambda _: self._tasks.pop(key))
        done: T = await asyncio.shield(task)
        return done


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _range(asked: Mapping[str, str], num_bytes: int) -> tuple[int, int, dict[str, str]]:
    """Return where the answer to a request begins and ends, and its headers; any other range than
    one from a byte on is answered with the whole file.
    """
    match = _RANGE.fullmatch(asked.get("range", "")) if "if-range" not in asked else None
    start, end = 0, num_bytes
    headers = {"Accept-Ranges": "bytes"}
    if match is not None and (not match[2] or int(match[1]) <= int(match[2])):
        start, end = int(match[1]), min(num_bytes, int(match[2] or num_bytes) + 1)
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{num_bytes}"
    return start, end, {**headers, "Content-Length": str(max(0, end - start))}


def _keep_newest(folder: Path, most: int) -> None:
    """Delete all files of a folder but the ones written last."""
    paths = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for path in paths[: max(0, len(paths) - most)]:
        path.unlink(missing_ok=True)
