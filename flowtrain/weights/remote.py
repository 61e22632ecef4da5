"""A weight store somewhere else: the layout of store.py behind any static file server.

A download goes on where it was cut, in this process or the next, is checked against its manifest,
and only then gets its name. `urllib` is enough for that: one request at a time and no session, so
engines need no HTTP library.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from tqdm import tqdm

from flowtrain.utils.serving import check_token, check_url
from flowtrain.weights.files import check
from flowtrain.weights.manifest import File, Manifest, StoreError
from flowtrain.weights.store import Source, WeightStore

_log = logging.getLogger(__name__)

_MAX_HEAD = 64
_MAX_MANIFEST = 64 << 20
_CHUNK = 1 << 20
_SLOWEST = 64 << 10
"""Bytes per second; an answer that comes slower counts as cut, so no server can hold a reader for
ever."""
_BIG = 64 << 20
"""From so many bytes on a download shows how far it is."""
_LONGEST_PAUSE_S = 10.0


class NotThere(StoreError):
    """The server has no such file."""


class _Cut(Exception):
    """An answer that did not come, or not to its end: worth another try."""

    def __init__(self, what: str, status: int = 0) -> None:
        super().__init__(what)
        self.status = status


class _Damaged(Exception):
    """A whole answer, but not the file of the manifest."""


def open_source(location: str | Path, cache: Path, token: str = "") -> Source:
    """The store at a path, or behind a URL; `cache` is a folder for what is fetched from there, of
    this reader alone.
    """
    return (
        HttpStore(str(location), cache, token)
        if "://" in str(location)
        else WeightStore(Path(location))
    )


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
            url: Of the folder that holds HEAD.
            cache: For downloads. It belongs to one reader: what that has loaded is deleted.
            token: Goes along as `Authorization: Bearer`; never to another address than `url`.
            timeout_s: Until a silent connection counts as cut.
            retries: Failures in a row, without a MiB gained between them, before giving up.
            backoff_s: Pause after the first failure; it doubles with each.

        Raises:
            UserError: the URL or the token cannot be used.
        """
        self.url, self._cache = check_url(url), cache
        self._headers = {"Authorization": f"Bearer {check_token(token)}"} if token else {}
        self._timeout_s, self._retries, self._backoff_s = timeout_s, retries, backoff_s
        self._opener = build_opener(_NoRedirects)
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
            raise StoreError(
                f"{url} holds {text[:40]!r}, not a version; is this the address of a weight store?"
            )
        self._newest = max(self._newest, int(text))
        return int(text)

    def manifest(self, version: int) -> Manifest:
        if version > self._newest and ((head := self.head()) is None or version > head):
            raise NotThere(
                f"version {version} is not at {self.url}; the newest there is "
                f"{head if head is not None else 'none'}"
            )
        url = f"{self.url}/{_folder(version)}/manifest.json"
        manifest = Manifest.from_json(self._text(url, _MAX_MANIFEST), url)
        if manifest.version != version:
            raise StoreError(
                f"{url} describes version {manifest.version}; the folders of the server are mixed "
                "up"
            )
        return manifest

    def fetch(self, version: int, file: File) -> Path:
        path = self._cache / _folder(version) / file.name
        part, url = (
            path.with_name(f"{file.name}.part"),
            f"{self.url}/{_folder(version)}/{file.name}",
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(part)  # is checked as if it had just come
        for _ in range(2):
            try:
                self._download(url, part, file)
                _check(part, file)
                return part.replace(path)
            except _Damaged as error:
                part.unlink(missing_ok=True)
                _log.warning("%s came damaged: %s", url, error)
                damage = str(error)
        raise StoreError(
            f"{url} came damaged twice: {damage}; the file on the server is not that of its "
            "manifest, publish an anchor"
        )

    def loaded(self, version: int) -> None:
        for folder in self._cache.glob("v[0-9]*"):
            if folder.name[1:].isdecimal() and int(folder.name[1:]) <= version:
                shutil.rmtree(folder)

    def _text(self, url: str, limit: int) -> str:
        patience = _Patience(self._retries, self._backoff_s)
        while True:
            try:
                return self._read_all(url, limit).decode(errors="replace")
            except _Cut as cut:
                patience.wait(url, cut)

    def _read_all(self, url: str, limit: int) -> bytes:
        data, deadline = bytearray(), self._deadline(limit)
        with self._open(url, {"Cache-Control": "no-cache"}) as response:
            announced = response.length
            while chunk := _read(response, min(limit + 1 - len(data), _CHUNK), deadline):
                data += chunk
                if len(data) > limit:
                    raise StoreError(
                        f"{url} is longer than {limit} bytes; is this the address of a weight "
                        "store?"
                    )
        if announced is not None and len(data) < announced:
            raise _Cut(f"the connection was cut after {len(data)} of {announced} bytes")
        return bytes(data)

    def _download(self, url: str, part: Path, file: File) -> None:
        """Until `part` has as many bytes as the file; those that are there stay."""
        patience = _Patience(self._retries, self._backoff_s)
        part.touch()
        while (num_held := part.stat().st_size) < file.num_bytes:
            try:
                self._append(url, part, num_held, file.num_bytes)
            except _Cut as cut:
                if cut.status == 416:
                    part.write_bytes(b"")
                if part.stat().st_size > num_held + _CHUNK:
                    patience.restore()
                patience.wait(url, cut)

    def _append(self, url: str, part: Path, num_held: int, num_bytes: int) -> None:
        """One request for what is missing; a server that does not serve ranges sends all, and all
        is taken.
        """
        with self._open(url, {"Range": f"bytes={num_held}-"} if num_held else {}) as response:
            at = num_held if response.status == 206 else 0
            if response.status == 206 and not _is_range(
                response.headers.get("Content-Range", ""), at, num_bytes
            ):
                raise _Cut("the server sent another range than it was asked for", 416)
            if response.length is not None and at + response.length != num_bytes:
                raise _Damaged(
                    f"the server has {at + response.length} bytes, the manifest says {num_bytes}"
                )
            deadline = self._deadline(num_bytes - at)
            with part.open("ab" if at else "wb") as out, _bar(part.stem, at, num_bytes) as bar:
                while at < num_bytes and (
                    chunk := _read(response, min(num_bytes - at, _CHUNK), deadline)
                ):
                    out.write(chunk)
                    bar.update(len(chunk))
                    at += len(chunk)
            if at < num_bytes:
                raise _Cut(f"the connection was cut after {at} of {num_bytes} bytes")
            if _read(response, 1, deadline):
                raise _Damaged(f"the server has more bytes than the {num_bytes} of the manifest")

    def _open(self, url: str, headers: dict[str, str]) -> HTTPResponse:
        try:
            response: HTTPResponse = self._opener.open(
                Request(url, headers=self._headers | headers), timeout=self._timeout_s
            )
        except HTTPError as error:
            error.close()
            if error.code in (408, 416, 429) or error.code >= 500:
                raise _Cut(
                    f"the server answered {error.code} {error.reason}", error.code
                ) from error
            raise _refusal(url, error, bool(self._headers)) from None
        except (OSError, HTTPException) as error:
            raise _Cut(
                "no answer "
                f"({error.reason if isinstance(error, URLError) else error or type(error).__name__})"
            ) from error
        if response.status not in (200, 206):
            response.close()
            raise _Cut(f"the server answered {response.status}")
        return response

    def _deadline(self, num_bytes: int) -> float:
        return time.monotonic() + self._timeout_s + num_bytes / _SLOWEST


class _NoRedirects(HTTPRedirectHandler):
    """A redirect would take the token elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Patience:
    """How often a request is tried again, and after which pause."""

    def __init__(self, retries: int, backoff_s: float) -> None:
        self._retries, self._backoff_s, self._num_failures = retries, backoff_s, 0

    def wait(self, url: str, cut: _Cut) -> None:
        """Raises StoreError when it is out."""
        self._num_failures += 1
        if self._num_failures > self._retries:
            raise StoreError(
                f"{url}: {cut}, {self._num_failures} times; check the address and that the server "
                "runs"
            ) from cut
        time.sleep(min(self._backoff_s * 2 ** (self._num_failures - 1), _LONGEST_PAUSE_S))

    def restore(self) -> None:
        self._num_failures = 0


def _refusal(url: str, error: HTTPError, has_token: bool) -> StoreError:
    if error.code in (401, 403):
        what = "the server refuses the token" if has_token else "the server wants a token"
        return StoreError(
            f"{url}: {what} ({error.code}); set FLOWTRAIN_TOKEN to that of the server"
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
    return StoreError(
        f"{url}: the server answered {error.code} {error.reason}; is this the address of a weight "
        "store?"
    )


def _read(response: HTTPResponse, num_bytes: int, deadline: float) -> bytes:
    """What there is of the next bytes; none at the end."""
    try:
        data = response.read1(num_bytes)
    except (OSError, HTTPException) as error:
        raise _Cut(f"the connection was cut ({error or type(error).__name__})") from error
    if data and time.monotonic() > deadline:
        raise _Cut(f"the answer came slower than {_SLOWEST >> 10} KiB per second")
    return data


def _is_range(text: str, start: int, num_bytes: int) -> bool:
    """Whether a Content-Range begins where it was asked to, and ends within the file."""
    found = re.fullmatch(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)", text.strip())
    return found is not None and int(found[1]) == start and int(found[2]) < num_bytes


def _check(path: Path, file: File) -> None:
    try:
        check(path, file)
    except StoreError as error:
        raise _Damaged(str(error).partition(";")[0]) from error


def _folder(version: int) -> str:
    return f"v{version:08d}"


def _bar(name: str, at: int, num_bytes: int) -> Any:
    hidden = None if num_bytes >= _BIG else True  # None: when stderr is no terminal
    return tqdm(
        desc=name,
        initial=at,
        total=num_bytes,
        unit="B",
        unit_scale=True,
        leave=False,
        disable=hidden,
    )
