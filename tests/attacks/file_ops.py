"""File operations as the kernel sees them (strace), and what a power cut may leave of them.

The disk is as bad as POSIX lets it be. Data that was not synced is there, is missing, is zeros or
is torn, each write by itself. Names that were made, moved or deleted in a folder since that folder
was synced are as before or as after, each operation by itself and whatever other folders hold.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

Tree = dict[str, bytes | None]
"""Contents by path below the root; None for a folder."""
Choose = Callable[[list[str], bool], str]
"""Picks what became of an unsynced operation. The bool: it is the newest on its file or folder."""
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Op:
    """A file operation, or a mark."""

    kind: str
    path: str
    number: int
    data: bytes

    def __str__(self) -> str:
        return f"{self.kind} {self.path} {self.data[:60]!r}"


def watch(command: list[str], root: Path, scratch: Path, env: dict[str, str]) -> list[Op]:
    """Run a command, and return what it did below `root`, as the kernel saw it. The file that
    FILE_OPS_MARKS names in its environment takes marks. Skips the test where strace cannot be used.
    """
    log, marks = scratch / "calls", scratch / "marks"
    marks.touch()
    options = ["-f", "--seccomp-bpf", "-y", "-xx", "-s", "100000000", "-o", str(log)]
    tracer = ["strace", *options, "-e", f"trace={','.join(_CALLS)}"]
    try:
        subprocess.run([*tracer, "true"], check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs strace, and the right to use it: {error}")
    subprocess.run([*tracer, *command], env={**env, "FILE_OPS_MARKS": str(marks)}, check=True)
    with log.open() as lines:
        return list(_parse(lines, root, marks))


_ON_DESCRIPTORS = (
    *("lseek", "write", "pwrite64", "writev", "pwritev", "ftruncate", "fsync", "fdatasync"),
    *("fallocate", "copy_file_range", "sendfile"),
)
_CALLS = (
    *_ON_DESCRIPTORS,
    *("openat", "open", "creat", "truncate", "rename", "renameat", "renameat2", "link", "linkat"),
    *("symlink", "symlinkat", "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat"),
)
_CALL = re.compile(r"\d+ +(\w+)\((.*)\) += (-?\d+)")


def _parse(lines: Iterable[str], root: Path, marks: Path) -> Iterator[Op]:
    """Read a log of strace, whose strings and paths are all in hexadecimal."""
    places: dict[str, int] = {}  # of the next write, by descriptor; -1: at the end
    for line in _whole(lines):
        found = _CALL.match(line)
        if found is None:
            continue
        call, arguments, result = found[1], found[2].split(", "), int(found[3])
        if result < 0:
            continue
        paths = _paths(call, arguments)
        path = paths[0] if paths else ""
        descriptor = arguments[0].partition("<")[0]
        if call == "openat":
            flags, at = arguments[2], str(result)
            places[at] = -1 if "O_APPEND" in flags else 0
            if _is_below(path, root) and "O_CREAT" in flags:
                yield Op("create", path, 0, b"")
            if _is_below(path, root) and "O_TRUNC" in flags:
                yield Op("truncate", path, 0, b"")
        elif call == "lseek":
            places[descriptor] = result
        elif call == "write" and path == str(marks):
            yield Op("mark", "", 0, _text(arguments[1]))
        elif not _is_below(path, root):
            continue
        elif call == "write":
            place = places[descriptor]
            yield Op("write", path, place, _text(arguments[1])[:result])
            places[descriptor] = place if place < 0 else place + result
        elif call == "pwrite64":
            yield Op("write", path, int(arguments[3]), _text(arguments[1])[:result])
        elif call in ("ftruncate", "truncate"):
            yield Op("truncate", path, int(arguments[1]), b"")
        elif call in ("fsync", "fdatasync"):
            yield Op("sync", path, 0, b"")
        elif call in ("rename", "renameat", "renameat2"):
            yield Op("rename", path, 0, paths[1].encode())
        elif call in ("unlink", "unlinkat", "rmdir"):
            yield Op("unlink", path, 0, b"")
        elif call in ("mkdir", "mkdirat"):
            yield Op("mkdir", path, 0, b"")
        else:
            raise ValueError(f"{call} is not understood")


def _whole(lines: Iterable[str]) -> Iterator[str]:
    """Join the two halves of calls that another thread has come between, at their ends."""
    begun: dict[str, str] = {}
    for line in lines:
        thread, rest = line.split(maxsplit=1)
        if head := re.fullmatch(r"(.*) <unfinished \.\.\.>\n?", line):
            begun[thread] = head[1]
        elif tail := re.match(r"<\.\.\. \w+ resumed>(.*)", rest):
            yield begun.pop(thread) + tail[1]
        else:
            yield line


def _paths(call: str, arguments: Sequence[str]) -> list[str]:
    """The paths that a call is about: its descriptor's, or of names and the folders they are in."""
    if call in _ON_DESCRIPTORS:
        return [_folder(arguments[0])]
    folder, found = "/", []
    for argument in arguments:
        if argument.startswith('"'):
            found.append(str(Path(folder, os.fsdecode(_text(argument)))))
        elif "<" in argument:
            folder = _folder(argument)
    return found


def _folder(argument: str) -> str:
    """The path of a descriptor, as in 3<path>; "" where it is no file, or has no name any more."""
    found = re.fullmatch(r"\w+<((?:\\x[0-9a-f]{2})*)>", argument)
    return os.fsdecode(_text(found[1])) if found else ""


def _text(argument: str) -> bytes:
    return bytes.fromhex(argument.strip('"').replace("\\x", ""))


