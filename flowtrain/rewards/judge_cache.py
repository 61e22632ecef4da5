"""A cache of judgements on disk, shared by processes and across restarts."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from flowtrain.utils.errors import user_error
from flowtrain.utils.sqlite import use_write_ahead_log
from flowtrain.utils.text import encodable

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS verdicts "
    "(key TEXT PRIMARY KEY, is_right INTEGER NOT NULL, reply TEXT NOT NULL)"
)
_WAIT_S = 30.0
"""Seconds to wait for another writing process."""


class JudgeCache:
    """A SQLite file in WAL mode, on a local disk, keyed by the hash of engine name and prompt."""

    def __init__(self, path: Path) -> None:
        """Open or make the file; raises UserError."""
        self._path = path
        with self._writing() as connection:
            use_write_ahead_log(connection, _WAIT_S)
            connection.execute(_SCHEMA)

    def get(self, engine: str, prompt: str) -> bool | None:
        """Return the judgement, or None if missing."""
        with self._writing() as connection:
            row = connection.execute(
                "SELECT is_right FROM verdicts WHERE key = ?", (_key(engine, prompt),)
            ).fetchone()
        return None if row is None else bool(row[0])

    def put(self, engine: str, prompt: str, is_right: bool, reply: str) -> None:
        """Store a judgement with its reply, unless one exists."""
        with self._writing() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?)",
                (_key(engine, prompt), is_right, encodable(reply)),
            )

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Open a connection for one statement, so that no fork or other thread inherits it."""
        problem = f"judge.cache={str(self._path)!r} cannot be used as a cache"
        with user_error(problem, sqlite3.Error, OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self._path, timeout=_WAIT_S)) as connection, connection:
                yield connection


def _key(engine: str, prompt: str) -> str:
    return hashlib.sha256(f"{engine}\0{prompt}".encode()).hexdigest()
