"""A weight store on a directory: immutable versions and an atomic HEAD.

    weights/HEAD                                          "12\\n": the newest complete version
    weights/v00000012/manifest.json                       see manifest.py
    weights/v00000012/delta-00000011-r0.safetensors       what changed since version 11
    weights/v00000012/anchor-r0.safetensors               a full snapshot; only some versions

Each rank r of the trainer writes files of its own. A version is written in a folder beside its own
and renamed, then HEAD is replaced: a reader sees a whole version or none.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Protocol

from flowtrain.weights.files import check
from flowtrain.weights.manifest import File, Manifest, StoreError

_VERSION = re.compile("[0-9]{1,18}")


class Source(Protocol):
    """A store to read from: a `WeightStore`, or an `HttpStore` on another machine."""

    def head(self) -> int | None:
        """Return the newest complete version; None in an empty store."""

    def manifest(self, version: int) -> Manifest:
        """Read a manifest. Raises StoreError when there is no such version."""

    def fetch(self, version: int, file: File) -> Path:
        """Return a local path to a file, its size and checksum verified. Raises StoreError."""

    def loaded(self, version: int) -> None:
        """Drop cached files: the reader has reached `version`."""


class WeightStore:
    """Versions on a local or shared file system; publishers write through `begin` and `commit`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def head(self) -> int | None:
        path = self.root / "HEAD"
        if not path.exists():
            return None
        text = path.read_text(errors="replace").strip()
        if not _VERSION.fullmatch(text):
            raise StoreError(
                f"{path} holds {text[:40]!r}, not a version; write the number of the newest folder "
                "v… into it"
            )
        return int(text)

    def versions(self) -> list[int]:
        """List the versions up to HEAD, in order; a folder beyond HEAD was never published."""
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
        manifest = Manifest.from_json(path.read_text(errors="replace"), str(path))
        if manifest.version != version:
            raise StoreError(f"{path} describes version {manifest.version}; it was moved")
        return manifest

    def fetch(self, version: int, file: File) -> Path:
        path = self.folder(version) / file.name
        if not path.exists():
            raise StoreError(f"{path} is missing, though the manifest names it")
        check(path, file)
        return path

    def loaded(self, version: int) -> None:
        """Do nothing: no file was copied."""

    def begin(self, version: int) -> Path:
        """Make the folder that the files of a new version are written into.

        Raises:
            StoreError: the version is not newer than HEAD: versions never change.
        """
        head = self.head()
        if head is not None and version <= head:
            raise StoreError(
                f"version {version} cannot be published in {self.root}: it is at {head}, and "
                "versions never change"
            )
        scratch = self.scratch(version)
        for left_over in (scratch, self.folder(version)):
            shutil.rmtree(left_over, ignore_errors=True)
        scratch.mkdir(parents=True)
        return scratch

    def commit(self, manifest: Manifest) -> None:
        """Publish the files that were written since `begin`."""
        scratch = self.scratch(manifest.version)
        _write(scratch / "manifest.json", manifest.to_json())
        _sync(scratch)
        scratch.rename(self.folder(manifest.version))
        _sync(self.root)
        self._set_head(manifest.version)

    def abort(self, version: int) -> None:
        """Delete the files that were written since `begin`."""
        shutil.rmtree(self.scratch(version), ignore_errors=True)

    def rollback(self, version: int) -> None:
        """Delete every version after `version`, because a run resumes from an older checkpoint."""
        versions = self.versions()
        older = [v for v in versions if v <= version]
        if older:
            self._set_head(older[-1])
        else:
            (self.root / "HEAD").unlink(missing_ok=True)
        for newer in versions[len(older) :]:
            shutil.rmtree(self.folder(newer))

    def garbage(self, keep: int) -> list[int]:
        """List the versions that the newest `keep` do not need: all before the full snapshot from
        which the oldest of these is reached.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}: HEAD must lead to a version")
        versions = self.versions()
        if not versions:
            return []
        snapshot = self.manifest(versions[-keep:][0]).snapshot
        return [version for version in versions if version < snapshot]

    def collect_garbage(self, keep: int) -> list[int]:
        """Delete the versions that `garbage` lists, and return them."""
        garbage = self.garbage(keep)
        for version in garbage:
            shutil.rmtree(self.folder(version))
        return garbage

    def folder(self, version: int) -> Path:
        return self.root / f"v{version:08d}"

    def scratch(self, version: int) -> Path:
        return self.root / f"v{version:08d}.writing"

    def _set_head(self, version: int) -> None:
        _replace(self.root / "HEAD", f"{version}\n")
        _sync(self.root)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _replace(path: Path, text: str) -> None:
    scratch = path.with_name(f"{path.name}.writing")
    _write(scratch, text)
    scratch.replace(path)


def _sync(folder: Path) -> None:
    """Flush a folder, or the names of its files would not survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
