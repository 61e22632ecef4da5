"""Files and folders that survive a power cut.

Written data may be lost or read as zeros until its file is synced; a name, until its folder is. So
what something else takes the place of goes after that is on the disk.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from flowtrain.records import UserError

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write to `path` into a UserError of one line."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in _FULL_DISK
        cure = (
            "free some space and continue with --resume auto"
            if is_full
            else "check that its folder exists and is writable"
        )
        raise UserError(f"cannot write {path}: {error.strerror or error}; {cure}") from error


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def share(path: Path) -> None:
    """Let everybody read a file who may enter its folder; safetensors allows its owner alone."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def sync_tree(folder: Path) -> None:
    """Flush all files of a folder and their names, those of folders in it too."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and its parents where they are missing, and flush their names; returns what was
    made, `folder` first.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)  # which holds its name
    return missing


def replace_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace the file at `path`: a reader, or a crash at any time, finds the old content or the
    new, never a part. The new one is on the disk when this returns. `mode`: who may read and write
    it, less what the process never allows.
    """
    with _replacing(path, mode) as file:
        file.write(data)


@contextmanager
def _replacing(path: Path, mode: int) -> Iterator[BinaryIO]:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        temporary.touch(mode, exist_ok=False)  # so the umask counts, as it does for other files
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)  # after its bytes are on the disk, or a crash could empty it
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def put_folder(scratch: Path, target: Path) -> None:
    """Rename a folder, of which all is on the disk, to a place beside it; what is there goes.

    Between the two the folder has the name of `scratch`, and no other.
    """
    if target.exists():
        sync(target.parent)  # the name of `scratch` first: one of the two is always there
        remove(target)
    scratch.rename(target)
    sync(target.parent)


def remove(path: Path) -> None:
    """Delete a file, or a folder with all that is in it; does nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
