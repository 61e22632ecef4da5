"""A weight store on another machine: the layout of store.py behind any static file server.

A download that was cut continues, in this process or the next one. It is checked against its
manifest before it gets its name. One request at a time needs no session, so `urllib` is enough and
engines need no HTTP library.
"""

from __future__ import annotations

import io
import logging
import re
import shutil
import time
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from socket import socket
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import (
    AbstractHTTPHandler,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    Request,
    build_opener,
)

from flowtrain.utils.serving import SLOWEST, check_token, check_url
from flowtrain.utils.terminal import bar
from flowtrain.utils.text import printable
from flowtrain.weights.files import mismatch
from flowtrain.weights.manifest import File, Manifest, StoreError
from flowtrain.weights.store import Source, WeightStore

_log = logging.getLogger(__name__)

_MAX_HEAD = 64
_MAX_MANIFEST = 64 << 20
_CHUNK = 1 << 20
_BIG = 64 << 20
"""Bytes from which on a download shows a progress bar."""
_LONGEST_PAUSE_S = 10.0
_IS_STORE = "is this the address of a weight store?"


class NotThere(StoreError):
    """The server has no such file."""


class _Cut(Exception):
    """An answer that did not come, or not to its end: the request is tried again."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


def open_source(location: str | Path, cache: Path, token: str = "") -> Source:
    """Open the store at a path or URL; `cache` is a folder for downloads, of this reader alone."""
    if "://" in str(location):
        return HttpStore(str(location), cache, token)
    return WeightStore(Path(location))


class HttpStore:
    """See `Source`."""

    def __init__(
        self,
        url: str,
        cache: Path,
        token: str = "",
        timeout_s: float = 30.0,
        retries: int = 5,
        backoff_s: float = 0.5,
    ) -> None:
        """
        Args:
            url: URL of the folder that holds HEAD.
            cache: Folder for downloads of one reader; files that it has loaded are deleted.
            token: Sent as `Authorization: Bearer`, never to another address than `url`.
            timeout_s: Seconds until a silent connection counts as cut.
            retries: Failures in a row, without a MiB gained between them, before giving up.
            backoff_s: Pause after the first failure; it doubles with each further one.

        Raises:
            UserError: the URL or the token cannot be used.
        """
        self.url = check_url(url)
        self._cache = cache
        self._headers = {"Authorization": f"Bearer {check_token(token)}"} if token else {}
        self._timeout_s = timeout_s
        self._retries = retries
        self._backoff_s = backoff_s
        self._opener = build_opener(_NoRedirects, _Http, _Https)
        self._newest = -1

    def __str__(self) -> str:
        return self.url

    def head(self) -> int | None:
        url = f"{self.url}/HEAD"
        try:
            text = self._text(url, _MAX_HEAD).strip()
        except NotThere:
            return None
        if not text.isdecimal():
            raise StoreError(f"{url} holds {text[:40]!r}, not a version; {_IS_STORE}")
        self._newest = max(self._newest, int(text))
        return int(text)

    def manifest(self, version: int) -> Manifest:
        if version > self._newest and ((head := self.head()) is None or version > head):
            raise NotThere(
                f"version {version} is not at {self.url}; the newest there is "
                f"{'none' if head is None else head}"
            )
        url = f"{self.url}/{_folder(version)}/manifest.json"
        manifest = Manifest.from_json(self._text(url, _MAX_MANIFEST), url)
        if manifest.version != version:
            raise StoreError(
                f"{url} describes version {manifest.version}; the server's folders are mixed up"
            )
        return manifest

    def fetch(self, version: int, file: File) -> Path:
        path = self._cache / _folder(version) / file.name
        part = path.with_name(f"{file.name}.part")
        url = f"{self.url}/{_folder(version)}/{file.name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(part)  # checked again as if it had just come
        for _ in range(2):
            damage = self._download(url, part, file) or mismatch(part, file)
            if not damage:
                return part.replace(path)
            part.unlink(missing_ok=True)
            _log.warning("%s came damaged: %s", url, damage)
        raise StoreError(
            f"{url} came damaged twice: {damage}; the server's file is not that of its manifest, "
            "publish a full snapshot"
        )

    def loaded(self, version: int) -> None:
        for folder in self._cache.glob("v[0-9]*"):
            if folder.name[1:].isdecimal() and int(folder.name[1:]) <= version:
                shutil.rmtree(folder)

    def _text(self, url: str, limit: int) -> str:
        num_failures = 0
        while True:
            try:
                return self._read_all(url, limit).decode(errors="replace")
            except _Cut as cut:
                num_failures += 1
                self._pause(url, cut, num_failures)

    def _pause(self, url: str, cut: _Cut, num_failures: int) -> None:
        """Pause before the next try. Raises StoreError when there is none."""
        if num_failures > self._retries:
            raise StoreError(
                f"{url}: {cut}, {num_failures} times; check the address and that the server runs"
            ) from cut
        time.sleep(min(self._backoff_s * 2 ** (num_failures - 1), _LONGEST_PAUSE_S))

    def _read_all(self, url: str, limit: int) -> bytes:
        data = bytearray()
        with self._open(url, {"Cache-Control": "no-cache"}) as response:
            response.end_after(self._limit_s(limit))
            announced = response.length
            while chunk := _read(response, min(limit + 1 - len(data), _CHUNK)):
                data += chunk
                if len(data) > limit:
                    raise StoreError(f"{url} is longer than {limit} bytes; {_IS_STORE}")
        if announced is not None and len(data) < announced:
            raise _Cut(f"the connection was cut after {len(data)} of {announced} bytes")
        return bytes(data)

    def _download(self, url: str, part: Path, file: File) -> str:
        """Complete `part` to the file's size; bytes that are there stay. Returns what is wrong with
        the server's file, empty when nothing is.
        """
        # The checksum makes it an address of these very bytes: a version that is rolled back and
        # published again has others, and a cache between may keep each for ever.
        address = f"{url}?xxh3={file.xxh3}"
        num_failures = 0
        part.touch()
        while (num_held := part.stat().st_size) < file.num_bytes:
            try:
                if damage := self._append(address, part, num_held, num_bytes=file.num_bytes):
                    return damage
            except _Cut as cut:
                if cut.status == 416:
                    part.write_bytes(b"")
                has_gained = part.stat().st_size > num_held + _CHUNK
                num_failures = 1 if has_gained else num_failures + 1
                self._pause(url, cut, num_failures)
        return ""

    def _append(self, url: str, part: Path, num_held: int, num_bytes: int) -> str:
        """Request the missing bytes once; a server without ranges sends the whole file, which is
        taken from the start. Returns what is wrong with the server's file, empty when nothing is.
        """
        with self._open(url, {"Range": f"bytes={num_held}-"} if num_held else {}) as response:
            is_range = response.status == 206
            at = num_held if is_range else 0
            content_range = response.headers.get("Content-Range", "")
            if is_range and not _is_range(content_range, at, num_bytes):
                raise _Cut("the server sent another range than it was asked for", 416)
            if response.length is not None and at + response.length != num_bytes:
                return f"the server has {at + response.length} bytes, the manifest says {num_bytes}"
            response.end_after(self._limit_s(num_bytes - at))
            with part.open("ab" if at else "wb") as out, _bar(part.stem, at, num_bytes) as shown:
                while at < num_bytes and (chunk := _read(response, min(num_bytes - at, _CHUNK))):
                    out.write(chunk)
                    shown.update(len(chunk))
                    at += len(chunk)
            if at < num_bytes:
                raise _Cut(f"the connection was cut after {at} of {num_bytes} bytes")
            has_more = _read(response, 1)
        return f"the server has more bytes than the {num_bytes} of the manifest" if has_more else ""

    def _open(self, url: str, headers: dict[str, str]) -> _Response:
        try:
            response: _Response = self._opener.open(
                Request(url, headers=self._headers | headers), timeout=self._timeout_s
            )
        except HTTPError as error:
            error.close()
            if error.code in (408, 416, 429) or error.code >= 500:
                reason = f"the server answered {error.code} {error.reason}"
                raise _Cut(reason, error.code) from error
            raise _refusal(url, error, bool(self._headers)) from None
        except (OSError, HTTPException) as error:
            cause = error.reason if isinstance(error, URLError) else error
            raise _Cut(f"no answer ({cause or type(error).__name__})") from error
        if response.status not in (200, 206):
            response.close()
            raise _Cut(f"the server answered {response.status}")
        return response

    def _limit_s(self, num_bytes: int) -> float:
        return self._timeout_s + num_bytes / SLOWEST


class _Timed(io.RawIOBase):
    """Reads a socket until a deadline, however little comes at a time."""

    def __init__(self, source: io.RawIOBase, limit_s: float) -> None:
        self._source = source
        self.deadline = time.monotonic() + limit_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"the answer came slower than {SLOWEST >> 10} KiB per second")
        return self._source.readinto(buffer)

    def close(self) -> None:
        self._source.close()
        super().close()


class _Response(HTTPResponse):
    """Bounds the time of the whole answer: the timeout of a socket bounds only a single read, and
    headers, sizes of chunks and trailers may come byte by byte, or without end.
    """

    def __init__(self, sock: socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self._timed = _Timed(self.fp.detach(), sock.gettimeout() or 0.0)
        self.fp = io.BufferedReader(self._timed)

    def end_after(self, limit_s: float) -> None:
        """Set the time for the body; until then the headers have the timeout of the socket."""
        self._timed.deadline = time.monotonic() + limit_s


class _TimedHandler(AbstractHTTPHandler):
    def do_open(self, http_class: Any, req: Request, **options: Any) -> Any:
        def connect(host: str, **given: Any) -> HTTPConnection:
            connection: HTTPConnection = http_class(host, **given)
            connection.response_class = _Response
            return connection

        return super().do_open(connect, req, **options)


class _Http(_TimedHandler, HTTPHandler):
    """See `_Response`."""


class _Https(_TimedHandler, HTTPSHandler):
    """See `_Response`."""


class _NoRedirects(HTTPRedirectHandler):
    """Follows no redirect, which would take the token elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _refusal(url: str, error: HTTPError, has_token: bool) -> StoreError:
    if error.code in (401, 403):
        problem = "the server refuses the token" if has_token else "the server wants a token"
        return StoreError(
            f"{url}: {problem} ({error.code}); set FLOWTRAIN_TOKEN to that of the server"
        )
    if error.code in (404, 410):
        return NotThere(
            f"{url} is not there ({error.code}): the version was never published or was collected, "
            "or the address is wrong"
        )
    if error.code in (301, 302, 303, 307, 308):
        target = str(error.headers.get("Location", ""))[:200]
        return StoreError(
            f"{url} redirects to {target!r} ({error.code}); redirects are not followed, give the "
            "final address"
        )
    return StoreError(f"{url}: the server answered {error.code} {error.reason}; {_IS_STORE}")


def _read(response: HTTPResponse, num_bytes: int) -> bytes:
    """Read some of the next bytes; none at the end."""
    try:
        return response.read1(num_bytes)
    except (OSError, HTTPException) as error:
        raise _Cut(f"the connection was cut ({error or type(error).__name__})") from error


def _is_range(text: str, start: int, num_bytes: int) -> bool:
    """Tell whether a Content-Range begins at `start` and ends within the file."""
    found = re.fullmatch(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)", text.strip())
    return found is not None and int(found[1]) == start and int(found[2]) < num_bytes


def _folder(version: int) -> str:
    return f"v{version:08d}"


def _bar(name: str, at: int, num_bytes: int) -> Any:
    hidden = None if num_bytes >= _BIG else True  # None: hidden when stderr is no terminal
    scale: dict[str, Any] = {"unit": "B", "unit_scale": True, "leave": False, "disable": hidden}
    return bar(desc=printable(name, keep=""), initial=at, total=num_bytes, **scale)