def _is_below(path: str, root: Path) -> bool:
    return f"{path}/".startswith(f"{root}/")


@dataclass(slots=True)
class _File:
    synced: bytes = b""
    size: int = 0
    pending: list[Op] = field(default_factory=list)

    def write(self, op: Op) -> None:
        if op.kind == "truncate":
            self.size = op.number
        else:
            op = replace(op, number=self.size if op.number < 0 else op.number)
            self.size = max(self.size, op.number + len(op.data))
        self.pending.append(op)


@dataclass(slots=True)
class _Folder:
    synced: dict[str, _File | _Folder] = field(default_factory=dict)
    live: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[dict[str, _File | _Folder | None]] = field(default_factory=list)
    """Changes of names by one operation each."""


class Disk:
    """A disk after some operations below a root, and after a power cut then."""

    def __init__(self, root: Path) -> None:
        self._base = f"{root}/"
        self._root = _Folder()

    def apply(self, op: Op) -> None:
        """Do what the operation did."""
        folder, name = self._find(op.path)
        match op.kind:
            case "create" if name in folder.live:
                pass
            case "create":
                self._rename(folder, {name: _File()})
            case "mkdir":
                self._rename(folder, {name: _Folder()})
            case "unlink":
                self._rename(folder, {name: None})
            case "rename":
                there, new = self._find(op.data.decode())
                found = folder.live[name]
                if there is folder:
                    self._rename(folder, {name: None, new: found})
                else:
                    self._rename(folder, {name: None})
                    self._rename(there, {new: found})
            case "write" | "truncate":
                file = folder.live[name]
                assert isinstance(file, _File)
                file.write(op)
            case "sync":
                found = folder.live[name] if name else folder
                if isinstance(found, _File):
                    found.synced, found.pending = _written(found, all_of_it), []
                else:
                    found.synced, found.pending = dict(found.live), []
            case _:
                raise ValueError(op.kind)

    def after_cut(self, choose: Choose) -> Tree:
        """Return what is on the disk."""
        tree: Tree = {}

        def walk(folder: _Folder, path: str) -> None:
            names = dict(folder.synced)
            for change in folder.pending:
                if choose(["none", "all"], change is folder.pending[-1]) == "all":
                    names.update(change)
            for name, found in names.items():
                if isinstance(found, _File):
                    tree[path + name] = _written(found, choose)
                elif found is not None:
                    tree[path + name] = None
                    walk(found, f"{path}{name}/")

        walk(self._root, "")
        return tree

    def _find(self, path: str) -> tuple[_Folder, str]:
        """The folder of a path, and its name there; "" for the root itself."""
        folder = self._root
        *parents, name = f"{path}/".removeprefix(self._base).rstrip("/").split("/")
        for parent in parents:
            found = folder.live[parent]
            assert isinstance(found, _Folder)
            folder = found
        return folder, name

    @staticmethod
    def _rename(folder: _Folder, change: dict[str, _File | _Folder | None]) -> None:
        folder.pending.append(change)
        for name, found in change.items():
            if found is None:
                del folder.live[name]
            else:
                folder.live[name] = found


def _written(file: _File, choose: Choose) -> bytes:
    """The content of a file with its unsynced writes as `choose` has them."""
    if not file.pending:
        return file.synced
    data = bytearray(file.synced)
    for op in file.pending:
        what = choose(["none", "all", "zeros", "torn", "last"], op is file.pending[-1])
        if what == "none":
            continue
        if op.kind == "truncate":
            data[:] = data[: op.number].ljust(op.number, b"\0")
            continue
        size = len(op.data)
        data[:] = data.ljust(op.number + size, b"\0") if what != "torn" else data
        middle = min(_BLOCK, size // 2)
        if what == "all":
            data[op.number : op.number + size] = op.data
        elif what == "torn":  # the first blocks alone
            data[:] = data.ljust(op.number, b"\0")
            data[op.number : op.number + middle] = op.data[:middle]
        elif what == "last":  # the first blocks are zeros
            data[op.number + middle : op.number + size] = op.data[middle:]
    return bytes(data)


def none(_: list[str], _newest: bool) -> str:
    """Nothing that was not synced is there."""
    return "none"


def all_of_it(_: list[str], _newest: bool) -> str:
    """Everything is there."""
    return "all"


def names_alone(choices: list[str], _newest: bool) -> str:
    """All names are there, and of the unsynced data nothing, as with a journal of names."""
    return "all" if len(choices) == 2 else "none"


def data_alone(choices: list[str], _newest: bool) -> str:
    """All data is there, and no name that was not synced."""
    return "all" if len(choices) > 2 else "none"


def newest_alone(_: list[str], newest: bool) -> str:
    """What came last to each file and folder is there, and nothing before it."""
    return "all" if newest else "none"


EXTREMES = (none, all_of_it, names_alone, data_alone, newest_alone)


def by_chance(rng: random.Random) -> Choose:
    """Each operation by itself, in a share of cases that is drawn too."""
    share = rng.random()
    return lambda choices, _: "all" if rng.random() < share else rng.choice(choices)


def lay_out(tree: Tree, folder: Path, before: Tree) -> None:
    """Make a folder hold a tree, knowing that it holds `before`."""
    for path in sorted(before.keys() - tree.keys(), reverse=True):
        (folder / path).rmdir() if before[path] is None else (folder / path).unlink()
    for path in sorted(tree):
        content = tree[path]
        if path not in before:
            (folder / path).mkdir() if content is None else (folder / path).write_bytes(content)
        elif content is not None and content != before[path]:
            (folder / path).write_bytes(content)


def tree_of(folder: Path) -> Tree:
    """Read what a folder holds."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }
