"""A weight store in a bucket: the layout of store.py under keys, see net/objects.py.

A download that was cut continues, and is checked against its manifest before it gets its name.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowtrain.net.objects import MissingObject, Objects, StoreSilent, read_object
from flowtrain.weights.checksums import mismatch
from flowtrain.weights.manifest import MAX_MANIFEST, File, Manifest, NotThere, StoreError

_log = logging.getLogger(__name__)

_MAX_HEAD = 64


class BucketStore:
    """See `Source`."""

    def __init__(self, objects: Objects, cache: Path, *, keeps: bool = False) -> None:
        """`cache`: folder for downloads of one reader; files that it has loaded are deleted, unless
        it `keeps` them.
        """
        self._objects, self._cache, self._keeps = objects, cache, keeps

    def __str__(self) -> str:
        return self._objects.url

    def head(self) -> int | None:
        return read_head(self._objects)

    def manifest(self, version: int) -> Manifest:
        head = self.head()
        if head is None or version > head:
            raise NotThere(
                f"version {version} is not at {self}; the newest there is "
                f"{'none' if head is None else head}"
            )
        key = f"{folder_of(version)}/manifest.json"
        with _explained():
            text = read_object(self._objects, key, MAX_MANIFEST).decode(errors="replace")
        manifest = Manifest.from_json(text, f"{self}/{key}")
        if manifest.version != version:
            raise StoreError(f"{self}/{key} describes version {manifest.version}; it was moved")
        return manifest

    def fetch(self, version: int, file: File) -> Path:
        key = f"{folder_of(version)}/{file.name}"
        path = self._cache / key
        part = path.with_name(f"{file.name}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(part)  # checked again as if it had just come
        for _ in range(2):
            with _explained(), part.open("ab") as out:
                held = out.tell()
                for chunk in self._objects.chunks(key, held, file.num_bytes - held):
                    out.write(chunk)
            if not (damage := mismatch(part, file)):
                return part.replace(path)
            part.unlink()
            _log.warning("%s/%s came damaged: %s", self, key, damage)
        raise StoreError(
            f"{self}/{key} came damaged twice: {damage}; it is not the file of its manifest, "
            "mirror the store again"
        )

    def loaded(self, version: int) -> None:
        for folder in () if self._keeps else self._cache.glob("v[0-9]*"):
            if folder.name[1:].isdecimal() and int(folder.name[1:]) <= version:
                shutil.rmtree(folder)


def read_head(objects: Objects) -> int | None:
    """Return the newest version of a store in a bucket; None in an empty one."""
    try:
        with _explained():
            text = read_object(objects, "HEAD", _MAX_HEAD).decode(errors="replace").strip()
    except NotThere:
        return None
    if not text.isdecimal():
        raise StoreError(
            f"{objects.url}/HEAD holds {text!r}, not a version; is this a weight store?"
        )
    return int(text)


def folder_of(version: int) -> str:
    """The first part of the keys of a version."""
    return f"v{version:08d}"


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except MissingObject as error:
        raise NotThere(
            f"{error}: the version was never mirrored or was collected, or the address is wrong"
        ) from error
    except StoreSilent as error:
        raise StoreError(str(error)) from error
