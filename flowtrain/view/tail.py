"""What was appended to a file of JSON lines since it was last read.

A run writes such files, a resumed one cuts them first. The reader knows how far it has read, and
the last bytes before that place: where they have changed, the file was cut or replaced, and it is
read from its beginning again.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

MOST_BYTES = 16 << 20
"""Bytes read at a time, or one line where that is longer."""
_MARK_BYTES = 4096
"""Bytes before the place up to which was read, by which a file that was cut is known."""


class Line(NamedTuple):
    """A record, and where its line lies in the file."""

    record: dict[str, Any]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class News:
    """Lines that a reader has not returned before."""

    lines: list[Line]
    is_restart: bool
    """The file was cut or replaced: earlier lines no longer count, and these are its first."""
    has_more: bool
    """Whole lines are left for the next call, because of `MOST_BYTES`."""


class Tail:
    """Reads a growing file of JSON lines, each line once. A last line without its newline is left
    for later; a line that is no JSON object with a step is passed over and counted.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._forget()

    def _forget(self) -> None:
        self.num_damaged = 0
        self._end = 0
        self._mark = b""
        self._inode: tuple[int, int] | None = None

    def read(self) -> News:
        """Return the lines that have come since the last call; a file that is not there has none.

        Raises OSError where the file cannot be read.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            is_restart = self._end > 0
            self._forget()
            return News([], is_restart, False)
        with file:
            found = os.fstat(file.fileno())
            inode = found.st_dev, found.st_ino
            is_restart = self._end > 0 and not (inode == self._inode and self._is_uncut(file))
            if is_restart:
                self._forget()
            self._inode = inode
            file.seek(self._end)
            lines, has_more = self._lines(file)
            self._mark = self._before(file)
        return News(lines, is_restart, has_more)

    def _is_uncut(self, file: BinaryIO) -> bool:
        return self._before(file) == self._mark

    def _before(self, file: BinaryIO) -> bytes:
        """Return the bytes before the place up to which was read."""
        num = min(self._end, _MARK_BYTES)
        file.seek(self._end - num)
        return file.read(num)

    def _lines(self, file: BinaryIO) -> tuple[list[Line], bool]:
        """Read whole lines, and tell whether there may be more."""
        lines, start = [], self._end
        for data in file:
            if not data.endswith(b"\n"):
                break
            record = _parse(data)
            if record is None:
                self.num_damaged += 1
            else:
                lines.append(Line(record, self._end, self._end + len(data)))
            self._end += len(data)
            if self._end - start >= self._most_bytes:
                return lines, True
        return lines, False


def _parse(data: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(data)
    except ValueError:
        return None
    is_ours = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if is_ours else None
