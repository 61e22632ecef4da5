"""A lock on a file, which names its holder, for a single writer at a time.

The lock is a `flock`, which the system releases whenever its holder dies. Children do not get it,
so that a server which outlives its trainer holds nothing. The lock works across hosts of a shared
file system with such locks (NFS with lockd or from version 4, Lustre with -o flock, CephFS, GPFS);
other file systems are rejected.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import threading
import time
import weakref
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

from flowtrain.records import UserError
from flowtrain.utils.errors import on_failure
from flowtrain.utils.files import make_folder, writing

NAME = "lock"
"""The lock of a folder, within it."""
_PATIENCE_S = 1.0
"""Longest wait for a holder that is about to end, or about to write its name."""
_TICK_S = 0.01


class Lock:
    """The right to write, held by this process until `release`, or until it dies.

    A process may take a lock several times; it has it until all are released.
    """

    def __init__(self, path: Path, subject: str, cure: str) -> None:
        """Take the lock.

        Args:
            path: the file that is locked; made here, with its folder, and deleted on release.
            subject: what must not be written by others, for the message.
            cure: what its reader can do.

        Raises:
            UserError: "<subject> is in use by <holder>; <cure>", the file cannot be written, or
                its file system has no locks.
        """
        with writing(path):
            new_folders = make_folder(path.parent)
        self._subject, self._path = subject, path.parent.resolve() / path.name
        with _guard:
            held = _held.get(self._path)
            if held is None:
                result = _acquire(self._path)
                if isinstance(result, str):
                    raise UserError(f"{subject} is in use by {result}; {cure}")
                held = _held[self._path] = _HeldLock(self._path, result, new_folders)
        self._held: _HeldLock | None = held

    @classmethod
    def of_folder(cls, folder: Path, cure: str) -> Lock:
        """Take the lock of a folder; made where it is missing, and deleted if still empty then."""
        return cls(folder / NAME, str(folder), cure)

    @staticmethod
    def holder(folder: Path) -> str | None:
        """Return who has the lock of a folder; None: nobody has it, or its file cannot be read. For
        readers: nothing is written, and nobody is kept waiting.
        """
        with suppress(OSError), (folder / NAME).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _read_holder(file.fileno())
        return None

    def check(self) -> None:
        """Raise UserError when somebody has deleted the file, so that others may hold it too."""
        assert self._held is not None, "it was released"
        if not _is_in_place(self._path, self._held.descriptor):
            raise UserError(
                f"{self._path} was deleted, so another process may be writing {self._subject} "
                "too; this one ends"
            )

    def release(self) -> None:
        """Give the lock back; a second time, or in a forked child, nothing happens. Done for a lock
        that nobody refers to any more.
        """
        self._held = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _HeldLock:
    """A lock of this process, which it has as long as a `Lock` refers to this."""

    def __init__(self, path: Path, descriptor: int, new_folders: list[Path]) -> None:
        self.descriptor = descriptor
        self.end = weakref.finalize(self, _free, path, descriptor, new_folders)


def _free(path: Path, descriptor: int, new_folders: list[Path]) -> None:
    """Give a lock back; folders that were made for it go if they are empty."""
    # Deleted while it is locked: whoever opened it before sees that, and makes a new one.
    if _is_in_place(path, descriptor):
        path.unlink(missing_ok=True)
    os.close(descriptor)
    with suppress(OSError):
        for folder in new_folders:
            folder.rmdir()


def _close_in_child() -> None:
    """Close the locks of the parent in a forked child, which would hold them, too."""
    for held in list(_held.values()):
        held.end.detach()
        os.close(held.descriptor)
    _held.clear()


def _is_in_place(path: Path, descriptor: int) -> bool:
    """Return whether the file that is open still has its name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _acquire(path: Path) -> int | str:
    """Lock the file, and return its descriptor; or who has it where another process does not give
    it back in time.
    """
    end = time.monotonic() + _PATIENCE_S
    while True:
        with ExitStack() as cleanup:
            with writing(path):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            cleanup.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_in_place(path, descriptor):  # else its holder has deleted it just now
                    _write_holder(path, descriptor)
                    cleanup.pop_all()
                    return descriptor
            except BlockingIOError:
                if time.monotonic() > end:
                    return _read_holder(descriptor) or "another process"
            except OSError as error:
                raise UserError(
                    f"cannot lock {path}: {error.strerror}; mount its file system with lock "
                    "support, or use another one"
                ) from error
        time.sleep(_TICK_S)


def _write_holder(path: Path, descriptor: int) -> None:
    """Write the holder's name, in one piece, since others may read it at any time."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec else ""
    command = f"python {f'-m {module}' if module else Path(sys.argv[0]).name}".strip()
    since = datetime.now(UTC).isoformat(timespec="seconds")
    name = f"{command} on host {socket.gethostname()}, process {os.getpid()}, since {since}\n"
    with on_failure(path.unlink), writing(path):
        num_bytes = os.pwrite(descriptor, name.encode(), 0)
        os.ftruncate(descriptor, num_bytes)


def _read_holder(descriptor: int) -> str:
    return os.pread(descriptor, 1 << 12, 0).decode(errors="replace").partition("\n")[0]


_guard = threading.RLock()
_held: weakref.WeakValueDictionary[Path, _HeldLock] = weakref.WeakValueDictionary()
os.register_at_fork(after_in_child=_close_in_child)
