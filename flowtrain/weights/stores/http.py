"""A weight store on another machine: the layout of folder.py behind any static file server.

One request at a time needs no session, so `urllib` is enough and engines need no HTTP library.
"""

from __future__ import annotations

import logging
import re
import time
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from flowtrain.net.bodies import SLOWEST
from flowtrain.net.objects import SCHEMES, open_objects
from flowtrain.net.retries import may_pass, pause_s, retry_after_s
from flowtrain.net.serving import check_token, check_url
from flowtrain.utils.terminal import bar
from flowtrain.utils.text import printable
from flowtrain.weights.format.checksums import checksum_of
from flowtrain.weights.format.manifest import (
    MAX_MANIFEST,
    File,
    Manifest,
    NotThere,
    Silent,
    StoreError,
)
from flowtrain.weights.stores.bucket import BucketStore
from flowtrain.weights.stores.downloads import Downloads, folder_of
from flowtrain.weights.stores.folder import Source, WeightStore
from flowtrain.weights.stores.listing import MAX_BYTES, Listing
from flowtrain.weights.stores.pieces import SMALLEST, in_pieces
from flowtrain.weights.stores.timed_http import Response, TimedHttp, TimedHttps

_log = logging.getLogger(__name__)

_CHUNK = 1 << 20
_ALONE_S, _PATIENT_S = 4.0, 10.0
"""Seconds in which a connection gathers speed, at 300 ms too; then more help it with a file, if
what is missing would take it so long."""
_BIG = 64 << 20
"""Bytes from which on a download shows a progress bar."""
_LONGEST_PAUSE_S = 10.0
_IS_STORE = "is this the address of a weight store?"


_NO_CACHE = {"Cache-Control": "no-cache"}


