"""Weight stores on other machines: the layout of folder.py behind any static file server with byte
ranges, or in a bucket.

Files are copied to a local folder before reading. An interrupted download resumes, in this process
or the next one, and is checked against the manifest before it gets its final name. Several pieces
of a file download in parallel, each over its own connection, because one connection to a distant
server is slow.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from flowtrain.records import UserError
from flowtrain.utils.errors import user_error
from flowtrain.utils.text import printable
from flowtrain.weights.format.manifest import (
    MAX_MANIFEST,
    File,
    Manifest,
    NotThere,
    StoreError,
    mismatch,
)
from flowtrain.weights.stores.folder import MAX_HEAD, Source, WeightStore, read_version
from flowtrain.weights.stores.http import HttpObjects

_log = logging.getLogger(__name__)

_PIECE = 8 << 20
"""Largest number of bytes per connection that a killed download loses."""
_CONNECTIONS = 4
"""Largest number of pieces in flight or in memory at a time."""
_BUCKETS = ("s3", "gs", "az")
_REQUEST_S = 300.0
"""Longest request: a piece at 28 KiB per second."""
_MAX_RETRIES = 8
_ALLOW_HTTP = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")


class Objects(Protocol):
    """Files by key, a path below `url`. Threads may share it."""

    url: str

    def read(self, key: str, limit: int) -> bytes:
        """Return a file whole. Raises StoreError: NotThere, no answer, or longer than `limit`."""

    def piece(self, key: str, start: int, stop: int, content: str, *, is_again: bool) -> bytes:
        """Return the bytes from `start` to `stop`; fewer where the file ends. `content`: checksum
        of the file, so that what lies between may keep it. `is_again`: what came before was
        damaged. Raises StoreError.
        """


def open_source(
    location: str | Path, cache: Path, token: str = "", *, keeps: bool = False
) -> Source:
    """Return the store at a path, an HTTP URL or a bucket URL; see `RemoteStore`. `token` is sent
    over HTTP. Raises UserError for an unusable URL or token.
    """
    if "://" not in str(location):
        return WeightStore(Path(location))
    is_bucket = str(location).partition("://")[0] in _BUCKETS
    objects = Bucket(str(location)) if is_bucket else HttpObjects(str(location), token)
    return RemoteStore(objects, cache, keeps=keeps)


class RemoteStore:
    """A weight store on an HTTP server or in a bucket; implements `Source`."""

    def __init__(self, objects: Objects, cache: Path, *, keeps: bool = False) -> None:
        """`cache`: folder for one reader's downloads, which `loaded` deletes unless `keeps`."""
        self._objects, self._cache, self._keeps = objects, cache, keeps
        self._newest: int | None = None

    def __str__(self) -> str:
        return self._objects.url

    def head(self) -> int | None:
        try:
            data = self._objects.read("HEAD", MAX_HEAD)
        except NotThere:
            self._newest = None
        else:
            self._newest = read_version(data, f"{self}/HEAD")
        return self._newest

    def manifest(self, version: int) -> Manifest:
        # A folder beyond HEAD was never published, or is not whole yet: HEAD moves last.
        if self._newest is None or version > self._newest:
            head = self.head()
            if head is None or version > head:
                raise NotThere(
                    f"version {version} is not at {self}; the newest there is "
                    f"{'none' if head is None else head}"
                )
        key = f"{_folder_of(version)}/manifest.json"
        return Manifest.of_version(version, self._objects.read(key, MAX_MANIFEST), f"{self}/{key}")

    def fetch(self, version: int, file: File) -> Path:
        key = f"{_folder_of(version)}/{file.name}"
        path = self._cache / key
        partial = path.with_name(f"{file.name}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(partial)  # checked again as if it had just come
        for is_again in (False, True):
            with partial.open("ab") as out:
                for piece in self._pieces(key, out.tell(), file, is_again):
                    out.write(piece)
            if not (damage := mismatch(partial, file)):
                return partial.replace(path)
            partial.unlink()
            _log.warning("%s/%s arrived damaged: %s", self, key, damage)
        raise StoreError(
            f"{self}/{key} arrived damaged twice: {damage}; it does not match its manifest: "
            "publish a full snapshot, or copy the store again"
        )

    def _pieces(self, key: str, offset: int, file: File, is_again: bool) -> Iterator[bytes]:
        """Yield the bytes of a file from `offset` on, several requests ahead and in order."""

        def get(start: int) -> bytes:
            stop = min(start + _PIECE, file.num_bytes)
            return self._objects.piece(key, start, stop, file.xxh3, is_again=is_again)

        requests: deque[Future[bytes]] = deque()
        pool = ThreadPoolExecutor(_CONNECTIONS, "pieces")
        try:
            for start in range(offset, file.num_bytes, _PIECE):
                requests.append(pool.submit(get, start))
                if len(requests) == _CONNECTIONS:
                    yield requests.popleft().result()
            while requests:
                yield requests.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def loaded(self, version: int) -> None:
        self._newest = None  # by the next load, versions may have been rolled back
        for folder in () if self._keeps else self._cache.glob("v[0-9]*"):
            if folder.name[1:].isdecimal() and int(folder.name[1:]) <= version:
                shutil.rmtree(folder)


def _folder_of(version: int) -> str:
    """Return the folder of a version, in every kind of store."""
    return f"v{version:08d}"


class Bucket:
    """Files in a bucket: Amazon S3 and what speaks its protocol, Google Cloud Storage, Azure.

    `obstore` takes credentials and addresses from the environment (`AWS_ACCESS_KEY_ID`,
    `AWS_ENDPOINT_URL`, `GOOGLE_SERVICE_ACCOUNT`, `AZURE_STORAGE_ACCOUNT_NAME`, ...), and tries
    again by itself what a network or a server lets fail.
    """

    def __init__(self, url: str, patience_s: float = 60.0) -> None:
        """`patience_s`: seconds for which a failing request is retried. The constructor sends no
        request. Raises UserError for a URL that is no bucket's, a missing package or missing
        credentials.
        """
        self.url = url.rstrip("/")
        if not urlsplit(url).netloc or set(url) & set("?#@"):
            raise UserError(
                f"{printable(url)!r} is not a bucket URL: use s3://bucket/prefix, "
                "gs://bucket/prefix or az://container/prefix"
            )
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import from_url
        except ImportError as error:
            raise UserError(
                f"{self.url}: buckets need obstore; pip install -e '.[objects]'"
            ) from error
        self._api, self._errors = obstore, exceptions
        options: Any = {
            "timeout": timedelta(seconds=_REQUEST_S),
            "connect_timeout": timedelta(seconds=min(patience_s, 10.0)),
            # Options given here take the place of those of the environment.
            "allow_http": any(os.environ.get(name, "").lower() == "true" for name in _ALLOW_HTTP),
        }
        retries: Any = {
            "max_retries": _MAX_RETRIES,
            "retry_timeout": timedelta(seconds=patience_s),
            "backoff": {"max_backoff": timedelta(seconds=min(patience_s, 10.0))},
        }
        with user_error(f"{self.url} cannot be opened", exceptions.BaseError, ValueError):
            try:
                self._store = from_url(self.url, client_options=options, retry_config=retries)
            except exceptions.BaseError as error:
                raise UserError(f"{self.url} cannot be opened: {_line(error)}") from error

    def read(self, key: str, limit: int) -> bytes:
        data = bytearray()
        with self._explain_errors(key):
            for chunk in self._api.get(self._store, key).stream():
                data += chunk
                if len(data) > limit:
                    break
        if len(data) > limit:
            raise StoreError(f"{self.url}/{key} is longer than {limit} bytes")
        return bytes(data)

    def piece(self, key: str, start: int, stop: int, content: str, *, is_again: bool) -> bytes:
        with self._explain_errors(key):
            return bytes(self._api.get_range(self._store, key, start=start, end=stop))

    @contextmanager
    def _explain_errors(self, key: str) -> Iterator[None]:
        address = f"{self.url}/{key}"
        try:
            yield
        except FileNotFoundError as error:
            raise NotThere(
                f"{address} does not exist: the version was never copied there or was deleted, or "
                "the address is wrong"
            ) from error
        except (
            self._errors.PermissionDeniedError,
            self._errors.UnauthenticatedError,
            self._errors.InvalidPathError,
            self._errors.NotSupportedError,
        ) as error:
            raise UserError(f"{address}: {_line(error)}") from error
        except (self._errors.BaseError, OSError, ValueError) as error:
            raise StoreError(f"{address}: {_line(error)}") from error


def _line(error: Exception) -> str:
    """Return the library's message, without the source of the error, which an empty line parts."""
    lines = takewhile(str.strip, str(error).splitlines())
    return printable(" ".join(lines))[:400] or type(error).__name__
