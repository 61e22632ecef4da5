"""Files in a bucket: Amazon S3 and what speaks its protocol, Google Cloud Storage, Azure.

`obstore` takes credentials and addresses from the environment (`AWS_ACCESS_KEY_ID`,
`AWS_ENDPOINT_URL`, `GOOGLE_SERVICE_ACCOUNT`, `AZURE_STORAGE_ACCOUNT_NAME`, ...), and tries again by
itself what a network or a server lets fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import takewhile
from typing import Any
from urllib.parse import urlsplit

from flowtrain.records import UserError
from flowtrain.utils.errors import user_error
from flowtrain.utils.text import printable
from flowtrain.weights.format.manifest import NotThere, StoreError

SCHEMES = ("s3", "gs", "az")
_REQUEST_S = 300.0
"""Longest request: a piece at 28 KiB per second."""
_MAX_RETRIES = 8
_ALLOW_HTTP = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")


class Bucket:
    """See `Objects`."""

    def __init__(self, url: str, patience_s: float = 60.0) -> None:
        """`patience_s`: seconds for which a request that fails is tried again. Nothing is asked
        yet. UserError when the URL is none of a bucket, and without a package or an account.
        """
        self.url = url.rstrip("/")
        if not urlsplit(url).netloc or set(url) & set("?#@"):
            raise UserError(
                f"{printable(url)!r} is no bucket: give s3://bucket/prefix, gs://bucket/prefix or "
                "az://container/prefix"
            )
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

    def read(self, key: str, limit: int) -> bytes:
        data = bytearray()
        with self._explained(key):
            for chunk in self._api.get(self._store, key).stream():
                data += chunk
                if len(data) > limit:
                    break
        if len(data) > limit:
            raise StoreError(f"{self.url}/{key} is longer than {limit} bytes")
        return bytes(data)

    def piece(self, key: str, start: int, stop: int, content: str, *, is_again: bool) -> bytes:
        with self._explained(key):
            return bytes(self._api.get_range(self._store, key, start=start, end=stop))

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        where = f"{self.url}/{key}"
        try:
            yield
        except FileNotFoundError as error:
            raise NotThere(
                f"{where} is not there: the version was never copied there or was collected, or "
                "the address is wrong"
            ) from error
        except (
            self._errors.PermissionDeniedError,
            self._errors.UnauthenticatedError,
            self._errors.InvalidPathError,
            self._errors.NotSupportedError,
        ) as error:
            raise UserError(f"{where}: {_line(error)}") from error
        except (self._errors.BaseError, OSError, ValueError) as error:
            raise StoreError(f"{where}: {_line(error)}") from error


def _line(error: Exception) -> str:
    """Return the library's message, without the source of the error, which an empty line parts."""
    lines = takewhile(str.strip, str(error).splitlines())
    return printable(" ".join(lines))[:400] or type(error).__name__
