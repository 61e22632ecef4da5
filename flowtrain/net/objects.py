"""Objects by key, in a folder or in a bucket: Amazon S3 and what speaks its protocol, Google Cloud
Storage, Azure. Whoever reads an object finds all of it or none.

A folder needs no package. Buckets are reached through `obstore`, which takes credentials and
addresses from the environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `GOOGLE_SERVICE_ACCOUNT`,
`AZURE_STORAGE_ACCOUNT_NAME`, ...), and tries again by itself what a network or a server lets fail.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from flowtrain.types import UserError
from flowtrain.utils.errors import user_error
from flowtrain.utils.files import copy_file, make_folder, replace_file, sync
from flowtrain.utils.text import printable

SCHEMES = ("s3", "gs", "az")
_PART = re.compile(r"[A-Za-z0-9._=-]{1,255}")
_MAX_KEY = 900
"""Characters of a key; S3 allows 1024 with the prefix."""
_CHUNK = 8 << 20
"""Bytes that one request reads; also the least part of an upload in parts."""
_MAX_PARTS = 5000
_REQUEST_S = 300.0
"""Longest request: a chunk at 28 KiB per second."""
_MAX_RETRIES = 8
_ALLOW_HTTP = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")


class MissingObject(Exception):
    """There is no object with that key."""


class StoreSilent(Exception):
    """The object store did not answer, or said that it cannot now: asking again may help."""


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    key: str
    num_bytes: int
    modified_s: float
    """Seconds since 1970, on the clock of the store."""


class Objects(Protocol):
    """Keys are parts of letters, digits and `._=-` with `/` between them; no part is `.` or `..`.

    All methods raise UserError for a key that is none and for what a person can mend, such as
    missing rights, and StoreSilent for what may pass.
    """

    url: str

    def put(self, key: str, data: bytes | Path) -> None:
        """Write an object, or replace it; what was there before stays until all of it is."""

    def chunks(self, key: str, first: int, num_bytes: int) -> Iterator[bytes]:
        """Yield the bytes of an object from `first` on; they end early where the object does.
        Raises MissingObject.
        """

    def record(self, key: str) -> ObjectRecord | None:
        """Return the size and time of an object, None when there is none."""

    def list(self, prefix: str = "") -> Iterator[ObjectRecord]:
        """Yield the objects below `prefix`, whole parts of keys, in any order."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is not there counts as deleted."""


def open_objects(url: str, patience_s: float = 60.0) -> Objects:
    """Open a folder (a path or `file:///path`) or a bucket (`s3://bucket/prefix`, `gs://...`,
    `az://...`).

    `patience_s`: seconds for which a request that fails is tried again. Nothing is asked yet.
    UserError for any other URL, and when a package or an account is missing.
    """
    if "://" not in url:
        return Folder(Path(url))
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return Folder(Path(unquote(parts.path)))
    if parts.scheme not in SCHEMES or not parts.netloc or set(url) & set("?#@"):
        raise UserError(
            f"{printable(url)!r} is no object store: give a folder, file:///path, "
            "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
        )
    return Bucket(url, patience_s)


def read_object(objects: Objects, key: str, limit: int) -> bytes:
    """Read a whole object. UserError when it has more than `limit` bytes."""
    data = b"".join(objects.chunks(key, 0, limit + 1))
    if len(data) > limit:
        raise UserError(f"{objects.url}/{key} has more than {limit} bytes")
    return data


