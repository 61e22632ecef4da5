"""A weight store on a directory: immutable versions and an atomic HEAD.

    weights/HEAD                       "12\\n": the newest complete version
    weights/v00000012/weights.safetensors
    weights/v00000012/manifest.json    {"version": 12, "num_bytes": ..., "tensors": {name: {"dtype", "shape"}}}

A version is written beside its place and renamed into it, then HEAD is replaced: a reader sees a whole version or none.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowtrain.types import UserError


class WeightStore:
    """Publish and pull whole models by version number."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def head(self) -> int | None:
        """The newest complete version; None in an empty store."""
        path = self.root / "HEAD"
        return int(path.read_text()) if path.exists() else None

    def versions(self) -> list[int]:
        """Versions that can be pulled, in order."""
        return sorted(int(path.name[1:]) for path in self.root.glob("v[0-9]*") if path.suffix == "")

    def publish(self, weights: Mapping[str, Tensor], version: int) -> int:
        """Write `weights` as `version` and move HEAD there. Returns the bytes written.

        Raises:
            ValueError: the version exists: versions never change.
            OSError, SafetensorError: the disk is full or read-only; HEAD stays where it was.
        """
        place = self._place(version)
        if place.exists():
            raise ValueError(f"version {version} is already in {self.root}; a version never changes")
        scratch = place.with_suffix(".writing")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            num_bytes = _write_version(scratch, weights, version)
            scratch.rename(place)
        except (OSError, SafetensorError):  # safetensors has its own error for a full disk
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        self._set_head(version)
        return num_bytes

    def pull(self, version: int) -> dict[str, Tensor]:
        """The weights of `version` on the CPU."""
        path = self._place(version) / "weights.safetensors"
        if not path.exists():
            raise UserError(f"version {version} is not in {self.root}; it holds {self.versions() or 'nothing'}")
        return load_file(path)

    def rollback(self, version: int) -> None:
        """Forget every version after `version`: a resumed run trains on from a checkpoint that is older than HEAD."""
        versions = self.versions()
        older = [v for v in versions if v <= version]
        if older:
            self._set_head(older[-1])
        else:
            (self.root / "HEAD").unlink(missing_ok=True)
        for newer in versions[len(older) :]:
            shutil.rmtree(self._place(newer))

    def collect_garbage(self, keep: int) -> None:
        """Delete all but the newest `keep` versions."""
        for version in self.versions()[:-keep]:
            shutil.rmtree(self._place(version))

    def _place(self, version: int) -> Path:
        return self.root / f"v{version:08d}"

    def _set_head(self, version: int) -> None:
        scratch = self.root / "HEAD.writing"
        with scratch.open("w") as file:
            file.write(f"{version}\n")
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self.root / "HEAD")


def _write_version(place: Path, weights: Mapping[str, Tensor], version: int) -> int:
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, place / "weights.safetensors", metadata={"format": "pt"})
    num_bytes = (place / "weights.safetensors").stat().st_size
    tensors = {name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)} for name, t in weights.items()}
    (place / "manifest.json").write_text(json.dumps({"version": version, "num_bytes": num_bytes, "tensors": tensors}))
    return num_bytes