class _Cut(Exception):
    """An answer that did not come, or not to its end: the request is tried again."""

    def __init__(self, reason: str, status: int = 0, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.status = status
        self.pause_s = pause_s
        """The least pause that the server asks for."""


class _Slow(Exception):
    """One connection takes long for what several would bring sooner."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        """Its bytes per second."""


def open_source(
    location: str | Path, cache: Path, token: str = "", *, keeps: bool = False
) -> Source:
    """Open the store at a path or URL, also of a bucket; see `Downloads`."""
    if str(location).partition("://")[0] in SCHEMES:
        return BucketStore(open_objects(str(location)), cache, keeps=keeps)
    if "://" in str(location):
        return HttpStore(str(location), cache, token, keeps=keeps)
    return WeightStore(Path(location))


class HttpStore(Downloads):
    """See `Source`."""

    def __init__(
        self,
        url: str,
        cache: Path,
        token: str = "",
        timeout_s: float = 30.0,
        retries: int = 5,
        backoff_s: float = 0.5,
        *,
        keeps: bool = False,
    ) -> None:
        """
        Args:
            url: URL of the folder that holds HEAD.
            cache, keeps: See `Downloads`.
            token: Sent as `Authorization: Bearer`, never to another address than `url`.
            timeout_s: Seconds until a silent connection counts as cut.
            retries: Failures in a row, without a MiB gained between them, before giving up.
            backoff_s: Pause after the first failure; it doubles with each further one.

        Raises:
            UserError: the URL or the token cannot be used.
        """
        super().__init__(check_url(url), cache, keeps=keeps)
        self._headers = {"Authorization": f"Bearer {check_token(token)}"} if token else {}
        self._timeout_s = timeout_s
        self._retries = retries
        self._backoff_s = backoff_s
        self._opener = build_opener(_NoRedirects, TimedHttp, TimedHttps)
        self._listing: Listing | None = None

    def head(self) -> int | None:
        url = f"{self.url}/HEAD?manifests"
        try:
            data = self._get(url, MAX_BYTES, _NO_CACHE)
        except NotThere:
            self._listing = None
            return None
        self._listing = Listing.from_text(data.decode(errors="replace"), url)
        return self._listing.head

    def manifest(self, version: int) -> Manifest:
        listing = self._listing
        if (listing is None or version > listing.head) and (
            (head := self.head()) is None or version > head
        ):
            raise NotThere(
                f"version {version} is not at {self.url}; the newest there is "
                f"{'none' if head is None else head}"
            )
        checksum = self._checksum(version)
        try:
            return self._read_manifest(version)
        except StoreError:
            if not checksum or self.head() is None or self._checksum(version) == checksum:
                raise
        return self._read_manifest(version)  # it was published again

    def _checksum(self, version: int) -> str:
        return "" if self._listing is None else self._listing.manifests.get(version, "")

    def _read_manifest(self, version: int) -> Manifest:
        """Read the manifest that the listing names, or, where it names none, the present one."""
        url, checksum = f"{self.url}/{folder_of(version)}/manifest.json", self._checksum(version)
        if not checksum:
            return Manifest.of_version(version, self._get(url, MAX_MANIFEST, _NO_CACHE), url)
        for headers in ({}, _NO_CACHE):
            data = self._get(f"{url}?xxh3={checksum}", MAX_MANIFEST, headers)
            if checksum_of(data) == checksum:
                return Manifest.of_version(version, data, url)
            _log.warning("%s came damaged: it does not have the checksum of HEAD", url)
        raise StoreError(f"{url} came damaged twice: it does not have the checksum of HEAD")

    def loaded(self, version: int) -> None:
        self._listing = None  # by the next load, versions may have been rolled back
        super().loaded(version)

    def _get(self, url: str, limit: int, headers: dict[str, str]) -> bytes:
        """Return a whole answer of at most `limit` bytes."""
        num_failures = 0
        while True:
            try:
                return self._read_all(url, limit, headers)
            except _Cut as cut:
                num_failures += 1
                self._pause(url, cut, num_failures)

    def _pause(self, url: str, cut: _Cut, num_failures: int) -> None:
        """Pause before the next try. Raises StoreError when there is none."""
        if num_failures > self._retries:
            raise Silent(
                f"{url}: {cut}, {num_failures} times; check the address and that the server runs"
            ) from cut
        own_s = pause_s(num_failures, self._backoff_s, _LONGEST_PAUSE_S)
        time.sleep(max(own_s, min(cut.pause_s, _LONGEST_PAUSE_S)))

    def _read_all(self, url: str, limit: int, headers: dict[str, str]) -> bytes:
        data = bytearray()
        with self._open(url, headers) as response:
            response.end_after(self._limit_s(limit))
            announced = response.length
            while chunk := _read(response, min(limit + 1 - len(data), _CHUNK)):
                data += chunk
                if len(data) > limit:
                    raise StoreError(f"{url} is longer than {limit} bytes; {_IS_STORE}")
        if announced is not None and len(data) < announced:
            raise _Cut(f"the connection was cut after {len(data)} of {announced} bytes")
        return bytes(data)

    def _complete(self, key: str, part: Path, file: File, is_again: bool) -> str:
        # The checksum makes it an address of these very bytes: a version that is rolled back and
        # published again has others, and a cache between may keep each for ever. What it may have
        # kept damaged has another address the second time.
        address = f"{self.url}/{key}?xxh3={file.xxh3}{'&again' if is_again else ''}"
        num_failures, may_split = 0, True
        part.touch()
        while (num_held := part.stat().st_size) < file.num_bytes:
            try:
                if damage := self._append(address, part, num_held, may_split, file.num_bytes):
                    return damage
            except _Slow as slow:
                # A server that has no ranges after all is not asked for them again.
                may_split = False
                self._append_pieces(address, part, file.num_bytes, slow.rate)
            except _Cut as cut:
                if cut.status == 416:
                    part.write_bytes(b"")
                has_gained = part.stat().st_size > num_held + _CHUNK
                num_failures = 1 if has_gained else num_failures + 1
                self._pause(f"{self.url}/{key}", cut, num_failures)
        return ""

    def _append(self, url: str, part: Path, num_held: int, may_split: bool, num_bytes: int) -> str:
        """Request the missing bytes once; a server without ranges sends the whole file, which is
        taken from the start. Returns what is wrong with the server's file, empty when nothing is.
        Raises _Slow, if it may, where that takes long and the server has ranges.
        """
        began = time.monotonic()
        with self._open(url, {"Range": f"bytes={num_held}-"} if num_held else {}) as response:
            is_range = response.status == 206
            at = num_held if is_range else 0
            content_range = response.headers.get("Content-Range", "")
            if is_range and not _is_range(content_range, at, num_bytes):
                raise _Cut("the server sent another range than it was asked for", 416)
            if response.length is not None and at + response.length != num_bytes:
                return f"the server has {at + response.length} bytes, the manifest says {num_bytes}"
            has_ranges = may_split and response.headers.get("Accept-Ranges") == "bytes"
            response.end_after(self._limit_s(num_bytes - at))
            with part.open("ab" if at else "wb") as out, _bar(part.stem, at, num_bytes) as shown:
                while at < num_bytes and (chunk := _read(response, min(num_bytes - at, _CHUNK))):
                    out.write(chunk)
                    shown.update(len(chunk))
                    at += len(chunk)
                    seconds = time.monotonic() - began
                    if has_ranges and _is_slow(at - num_held, num_bytes - at, seconds):
                        raise _Slow((at - num_held) / seconds)
            if at < num_bytes:
                raise _Cut(f"the connection was cut after {at} of {num_bytes} bytes")
            has_more = _read(response, 1)
        return f"the server has more bytes than the {num_bytes} of the manifest" if has_more else ""

    def _append_pieces(self, url: str, part: Path, num_bytes: int, rate: float) -> None:
        """Request the missing bytes over several connections, as far as the server lets them."""
        at = part.stat().st_size
        pieces = in_pieces(
            lambda start, end: self._piece(url, start, end, num_bytes), at, num_bytes, rate
        )
        with part.open("ab") as out, _bar(part.stem, at, num_bytes) as shown:
            for piece in pieces:
                out.write(piece)
                shown.update(len(piece))

    def _piece(self, url: str, start: int, end: int, num_bytes: int) -> bytes:
        """Return some bytes of a file of `num_bytes`; fewer where the server sends no ranges."""
        data = bytearray()
        num_failures = 0
        while (at := start + len(data)) < end:
            try:
                with self._open(url, {"Range": f"bytes={at}-{end - 1}"}) as response:
                    if response.status != 206:
                        return bytes(data)
                    if not _is_range(response.headers.get("Content-Range", ""), at, num_bytes):
                        raise _Cut("the server sent another range than it was asked for", 416)
                    response.end_after(self._limit_s(end - at))
                    while at < end and (chunk := _read(response, end - at)):
                        data += chunk
                        at += len(chunk)
                if at < end:
                    raise _Cut(f"the connection was cut after {at} of {num_bytes} bytes")
            except _Cut as cut:
                num_failures += 1
                self._pause(url, cut, num_failures)
        return bytes(data)

    def _open(self, url: str, headers: dict[str, str]) -> Response:
        try:
            response: Response = self._opener.open(
                Request(url, headers=self._headers | headers), timeout=self._timeout_s
            )
        except HTTPError as error:
            error.close()
            if may_pass(error.code) or error.code == 416:
                reason = f"the server answered {error.code} {error.reason}"
                asked_s = retry_after_s(error.headers.get("Retry-After", ""))
                raise _Cut(reason, error.code, asked_s) from error
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


def _is_slow(num_got: int, num_missing: int, seconds: float) -> bool:
    is_worth_it = num_missing > 2 * SMALLEST and seconds > _ALONE_S
    return is_worth_it and num_missing * seconds > _PATIENT_S * num_got


def _bar(name: str, at: int, num_bytes: int) -> Any:
    hidden = None if num_bytes >= _BIG else True  # None: hidden when stderr is no terminal
    scale: dict[str, Any] = {"unit": "B", "unit_scale": True, "leave": False, "disable": hidden}
    return bar(desc=printable(name, keep=""), initial=at, total=num_bytes, **scale)