class Folder:
    """See `Objects`. What was put is on the disk."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.url = str(self._root)

    def put(self, key: str, data: bytes | Path) -> None:
        path = self._path(key)
        with self._explained(key):
            make_folder(path.parent)
            if isinstance(data, Path):
                copy_file(data, path)
            else:
                replace_file(path, data)

    def chunks(self, key: str, first: int, num_bytes: int) -> Iterator[bytes]:
        path = self._path(key)
        with self._explained(key), path.open("rb") as file:
            file.seek(first)
            while num_bytes > 0 and (chunk := file.read(min(num_bytes, _CHUNK))):
                num_bytes -= len(chunk)
                yield chunk

    def record(self, key: str) -> ObjectRecord | None:
        path = self._path(key)
        with self._explained(key):
            if not path.is_file():
                return None
            found = path.stat()
        return ObjectRecord(key, found.st_size, found.st_mtime)

    def list(self, prefix: str = "") -> Iterator[ObjectRecord]:
        """Files of a `put` that was killed are among them: they have keys of their own."""
        base = self._path(prefix) if prefix else self._root
        for folder, _, names in os.walk(base):
            for name in names:
                key = (Path(folder) / name).relative_to(self._root).as_posix()
                # It may be gone by now, or be nothing that was put here.
                if _is_key(key) and (found := self.record(key)) is not None:
                    yield found

    def delete(self, keys: Sequence[str]) -> None:
        folders = set()
        for key in keys:
            path = self._path(key)
            with self._explained(key):
                path.unlink(missing_ok=True)
                if path.parent.is_dir():
                    folders.add(path.parent)
        for folder in folders:
            with self._explained(""):
                sync(folder)

    def _path(self, key: str) -> Path:
        return self._root / _checked(self.url, key)

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        try:
            with user_error(f"{self.url}/{key}", PermissionError, NotADirectoryError):
                yield
        except FileNotFoundError as error:
            raise MissingObject(f"{self.url}/{key} is not there") from error
        except OSError as error:  # a full disk, a file server that is gone for a while
            raise StoreSilent(f"{self.url}/{key}: {error.strerror or error}") from error


class Bucket:
    """See `Objects`."""

    def __init__(self, url: str, patience_s: float) -> None:
        self.url = url.rstrip("/")
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import from_url
        except ImportError as error:
            raise UserError(
                f"{self.url}: buckets need obstore; pip install 'flowtrain[objects]'"
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

    def put(self, key: str, data: bytes | Path) -> None:
        _checked(self.url, key)
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        chunk = max(_CHUNK, -(-size // _MAX_PARTS))
        try:
            with self._explained(key):
                self._api.put(self._store, key, data, chunk_size=chunk, max_concurrency=4)
        except MissingObject as error:
            raise UserError(f"{self.url}: there is no such bucket") from error

    def chunks(self, key: str, first: int, num_bytes: int) -> Iterator[bytes]:
        """Each chunk is a request of its own, tried again by itself."""
        _checked(self.url, key)
        found = self.record(key)
        if found is None:
            raise MissingObject(f"{self.url}/{key} is not there")
        end = min(first + num_bytes, found.num_bytes)
        for start in range(first, end, _CHUNK):
            stop = min(start + _CHUNK, end)
            with self._explained(key):
                data = bytes(self._api.get_range(self._store, key, start=start, end=stop))
            yield data

    def record(self, key: str) -> ObjectRecord | None:
        _checked(self.url, key)
        try:
            with self._explained(key):
                return _record(self._api.head(self._store, key))
        except MissingObject:
            return None

    def list(self, prefix: str = "") -> Iterator[ObjectRecord]:
        if prefix:
            _checked(self.url, prefix)
        pages = iter(self._api.list(self._store, prefix or None))
        while True:
            with self._explained(prefix):
                page = next(pages, None)
            if page is None:
                return
            yield from (_record(each) for each in page if _is_key(each["path"]))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            _checked(self.url, key)
        if not keys:
            return
        try:
            with self._explained(keys[0]):
                self._api.delete(self._store, list(keys))
        except MissingObject:  # it says so of one, and may have left the others
            for key in keys:
                self._delete_one(key)

    def _delete_one(self, key: str) -> None:
        try:
            with self._explained(key):
                self._api.delete(self._store, key)
        except MissingObject:
            return

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        where = f"{self.url}/{key}"
        try:
            yield
        except FileNotFoundError as error:
            raise MissingObject(f"{where} is not there") from error
        except (
            self._errors.PermissionDeniedError,
            self._errors.UnauthenticatedError,
            self._errors.InvalidPathError,
            self._errors.NotSupportedError,
        ) as error:
            raise UserError(f"{where}: {_line(error)}") from error
        except (self._errors.BaseError, OSError, ValueError) as error:
            raise StoreSilent(f"{where}: {_line(error)}") from error


def _record(found: Any) -> ObjectRecord:
    return ObjectRecord(found["path"], found["size"], found["last_modified"].timestamp())


def _line(error: Exception) -> str:
    """Return the library's message, without the source of the error, which an empty line parts."""
    lines = takewhile(str.strip, str(error).splitlines())
    return printable(" ".join(lines))[:400] or type(error).__name__


def _checked(url: str, key: str) -> str:
    """Return a key. Raises UserError when it is none."""
    if not _is_key(key):
        raise UserError(f"{url}: {printable(key[:100])!r} is no key")
    return key


def _is_key(key: str) -> bool:
    parts = key.split("/")
    return len(key) <= _MAX_KEY and all(
        _PART.fullmatch(part) and part not in (".", "..") for part in parts
    )
