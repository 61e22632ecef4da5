"""Data files of versions on the disk by their checksums; the least recently used ones leave first.

A file is fetched once, however many ask for it. They read it while it comes, up to its last byte,
which they get when the whole of it has its checksum: a file that arrived is the one that was asked
for. What an earlier process left is checked in the same way before it is served.
"""

from __future__ import annotations

import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from threading import Lock, Semaphore, Thread

from flowtrain.types import UserError
from flowtrain.utils.files import remove, sync
from flowtrain.weights.manifest import File, StoreError

_log = logging.getLogger(__name__)
_FETCHES = 8
"""Files that are fetched at a time."""
_FOLDER = re.compile(r"[0-9]{1,18}-(?P<bytes>[0-9]{1,18})-[0-9a-f]{16}-.+")

Fetch = Callable[[Path, int, File], Path]
"""Complete a file of a version in a folder, where its `.part` may be, and check it."""


class NoRoom(UserError):
    """The cache is too small for a file."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A file, or the part of it that is here."""

    folder: Path
    num_bytes: int
    """Size of the whole file."""
    inode: Future[int] | None = None
    """That of the checked file; None: nobody has asked since this process began, or it failed."""

    @property
    def is_under_way(self) -> bool:
        return self.inode is not None and not self.inode.done()


@dataclass(frozen=True, slots=True)
class Opened:
    """A file to read, which may still be coming."""

    data: FileIO
    num_bytes: int
    inode: Future[int]

    def num_ready(self) -> int:
        """Return how many of its first bytes can be read. Raises what ended the fetch."""
        if self.inode.done():
            if self.inode.result() == os.fstat(self.data.fileno()).st_ino:
                return self.num_bytes
            raise StoreError("the file came damaged and was fetched again")
        stat = os.fstat(self.data.fileno())
        if stat.st_nlink == 0 and not self.inode.done():
            raise StoreError("the file came damaged and is fetched again")
        return min(stat.st_size, self.num_bytes - 1)


class FileCache:
    """See above. Threads may share it; its folder belongs to one process."""

    def __init__(self, folder: Path, max_bytes: int, fetch: Fetch) -> None:
        self._root = folder
        self._max_bytes = max_bytes
        self._fetch = fetch
        self._fetches = Semaphore(_FETCHES)
        self._lock = Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """By name of the folder; the one that was used last is at the end."""
        for path in sorted(folder.glob("*-*"), key=lambda path: path.stat().st_mtime_ns):
            if match := _FOLDER.fullmatch(path.name):
                self._entries[path.name] = _Entry(path, int(match["bytes"]))
        self._make_room(0)

    @property
    def num_bytes(self) -> int:
        """Return what all files take, as if those under way were whole."""
        return sum(entry.num_bytes for entry in self._entries.values())

    def open(self, version: int, file: File) -> Opened:
        """Open a file, and begin to fetch it where it is not here.

        Raises:
            NoRoom: it is larger than the cache, or than what files under way leave of it.
            OSError: the disk refuses it.
        """
        key = f"{version}-{file.num_bytes}-{file.xxh3}-{file.name}"
        with self._lock:
            if key not in self._entries:
                self._make_room(file.num_bytes)
                self._entries[key] = _Entry(self._root / key, file.num_bytes)
            entry = self._entries[key]
            self._entries.move_to_end(key)
            path = entry.folder / f"v{version:08d}" / file.name
            is_new = entry.inode is None or not (entry.is_under_way or path.exists())
            data = self._begin(entry, path, version, file) if is_new else _open(path)
            assert entry.inode is not None
            os.utime(entry.folder)
            return Opened(data, file.num_bytes, entry.inode)

    def _make_room(self, num_bytes: int) -> None:
        """Delete what was not used for longest until there is room."""
        left = self._max_bytes - num_bytes - self.num_bytes
        if num_bytes > self._max_bytes:
            raise NoRoom(f"a file of {num_bytes:,} bytes is larger than the cache (--cache-gb)")
        for key, entry in list(self._entries.items()):
            if left >= 0:
                return
            if not entry.is_under_way:
                remove(entry.folder)
                left += self._entries.pop(key).num_bytes
        if left < 0:
            raise NoRoom("files under way take all of the cache (--cache-gb)")

    def _begin(self, entry: _Entry, path: Path, version: int, file: File) -> FileIO:
        """Begin to fetch a file, and open it before, because one that comes damaged is deleted."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(_part(path))  # to be checked as if it had just come
        else:
            _part(path).touch()
        data = FileIO(_part(path))
        entry.inode = Future()
        target, args = self._complete, (entry, entry.inode, version, file)
        Thread(target=target, args=args, name="fetch", daemon=True).start()
        return data

    def _complete(self, entry: _Entry, inode: Future[int], version: int, file: File) -> None:
        try:
            with self._fetches:
                path = self._fetch(entry.folder, version, file)
            sync(path)
            inode.set_result(path.stat().st_ino)
        # Whatever it is, those who read wait for it; our own mistakes show their traceback as well.
        except BaseException as error:
            self._fail(entry, inode, error)
            if not isinstance(error, UserError | OSError):
                raise

    def _fail(self, entry: _Entry, inode: Future[int], error: BaseException) -> None:
        """Tell those who read. A part stays, to go on from, unless it is what fills the disk."""
        with self._lock:
            if not isinstance(error, StoreError):
                remove(entry.folder)
                self._entries.pop(entry.folder.name, None)
            entry.inode = None
            inode.set_exception(error)


def _open(path: Path) -> FileIO:
    """Open a file that may be renamed just now, because it is whole."""
    for candidate in (_part(path), path):
        try:
            return FileIO(candidate)
        except FileNotFoundError:
            continue
    return FileIO(_part(path))


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")
