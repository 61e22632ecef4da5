"""Tokens of servers: one that opens everything, or one per node and trainer.

Tokens of their own are in a file, which servers read again when it has changed: both the dataflow
and the weight server can use it, on any machine that has a copy, and a weight server has no
database. The file holds hashes only. A token is 32 random bytes, so a plain hash tells nothing
about it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from flowtrain.records import UserError
from flowtrain.utils.errors import user_error
from flowtrain.utils.files import replace_file
from flowtrain.utils.net.serving import check_token

_log = logging.getLogger(__name__)


class Role(StrEnum):
    """A right of the owner of a token; everybody may read weights and ask for the status."""

    ALL = "all"
    """Everything: the owner of the shared token."""
    NODE = "node"
    """Take part as the node of that name."""
    TRAINER = "trainer"
    """Train the policy of that name."""
    MONITOR = "monitor"
    """No more than everybody may, which includes the metrics."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, by its token."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class Entry:
    """A token in the file."""

    name: str
    role: Role
    sha256: str
    """The hash of the token, in hexadecimal."""
    issued: str
    """Day and time in UTC."""


class TokenFile:
    """The tokens of a file, as it is at the time of each look."""

    def __init__(self, path: Path) -> None:
        """Raises UserError if the file cannot be read or others may read it."""
        self._path = path
        self._state = _state(path)  # before it is read: a change in between is seen later
        self._entries = read(path)

    def find(self, token: bytes) -> Caller | None:
        """Return the owner of a token, in a time that does not reveal which entry matches."""
        self._reload_if_changed()
        digest = hashlib.sha256(token).hexdigest()
        caller = None
        for entry in self._entries:  # to the end: the time must not tell which one matched
            if hmac.compare_digest(digest, entry.sha256):
                caller = Caller(entry.name, entry.role)
        return caller

    def _reload_if_changed(self) -> None:
        """Read the file again if it has changed. An unreadable file, for example during a copy,
        changes nothing.
        """
        if (state := _state(self._path)) == self._state:
            return
        self._state = state
        try:
            self._entries = read(self._path)
        except UserError as error:
            _log.error("%s; until the file is repaired, its previous tokens stay valid", error)


class Access:
    """Whom a server lets in."""

    def __init__(self, shared: str, file: TokenFile | None = None) -> None:
        """`shared` opens everything; it may be empty where there is a file. Raises UserError for a
        token that fits into no header.
        """
        if shared or file is None:
            check_token(shared)
        self._shared = shared.encode()
        self._file = file

    def caller(self, authorization: str) -> Caller | None:
        """Return who sends this header; None where its token is unknown."""
        scheme, _, text = authorization.partition(" ")
        # Compared as bytes: compare_digest refuses text that is not ASCII, which anybody may send.
        token = text.strip().encode()
        if scheme.lower() != "bearer" or not token:
            return None
        if hmac.compare_digest(token, self._shared):
            return Caller("", Role.ALL)
        return self._file.find(token) if self._file is not None else None


# ---- the file


def issue(path: Path, name: str, role: Role) -> str:
    """Add a token to the file, which is made where there is none, and return it: it is nowhere
    else. Raises UserError for a name that has one already, or that is none.
    """
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name):
        raise UserError(
            f"name {name[:100]!r}: a name must have 1 to 100 letters, digits, '.', '_' and '-'"
        )
    token = secrets.token_urlsafe(32)
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    with _locked(path):
        entries = read(path) if path.exists() else []
        if any(entry.name == name for entry in entries):
            raise UserError(f"{name!r} has a token in {path}; revoke it first")
        new = Entry(name, role, hashlib.sha256(token.encode()).hexdigest(), now)
        _write(path, [*entries, new])
    return token


def revoke(path: Path, name: str) -> None:
    """Take a token out of the file. Raises UserError where there is none of the name."""
    with _locked(path):
        entries = read(path)
        remaining = [entry for entry in entries if entry.name != name]
        if len(remaining) == len(entries):
            raise UserError(f"{path} has no token named {name!r}")
        _write(path, remaining)


def read(path: Path) -> list[Entry]:
    """Return what is in the file. Raises UserError if it is damaged or others may read it."""
    with user_error(f"cannot read the tokens in {path}", OSError, UnicodeDecodeError):
        mode = path.stat().st_mode
        text = path.read_text()
    if mode & 0o077:
        raise UserError(f"other users can read the tokens in {path}: run chmod 600 {path}")
    with user_error(f"{path} holds no tokens", ValueError, TypeError, KeyError):
        return [_entry(**row) for row in json.loads(text)["tokens"]]


def _entry(name: str, role: str, sha256: str, issued: str) -> Entry:
    if not re.fullmatch(r"[0-9a-f]{64}", sha256) or role == Role.ALL:
        raise ValueError(f"the entry of {name!r} is damaged")
    return Entry(str(name), Role(role), sha256, str(issued))


def _write(path: Path, entries: Sequence[Entry]) -> None:
    """Put a new file in the place of the old one, which only its owner may read."""
    text = json.dumps({"tokens": [asdict(entry) for entry in entries]}, indent=1)
    with user_error(f"cannot write the tokens to {path}", OSError):
        replace_file(path, f"{text}\n".encode(), mode=0o600)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process changes the file, and keep them waiting."""
    with user_error(f"cannot write the tokens to {path}", OSError):
        folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _state(path: Path) -> Any:
    """Return something that differs whenever the file has changed."""
    with contextlib.suppress(OSError):
        stat = path.stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino, stat.st_mode
    return None
