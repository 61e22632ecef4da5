"""A weight store in a bucket: the layout of folder.py under keys, see net/objects.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowtrain.net.objects import MissingObject, Objects, StoreSilent, read_object
from flowtrain.weights.format.manifest import MAX_MANIFEST, File, Manifest, NotThere, StoreError
from flowtrain.weights.stores.downloads import Downloads, folder_of

_MAX_HEAD = 64


class BucketStore(Downloads):
    """See `Source`."""

    def __init__(self, objects: Objects, cache: Path, *, keeps: bool = False) -> None:
        super().__init__(objects.url, cache, keeps=keeps)
        self._objects = objects

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
            data = read_object(self._objects, key, MAX_MANIFEST)
        return Manifest.of_version(version, data, f"{self}/{key}")

    def _complete(self, key: str, part: Path, file: File, is_again: bool) -> str:
        with _explained(), part.open("ab") as out:
            held = out.tell()
            for chunk in self._objects.chunks(key, held, file.num_bytes - held):
                out.write(chunk)
        return ""


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


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except MissingObject as error:
        raise NotThere(
            f"{error}: the version was never copied there or was collected, or the address is wrong"
        ) from error
    except StoreSilent as error:
        raise StoreError(str(error)) from error
