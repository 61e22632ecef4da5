"""A weight store on a directory: immutable versions and an atomic HEAD.

    weights/HEAD                            "12\\n": the newest complete version
    weights/v00000012/manifest.json         what the version is and how to get it; see manifest.py
    weights/v00000012/anchor-r0.safetensors the tensors, one file per rank of the trainer; only some
    versions have them weights/v00000012/delta-00000011-r0.safetensors     what changed since
    version 11; see docs/delta-format.md weights/leases/<reader>.json            a version that a
    reader still needs

A version is written beside its place and renamed into it, then HEAD is replaced: a reader sees a
whole version or none.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Protocol

from flowtrain.weights.files import check
from flowtrain.weights.manifest import File, Manifest, StoreError


class Source(Protocol):
    """Where versions can be read: a `WeightStore`, or an `HttpStore` somewhere else."""

    def head(self) -> int | None:
        """The newest complete version; None in an empty store."""

    def manifest(self, version: int) -> Manifest:
        """Raises StoreError when there is no such version."""

    def fetch(self, version: int, file: File) -> Path:
        """A local path to a file of a version, its size and checksum verified; raises StoreError."""

    def loaded(self, version: int) -> None:
        """The reader has reached `version`: what was fetched for it may go."""


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
        if not text.isdecimal():
            raise StoreError(
                f"{path} holds {text[:40]!r}, not a version; write the number of the newest folder "
                "v… into it"
            )
        return int(text)

    def versions(self) -> list[int]:
        """Versions up to HEAD, in order; a folder beyond it was never published."""
        head = self.head()
        found = (
            int(path.name[1:]) for path in self.root.glob("v[0-9]*") if path.name[1:].isdecimal()
        )
        return sorted(version for version in found if head is not None and version <= head)

    def manifest(self, version: int) -> Manifest:
        path = self.place(version) / "manifest.json"
        if version not in self.versions() or not path.exists():
            raise StoreError(
                f"version {version} is not in {self.root}; it holds {self.versions() or 'nothing'}"
            )
        manifest = Manifest.from_json(path.read_text(errors="replace"), str(path))
        if manifest.version != version:
            raise StoreError(f"{path} describes version {manifest.version}; somebody moved it")
        return manifest

    def fetch(self, version: int, file: File) -> Path:
        path = self.place(version) / file.name
        if not path.exists():
            raise StoreError(f"{path} is missing, though the manifest names it")
        check(path, file)
        return path

    def loaded(self, version: int) -> None:
        """Nothing was copied."""

    def begin(self, version: int) -> Path:
        """A folder for the files of a new version.

        Raises:
            StoreError: the version exists, or is older than HEAD: versions never change.
        """
        head = self.head()
        if head is not None and version <= head:
            raise StoreError(
                f"version {version} cannot be published in {self.root}: it is at {head}, and "
                "versions never change"
            )
        scratch = self.scratch(version)
        for left_over in (scratch, self.place(version)):
            shutil.rmtree(left_over, ignore_errors=True)
        scratch.mkdir(parents=True)
        return scratch

    def commit(self, manifest: Manifest) -> None:
        """Publish what was written since `begin`."""
        scratch = self.scratch(manifest.version)
        _write(scratch / "manifest.json", manifest.to_json())
        _sync(scratch)
        scratch.rename(self.place(manifest.version))
        _sync(self.root)
        self._set_head(manifest.version)

    def abort(self, version: int) -> None:
        """Forget what was written since `begin`."""
        shutil.rmtree(self.scratch(version), ignore_errors=True)

    def rollback(self, version: int) -> None:
        """Forget every version after `version`: a resumed run trains on from a checkpoint that is
        older than HEAD.
        """
        versions = self.versions()
        older = [v for v in versions if v <= version]
        if older:
            self._set_head(older[-1])
        else:
            (self.root / "HEAD").unlink(missing_ok=True)
        for newer in versions[len(older) :]:
            shutil.rmtree(self.place(newer))

    def garbage(self, keep: int) -> list[int]:
        """Versions that neither the newest `keep` nor a leased one needs: all before the anchor of
        the oldest of those.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}: HEAD must lead somewhere")
        versions = self.versions()
        wanted = set(versions[-keep:]) | (set(self.leases().values()) & set(versions))
        if not wanted:
            return []
        needed = self.manifest(min(wanted)).anchor
        return [version for version in versions if version < needed]

    def collect_garbage(self, keep: int) -> list[int]:
        """Delete them and say which they were."""
        garbage = self.garbage(keep)
        for version in garbage:
            shutil.rmtree(self.place(version))
        return garbage

    def lease(self, reader: str, version: int, seconds: float) -> None:
        """Keep `version` and the way from it to newer ones for a while; a reader has one lease,
        which the next call replaces.
        """
        if not reader or not all(c.isalnum() or c in "-_" for c in reader):
            raise ValueError(f"reader must be letters, digits, - or _, not {reader!r}")
        folder = self.root / "leases"
        folder.mkdir(parents=True, exist_ok=True)
        _replace(
            folder / f"{reader}.json",
            json.dumps({"version": version, "expires": time.time() + seconds}),
        )

    def leases(self) -> dict[str, int]:
        """Leases that have not run out, by reader."""
        found = {}
        for path in sorted((self.root / "leases").glob("*.json")):
            try:
                record = json.loads(path.read_text())
                version, expires = int(record["version"]), float(record["expires"])
            except (ValueError, TypeError, KeyError) as error:
                raise StoreError(
                    f"{path} is no lease ({type(error).__name__}: {error}); delete it if no reader "
                    "needs it"
                ) from error
            if expires > time.time():
                found[path.stem] = version
        return found

    def place(self, version: int) -> Path:
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
    """Names of files survive a power cut only when their folder was flushed too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
