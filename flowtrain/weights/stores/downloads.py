"""Stores on other machines: their files are copied to a folder before they are read. A download
that was cut continues, in this process or the next one, and is checked against its manifest before
it gets its name.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from flowtrain.weights.format.checksums import mismatch
from flowtrain.weights.format.manifest import File, StoreError

_log = logging.getLogger(__name__)


class Downloads:
    """The half of a `Source` that fetches files."""

    def __init__(self, url: str, cache: Path, *, keeps: bool) -> None:
        """`cache`: folder for downloads of one reader; files that it has loaded are deleted, unless
        it `keeps` them.
        """
        self.url, self._cache, self._keeps = url, cache, keeps

    def __str__(self) -> str:
        return self.url

    def fetch(self, version: int, file: File) -> Path:
        key = f"{folder_of(version)}/{file.name}"
        path = self._cache / key
        part = path.with_name(f"{file.name}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(part)  # checked again as if it had just come
        for is_again in (False, True):
            damage = self._complete(key, part, file, is_again) or mismatch(part, file)
            if not damage:
                return part.replace(path)
            part.unlink(missing_ok=True)
            _log.warning("%s/%s came damaged: %s", self, key, damage)
        raise StoreError(
            f"{self}/{key} came damaged twice: {damage}; it is not the file of its manifest, "
            "publish a full snapshot, or copy the store again"
        )

    def loaded(self, version: int) -> None:
        for folder in () if self._keeps else self._cache.glob("v[0-9]*"):
            if folder.name[1:].isdecimal() and int(folder.name[1:]) <= version:
                shutil.rmtree(folder)

    def _complete(self, key: str, part: Path, file: File, is_again: bool) -> str:
        """Complete `part` to the file's size; bytes that are there stay. Returns what is wrong with
        the file of the store, empty when nothing is known to be.
        """
        raise NotImplementedError


def folder_of(version: int) -> str:
    """Return the folder of a version, in every kind of store."""
    return f"v{version:08d}"
