"""A weight store on a directory: immutable versions and an atomic HEAD.

    weights/HEAD                                          "12\\n": the newest complete version
    weights/v00000012/manifest.json                       see format/manifest.py
    weights/v00000012/delta-00000011-r0.safetensors       what changed since version 11
    weights/v00000012/anchor-r0.safetensors               a full snapshot; only some versions

Each rank r of the trainer writes files of its own. A version is written in a folder beside its own
and renamed, then HEAD is replaced: a reader sees a whole version or none.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from flowtrain.utils.files import make_folder, put_folder, remove, replace_file, sync
from flowtrain.utils.lock import Lock
from flowtrain.weights.format.manifest import (
    MAX_MANIFEST,
    File,
    Manifest,
    StoreError,
    check,
    read_whole,
)

MAX_HEAD = 64
"""Longest HEAD in bytes."""
_VERSION = re.compile("[0-9]{1,18}")


class Source(Protocol):
    """The read interface of a store: a `WeightStore`, or a `RemoteStore` on another machine."""

    def head(self) -> int | None:
        """Return the newest complete version; None in an empty store."""

    def manifest(self, version: int) -> Manifest:
        """Return the manifest of a version. Raises StoreError if the store lacks the version."""

    def fetch(self, version: int, file: File) -> Path:
        """Return a local path to a file of a version, after verifying its size and checksum. Raises
        StoreError for a missing or damaged file.
        """

    def loaded(self, version: int) -> None:
        """Delete cached files that a reader at `version` no longer needs."""


class WeightStore:
    """A weight store on a local or shared file system. Publishers use `begin` and `commit`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def head(self) -> int | None:
        path = self.root / "HEAD"
        if not path.exists():
            return None
        return read_version(read_whole(path, MAX_HEAD), str(path))

    def versions(self) -> list[int]:
        """Return the versions up to HEAD in order; folders beyond HEAD are unpublished."""
        head = self.head()
        names = [path.name[1:] for path in self.root.glob("v[0-9]*")]
        versions = [int(name) for name in names if _VERSION.fullmatch(name)]
        return sorted(version for version in versions if head is not None and version <= head)

    def manifest(self, version: int) -> Manifest:
        path = self.folder(version) / "manifest.json"
        versions = self.versions()
        if version not in versions or not path.exists():
            raise StoreError(
                f"version {version} is not in {self.root}; it holds {versions or 'nothing'}"
            )
        return Manifest.of_version(version, read_whole(path, MAX_MANIFEST), str(path))

    def fetch(self, version: int, file: File) -> Path:
        path = self.folder(version) / file.name
        if not path.exists():
            raise StoreError(f"{path} is missing, though the manifest names it")
        check(path, file)
        return path

    def loaded(self, version: int) -> None:
        """Do nothing, because a local store copies no files."""

    def begin(self, version: int) -> Path:
        """Create and return the folder for the files of a new version.

        Raises:
            StoreError: the version is not newer than HEAD, because versions never change.
        """
        if not _VERSION.fullmatch(str(version)):
            raise StoreError(f"version {version!r} is not a whole number from 0 to {10**18 - 1}")
        head = self.head()
        if head is not None and version <= head:
            raise StoreError(
                f"version {version} cannot be published in {self.root}: it is at {head}, and "
                "versions never change"
            )
        for path in self.root.glob("v[0-9]*"):
            number, dot, suffix = path.name[1:].partition(".")
            is_ahead = number.isdecimal() and (head is None or int(number) > head)
            if suffix == "writing" or (is_ahead and not dot):
                remove(path)  # of a publish or a rollback that was cut short
        make_folder(self.root)
        scratch = self.scratch(version)
        scratch.mkdir()
        return scratch

    def commit(self, manifest: Manifest) -> None:
        """Publish the files written since `begin`. Raises StoreError for too long a manifest."""
        scratch, text = self.scratch(manifest.version), manifest.to_json().encode()
        if len(text) > MAX_MANIFEST:
            raise StoreError(
                f"the manifest of version {manifest.version} has {len(text)} bytes, "
                f"and may have {MAX_MANIFEST}: shorten the names of the tensors"
            )
        replace_file(scratch / "manifest.json", text)
        put_folder(scratch, self.folder(manifest.version))
        self._set_head(manifest.version)

    def abort(self, version: int) -> None:
        """Delete the files written since `begin`."""
        with suppress(OSError):  # the error that led here matters more
            remove(self.scratch(version))

    def rollback(self, version: int) -> None:
        """Delete every version after `version`, because a run resumes from an older checkpoint."""
        if self.head() is None:
            return
        with self.claim():
            versions = self.versions()
            older = [v for v in versions if v <= version]
            # HEAD moves first: what a rollback that is cut short leaves beyond it, nobody reads.
            if not older:
                (self.root / "HEAD").unlink()
                sync(self.root)
            elif older != versions:
                self._set_head(older[-1])
            for newer in versions[len(older) :]:
                remove(self.folder(newer))

    def garbage(self, keep: int, keep_s: float = 0.0) -> list[int]:
        """Return the versions that the newest `keep` versions do not need: all before the full
        snapshot that the oldest of the kept versions starts from. If that snapshot is younger than
        `keep_s` seconds, the previous snapshot stays too, because readers may still be loading it.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}: HEAD must lead to a version")
        versions = self.versions()
        if not versions:
            return []
        snapshot = self.manifest(versions[-keep:][0]).snapshot
        age_s = time.time() - (self.folder(snapshot) / "manifest.json").stat().st_mtime
        if age_s < keep_s and versions[0] < snapshot:
            before = max(version for version in versions if version < snapshot)
            snapshot = self.manifest(before).snapshot
        return [version for version in versions if version < snapshot]

    def collect_garbage(self, keep: int, keep_s: float = 0.0) -> list[int]:
        """Delete the versions that `garbage` returns, and return them."""
        with self.claim():
            garbage = self.garbage(keep, keep_s)
            for version in garbage:
                remove(self.folder(version))
        return garbage

    def claim(self) -> Lock:
        """Acquire the writers' lock, for publishing, rolling back and collecting garbage. Readers
        need no lock. Raises UserError if another process holds the lock.
        """
        return Lock.of_folder(self.root, "end it, or use another store")

    def folder(self, version: int) -> Path:
        return self.root / f"v{version:08d}"

    def scratch(self, version: int) -> Path:
        return self.root / f"v{version:08d}.writing"

    def _set_head(self, version: int) -> None:
        replace_file(self.root / "HEAD", f"{version}\n".encode())


def read_version(data: bytes, path: str) -> int:
    """Return the version in the text of HEAD. Raises StoreError, which names `path`."""
    text = data.decode(errors="replace").strip()
    if not _VERSION.fullmatch(text):
        raise StoreError(
            f"{path} holds {text[:40]!r}, not a version; is this a weight store? HEAD holds the "
            "number of the newest folder v…"
        )
    return int(text)
