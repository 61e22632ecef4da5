"""Files behind any static file server.

Requests need no session, so `urllib` is enough. No redirect is followed: nobody but the server that
was meant sees the token.
"""

from __future__ import annotations

import io
import re
import time
from http.client import HTTPConnection, HTTPException, HTTPResponse
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

from flowtrain.utils.net.bodies import SLOWEST
from flowtrain.utils.net.retries import may_pass, pause_s, retry_after_s
from flowtrain.utils.net.serving import check_token, check_url
from flowtrain.weights.format.manifest import NotThere, StoreError

_CHUNK = 1 << 20
_LONGEST_PAUSE_S = 10.0
_IS_STORE = "is this the address of a weight store?"


class _Cut(Exception):
    """A missing or incomplete answer; the request is retried."""

    def __init__(self, reason: str, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s
        """Shortest pause in seconds that the server asks for."""


class _PastTheEnd(Exception):
    """The requested range lies beyond the end of the file."""


class HttpObjects:
    """See `Objects`."""

    def __init__(
        self,
        url: str,
        token: str = "",
        timeout_s: float = 30.0,
        retries: int = 5,
        backoff_s: float = 0.5,
    ) -> None:
        """
        Args:
            url: URL of the folder that holds HEAD.
            token: Sent as `Authorization: Bearer`, never to another address than `url`.
            timeout_s: Seconds until a silent connection counts as cut.
            retries: Failures in a row, without a MiB gained between them, before giving up.
            backoff_s: Pause after the first failure; it doubles with each further one.

        Raises:
            UserError: the URL or the token cannot be used.
        """
        self.url = check_url(url)
        self._headers = {"Authorization": f"Bearer {check_token(token)}"} if token else {}
        self._timeout_s = timeout_s
        self._retries = retries
        self._backoff_s = backoff_s
        self._opener = build_opener(_NoRedirects, _TimedHttp, _TimedHttps)

    def read(self, key: str, limit: int) -> bytes:
        url = f"{self.url}/{key}"
        num_failures = 0
        while True:
            try:
                return self._read_all(url, limit)
            except _Cut as cut:
                num_failures += 1
                self._pause(url, cut, num_failures)

    def piece(self, key: str, start: int, stop: int, content: str, *, is_again: bool) -> bytes:
        # The checksum makes it an address of these very bytes: a version that is rolled back and
        # published again has others, and a cache between may keep each for ever. What it may have
        # kept damaged has another address the second time.
        url = f"{self.url}/{key}?xxh3={content}{'&again' if is_again else ''}"
        data = bytearray()
        num_failures = 0
        while (num_before := len(data)) < stop - start:
            try:
                self._append(data, url, start, stop)
                break
            except _Cut as cut:
                # What arrives between two failures shows that the link works: start counting anew.
                has_gained = len(data) > num_before + _CHUNK
                num_failures = 1 if has_gained else num_failures + 1
                self._pause(f"{self.url}/{key}", cut, num_failures)
        return bytes(data)

    def _pause(self, url: str, cut: _Cut, num_failures: int) -> None:
        """Pause before the next attempt. Raises StoreError when no attempt is left."""
        if num_failures > self._retries:
            raise StoreError(
                f"{url}: {cut}, {num_failures} times; check the address and that the server runs"
            ) from cut
        backoff_s = pause_s(num_failures, self._backoff_s, _LONGEST_PAUSE_S)
        time.sleep(max(backoff_s, min(cut.pause_s, _LONGEST_PAUSE_S)))

    def _read_all(self, url: str, limit: int) -> bytes:
        data = bytearray()
        with self._open(url, {"Cache-Control": "no-cache"}) as response:
            response.end_after(self._limit_s(limit))
            announced = response.length
            # One byte more than the limit tells a file that is too long from one that just fits.
            while chunk := _read(response, min(limit + 1 - len(data), _CHUNK)):
                data += chunk
                if len(data) > limit:
                    raise StoreError(f"{url} is longer than {limit} bytes; {_IS_STORE}")
        if announced is not None and len(data) < announced:
            raise _Cut(f"the connection was cut after {len(data)} of {announced} bytes")
        return bytes(data)

    def _append(self, data: bytearray, url: str, start: int, stop: int) -> None:
        """Request the missing bytes of a piece once, and append the received ones."""
        # `first` is where this answer begins in the file, `position` how far it has come.
        first = position = start + len(data)
        try:
            response = self._open(url, {"Range": f"bytes={position}-{stop - 1}"})
        except _PastTheEnd:
            return  # the file ends before: its checksum will differ
        with response:
            is_range = response.status == 206
            if not is_range:  # the file from its first byte
                if start:
                    raise StoreError(f"{url}: the server sends no parts of files (byte ranges)")
                data.clear()
                first = position = 0
            elif not _is_range(response.headers.get("Content-Range", ""), position):
                raise _Cut("the server sent another range than it was asked for")
            announced = response.length
            response.end_after(self._limit_s(stop - position))
            while position < stop and (chunk := _read(response, min(stop - position, _CHUNK))):
                data += chunk
                position += len(chunk)
        if position < stop and (announced is None or position - first < announced):
            raise _Cut(f"the connection was cut after {position} bytes")

    def _open(self, url: str, headers: dict[str, str]) -> _TimedResponse:
        try:
            response: _TimedResponse = self._opener.open(
                Request(url, headers=self._headers | headers), timeout=self._timeout_s
            )
        except HTTPError as error:
            error.close()
            if error.code == 416 and "Range" in headers:
                raise _PastTheEnd from None
            if may_pass(error.code):
                reason = f"the server answered {error.code} {error.reason}"
                least_s = retry_after_s(error.headers.get("Retry-After", ""))
                raise _Cut(reason, least_s) from error
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
    """Follows no redirect, because a redirect could send the token to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _refusal(url: str, error: HTTPError, has_token: bool) -> StoreError:
    if error.code in (401, 403):
        problem = "the server refuses the token" if has_token else "the server requires a token"
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
    """Return some of the next bytes; none at the end."""
    try:
        return response.read1(num_bytes)
    except (OSError, HTTPException) as error:
        raise _Cut(f"the connection was cut ({error or type(error).__name__})") from error


def _is_range(text: str, start: int) -> bool:
    """Return whether a Content-Range begins at `start`."""
    match = re.fullmatch(r"bytes ([0-9]{1,18})-[0-9]{1,18}/(?:[0-9]{1,18}|\*)", text.strip())
    return match is not None and int(match[1]) == start


# ---- answers that have a time limit as a whole


class _TimedSocket(io.RawIOBase):
    """Reads a socket until a deadline, however little comes at a time."""

    def __init__(self, source: io.RawIOBase, limit_s: float) -> None:
        self._source = source
        self.deadline = time.monotonic() + limit_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"the answer arrived at less than {SLOWEST >> 10} KiB per second")
        return self._source.readinto(buffer)

    def close(self) -> None:
        self._source.close()
        super().close()


class _TimedResponse(HTTPResponse):
    """Bounds the time of the whole answer: the timeout of a socket bounds only a single read, and
    headers, sizes of chunks and trailers may come byte by byte, or without end.
    """

    def __init__(self, sock: socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self._timed = _TimedSocket(self.fp.detach(), sock.gettimeout() or 0.0)
        self.fp = io.BufferedReader(self._timed)

    def end_after(self, limit_s: float) -> None:
        """Set the time for the body; until then the headers have the timeout of the socket."""
        self._timed.deadline = time.monotonic() + limit_s


class _Handler(AbstractHTTPHandler):
    def do_open(self, http_class: Any, req: Request, **options: Any) -> Any:
        def connect(host: str, **arguments: Any) -> HTTPConnection:
            connection: HTTPConnection = http_class(host, **arguments)
            connection.response_class = _TimedResponse
            return connection

        return super().do_open(connect, req, **options)


class _TimedHttp(_Handler, HTTPHandler):
    """Its answers are a `_TimedResponse`."""


class _TimedHttps(_Handler, HTTPSHandler):
    """Its answers are a `_TimedResponse`."""
