"""One writer at a time: a lock on a file, with the name of its holder in it.

It is a record lock of POSIX (`fcntl`). The system releases it when its holder dies, however that
happens, and forked children do not get it, so that a server which outlives its trainer holds
nothing. It holds between the hosts of a shared file system that has such locks (NFS with lockd or
from version 4, Lustre with -o flock, CephFS, GPFS); where there are none it is refused.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from flowtrain.types import UserError
from flowtrain.utils.files import make_folder, writing

NAME = "lock"
"""The lock of a folder, within it."""
_PATIENCE_S = 1.0
"""Longest wait for a holder that is about to end, or about to write its name."""
_TICK_S = 0.01
_TAKEN = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_WHOLE_FILE = "hhqqi0q"
"""The C struct `flock`: type, whence, start, length, process."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a lock."""

    command: str
    host: str
    pid: int
    since: str
    """Time at which it took the lock."""

    @classmethod
    def here(cls) -> Holder:
        """Describe this process."""
        spec = sys.modules["__main__"].__spec__
        module = spec.name.removesuffix(".__main__") if spec else ""
        command = f"python {f'-m {module}' if module else Path(sys.argv[0]).name}".strip()
        since = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(command, socket.gethostname(), os.getpid(), since)

    def __str__(self) -> str:
        return f"{self.command} on host {self.host}, process {self.pid}, since {self.since}"


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
            made = make_folder(path.parent)
        self._subject = subject
        self._path = path.parent.resolve() / path.name
        with _guard:
            held = _held.get(self._path)
            if held is None:
                taken = _take(self._path)
                if not isinstance(taken, _Held):
                    raise UserError(f"{subject} is in use by {taken}; {cure}")
                held = _held[self._path] = taken
            held.count += 1
        self._release = weakref.finalize(self, _release, self._path, os.getpid(), made)

    @classmethod
    def of_folder(cls, folder: Path, cure: str) -> Lock:
        """Take the lock of a folder; made where it is missing, and deleted if still empty then."""
        return cls(folder / NAME, str(folder), cure)

    @staticmethod
    def holder(folder: Path) -> Holder | None:
        """Return the process that has the lock of a folder; None: nobody has it, or its file cannot
        be read. For readers: nothing is locked or written.
        """
        path = folder.resolve() / NAME
        if path in _held:  # closing the file here would release it
            return Holder.here()
        with suppress(OSError), path.open("rb") as file:
            asked = struct.pack(_WHOLE_FILE, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_ = struct.unpack(_WHOLE_FILE, fcntl.fcntl(file, fcntl.F_GETLK, asked))
            if kind != fcntl.F_UNLCK:
                return _parse(file.read())
        return None

    def check(self) -> None:
        """Raise UserError when somebody has deleted the file, so that others may hold it too."""
        if not _held[self._path].is_in_place:
            raise UserError(
                f"{self._path} was deleted, so that another process may write {self._subject} too; "
                "this one ends"
            )

    def release(self) -> None:
        """Give the lock back; a second time, or in a forked child, nothing happens. Done for a lock
        that nobody refers to any more.
        """
        self._release()

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def _release(path: Path, pid: int, made: list[Path]) -> None:
    """Release a lock that the process `pid` took; folders that it made go if they are empty."""
    if os.getpid() != pid:
        return
    with _guard:
        held = _held[path]
        held.count -= 1
        if held.count:
            return
        del _held[path]
        held.free()
    with suppress(OSError):
        for folder in made:
            folder.rmdir()


@dataclass(slots=True)
class _Held:
    """A lock of this process. Closing its file elsewhere in the process would release it, so a path
    in `_held` is opened once.
    """

    path: Path
    descriptor: int
    count: int = 0

    def sign(self) -> None:
        """Write the holder's name, in one piece, since others may read it at any time."""
        data = json.dumps(asdict(Holder.here())).encode().ljust(512) + b"\n"
        try:
            with writing(self.path):
                os.pwrite(self.descriptor, data, 0)
                os.ftruncate(self.descriptor, len(data))
        except UserError:
            self.free()
            raise

    @property
    def is_in_place(self) -> bool:
        """Tell whether the file still has its name."""
        try:
            named = self.path.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self.descriptor))

    def free(self) -> None:
        if self.is_in_place:
            self.path.unlink(missing_ok=True)
        os.close(self.descriptor)


def _take(path: Path) -> _Held | str:
    """Lock the file; returns who has it where another process does not give it back in time."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        with writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        held = _Held(path, descriptor)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _parse(os.pread(descriptor, 1 << 12, 0))
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                raise UserError(
                    f"cannot lock {path}: {error.strerror}; mount its file system with locks, or "
                    "use another"
                ) from error
            if error.errno not in _TAKEN:
                raise
            if time.monotonic() > end:
                return str(holder or "another process")
            time.sleep(_TICK_S)
            continue
        if held.is_in_place:
            held.sign()
            return held
        os.close(descriptor)  # its holder has deleted it since it was opened


def _parse(text: bytes) -> Holder | None:
    try:
        return Holder(**json.loads(text))
    except (ValueError, TypeError):
        return None


_guard = threading.RLock()
_held: dict[Path, _Held] = {}
os.register_at_fork(after_in_child=_held.clear)
