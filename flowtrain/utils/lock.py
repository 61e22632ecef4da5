"""One writer at a time: a lock on a file, with the name of its holder in it.

It is a record lock of POSIX (`fcntl`). The system releases it when its holder dies, however that
happens, and forked children do not get it, so that a server which outlives its trainer holds
nothing. It holds between the hosts of a shared file system that has such locks (NFS with lockd or
from version 4, Lustre with -o flock, CephFS, GPFS). Where there are none the existence of a second
file is the lock; that of a dead process of this machine is taken over, any other is refused.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
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
_PATIENCE_S = 10.0
"""Longest wait for a holder that is about to end, or about to write its name."""
_TICK_S = 0.01
_TAKEN = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_EXITING = 4
"""PF_EXITING among the flags of /proc/PID/stat."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a lock."""

    command: str
    host: str
    machine: str
    """Boot and namespace of its process number, which means nothing outside of them."""
    pid: int
    started: str
    """When it started, in ticks of its machine, because numbers are used again; "" if unknown."""
    since: str
    """Time at which it took the lock."""

    @classmethod
    def here(cls) -> Holder:
        """Describe this process."""
        spec = sys.modules["__main__"].__spec__
        module = spec.name.removesuffix(".__main__") if spec else ""
        return cls(
            command=f"python {f'-m {module}' if module else Path(sys.argv[0]).name}".strip(),
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=_started(os.getpid()),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def __str__(self) -> str:
        return f"{self.command} on host {self.host}, process {self.pid}, since {self.since}"

    @property
    def has_ended(self) -> bool:
        """Tell whether it is a process of this machine that is no more, or about to be."""
        if self.machine != _machine():
            return False
        if self.started:
            return _started(self.pid) != self.started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False


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
            UserError: "<subject> is in use by <holder>; <cure>", or the file cannot be written.
        """
        with writing(path):
            made = make_folder(path.parent)
        self._subject = subject
        self._path = path.parent.resolve() / path.name
        with _guard:
            held = _held.get(self._path)
            if held is None:
                try:
                    held = _held[self._path] = _Held.take(self._path)
                except _Taken as taken:
                    raise UserError(f"{subject} is in use by {taken}; {cure}") from None
            held.count += 1
        self._release = weakref.finalize(self, _release, self._path, os.getpid(), made)

    @classmethod
    def of_folder(cls, folder: Path, cure: str) -> Lock:
        """Take the lock of a folder; made where it is missing, and deleted if still empty then."""
        return cls(folder / NAME, str(folder), cure)

    @staticmethod
    def holder(folder: Path) -> Holder | None:
        """Return the process that has the lock of a folder, by its name in the file, as far as this
        machine can tell; None: nobody has it. For readers: nothing is locked or written.
        """
        for name in (NAME, f"{NAME}.held"):
            path = folder.resolve() / name
            if path in _held:  # closing the file here would release it
                return Holder.here()
            with suppress(OSError):
                found = _parse(path.read_bytes())
                if found is not None and not found.has_ended:
                    return found
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


class _Taken(Exception):
    """Another process holds the lock; the text says who."""


@dataclass(slots=True)
class _Held:
    """A lock of this process. Closing its file elsewhere in the process would release it, so a path
    in `_held` is opened once.
    """

    path: Path
    """The locked file; where the file system has no locks, the file whose existence is the lock."""
    descriptor: int
    count: int = 0

    @classmethod
    def take(cls, path: Path) -> _Held:
        end = time.monotonic() + _PATIENCE_S
        by_name = path.with_name(f"{path.name}.held")
        while True:
            with writing(path):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            held = cls(path, descriptor)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                text = os.pread(descriptor, 1 << 12, 0)
                os.close(descriptor)
                if error.errno in _NO_LOCKS:
                    if text:  # somebody has locks here
                        _take_over(path, end)
                    path.unlink(missing_ok=True)
                    return cls._take_by_name(by_name, end)
                if error.errno not in _TAKEN:
                    raise
                _wait_for(text, end)
                continue
            if not held.is_in_place:  # its holder has deleted it since it was opened
                os.close(descriptor)
            elif by_name.exists():  # somebody has no locks here
                held.free()
                _take_over(by_name, end)
            else:
                held.sign()
                return held

    @classmethod
    def _take_by_name(cls, path: Path, end: float) -> _Held:
        while True:
            try:
                with writing(path):
                    held = cls(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644))
            except UserError as error:
                if not isinstance(error.__cause__, FileExistsError):
                    raise
                _take_over(path, end)
                continue
            held.sign()
            return held

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


def _take_over(path: Path, end: float) -> None:
    """Delete the file of a process that has ended, for want of locks. Raises _Taken."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return
    holder = _parse(text)
    if holder is None or not holder.has_ended:
        cure = f"{holder or 'another process'} (if it has ended, delete {path})"
        if holder is not None or time.monotonic() > end:
            raise _Taken(cure)
        time.sleep(_TICK_S)
        return
    # Of several that have read this text one renames it; whoever finds another's puts it back.
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        path.rename(aside)
        if aside.read_bytes() == text:
            aside.unlink()
        else:
            aside.rename(path)


def _wait_for(text: bytes, end: float) -> None:
    """Wait a moment for a holder that is ending, or has no name yet; raise _Taken for others."""
    holder = _parse(text)
    if (holder is not None and not holder.has_ended) or time.monotonic() > end:
        raise _Taken(str(holder or "another process"))
    time.sleep(_TICK_S)


def _parse(text: bytes) -> Holder | None:
    try:
        return Holder(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _machine() -> str:
    """Identify this boot of this machine, and the namespace of process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str:
    """The start of a process in ticks; "" for one that is no more, is ending, or is unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return "" if int(fields[6]) & _EXITING else fields[19]


_guard = threading.RLock()
_held: dict[Path, _Held] = {}
os.register_at_fork(after_in_child=_held.clear)
