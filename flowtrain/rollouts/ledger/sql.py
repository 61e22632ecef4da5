"""SQL on SQLite or PostgreSQL by one interface: transactions, `?` for values, rows as named tuples.

SQLite lets one writer in at a time. On PostgreSQL many write at once, and statements say which rows
they lock (`Transaction.lock`). Times are the database's (`Transaction.now`): services on several
machines may share it, and their clocks differ. A problem that a person can mend (a full disk, a
read-only folder) raises a UserError that names the database; a temporary one raises Unavailable.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from flowtrain.records import UserError
from flowtrain.rollouts.contract import Refused, Unavailable
from flowtrain.utils.sqlite import use_write_ahead_log

WAIT_S = 30.0
"""Longest wait for a lock or a connection; then Unavailable."""
_MAX_CONNECTIONS = 14
"""As many as a service has threads that ask: renewals wait for no connection that leases have."""


class Transaction:
    """Statements that are committed together, or not at all."""

    def __init__(
        self, cursor: Any, has_row_locks: bool, clock: Callable[[], float] | None = None
    ) -> None:
        """`clock` None: the database's own, which only PostgreSQL has."""
        self._cursor = cursor
        self._has_row_locks = has_row_locks
        self._clock = clock
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def now(self) -> float:
        """Return the seconds since 1970 on the clock of the database."""
        if self._clock is not None:
            return self._clock()
        return float(self.one("SELECT extract(epoch FROM clock_timestamp()) AS now").now)

    def lock(self, table: str, *, skip: bool = False) -> str:
        """Return the end of a SELECT that locks its rows of `table` until the transaction ends;
        with `skip` it leaves out rows that others have locked. Empty on SQLite.
        """
        if not self._has_row_locks:
            return ""
        return f"FOR UPDATE OF {table}{' SKIP LOCKED' if skip else ''}"

    def all(self, statement: str, *values: object) -> list[Any]:
        self.run(statement, *values)
        return self._cursor.fetchall()

    def one(self, statement: str, *values: object) -> Any:
        """Return the first row, or None."""
        self.run(statement, *values)
        return self._cursor.fetchone()

    def run(self, statement: str, *values: object) -> int:
        """Execute a statement and return the number of rows that it changed."""
        self._cursor.execute(self._dialect(statement), values)
        return self._cursor.rowcount

    def many(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        """Execute a statement once per row of values."""
        if values := list(rows):
            self._cursor.executemany(self._dialect(statement), values)

    def count(self, policy: str, what: str, name: str, num: int) -> None:
        """Add to a counter when the transaction is committed, see counters.py."""
        self._counts[policy, what, name] += num

    def write_counts(self) -> None:
        """Add what was counted, in one order everywhere: the last that a transaction does."""
        if rows := [(*key, num) for key, num in sorted(self._counts.items()) if num]:
            self.many(
                "INSERT INTO counters VALUES (?, ?, ?, ?) ON CONFLICT (policy, what, name)"
                " DO UPDATE SET num = counters.num + excluded.num",
                rows,
            )

    def _dialect(self, statement: str) -> str:
        return statement.replace("%", "%%").replace("?", "%s") if self._has_row_locks else statement


def marks(values: Iterable[object]) -> str:
    """Write marks for `IN`: marks("abc") is "(?, ?, ?)"; nothing is in marks("")."""
    return f"({', '.join('?' for _ in values) or 'NULL'})"


def connect(
    database: str | Path, clock: Callable[[], float] | None = None, *, is_patient: bool = False
) -> Database:
    """Open a database, a path or a `postgresql://` URL.

    `clock` None: the server's, or for a file that of this machine. `is_patient`: statements may
    take as long as they need, which reads of the whole history do.
    """
    text = str(database)
    if text.startswith(("postgresql://", "postgres://")):
        return PostgresDatabase(text, clock, 0.0 if is_patient else WAIT_S)
    if "://" in text:
        raise UserError(f"database {text!r}: must be a path or start with postgresql://")
    return SqliteDatabase(Path(text), clock or time.time)


class Database:
    """A database and its connections, each used by one transaction at a time and kept for the
    next.
    """

    begin_write: str
    begin_read: str
    has_row_locks: bool
    errors: tuple[type[Exception], ...]
    """Errors of the database's library."""

    def __init__(self, name: str, clock: Callable[[], float] | None) -> None:
        """`name`: path or URL for messages, without a password."""
        self.name = name
        self._clock = clock
        self._idle: SimpleQueue[Any] = SimpleQueue()
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._reached_s = 0.0
        self._has_failed = False
        self._outage_s = 0.0

    def take_outage_s(self) -> float:
        """Return the longest time without a transaction in which the connection to the database
        failed, in seconds, since this was asked last. A proxy that cuts connections makes none of
        note: the next transaction follows at once.
        """
        outage_s, self._outage_s = self._outage_s, 0.0
        return outage_s

    def _note_reached(self) -> None:
        now = (self._clock or time.monotonic)()
        if self._has_failed:
            self._has_failed = False
            self._outage_s = max(self._outage_s, now - self._reached_s)
        self._reached_s = now

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """Roll back when an exception leaves the block; after any other error than a refusal the
        connection is closed.
        """
        if not self._slots.acquire(timeout=WAIT_S):
            raise Unavailable(
                f"{_MAX_CONNECTIONS} requests to the database did not end in {WAIT_S:.0f} s"
            )
        try:
            try:
                connection = self._idle.get_nowait()
            except Empty:
                connection = self._connect()
            try:
                yield connection
            except Refused:
                connection.rollback()
                self._idle.put(connection)
                raise
            except BaseException:
                self._abandon(connection)
                self.close()  # what ended this connection may have ended the others
                raise
            self._idle.put(connection)
        finally:
            self._slots.release()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Transaction]:
        try:
            with self._connection() as connection:
                cursor = connection.cursor()
                cursor.execute(begin)
                self._note_reached()
                transaction = Transaction(cursor, self.has_row_locks, self._clock)
                yield transaction
                transaction.write_counts()
                cursor.execute("COMMIT")
        except self.errors as error:
            explained = self._explained(error)
            if explained is None:
                raise
            raise explained from error

    def _connect(self) -> Any:
        raise NotImplementedError

    def _explained(self, error: Exception) -> Exception | None:
        """Return what to raise in place of a database's error; None for any other error."""
        raise NotImplementedError

    def _abandon(self, connection: Any) -> None:
        connection.close()

    def write(self) -> AbstractContextManager[Transaction]:
        """Return a transaction as a context: committed on exit, rolled back by an exception."""
        return self._transaction(self.begin_write)

    def read(self) -> AbstractContextManager[Transaction]:
        """Return a read-only transaction on one state of the database, as a context."""
        return self._transaction(self.begin_read)

    def close(self) -> None:
        """Close the connections that are idle."""
        with suppress(Empty):
            while True:
                self._idle.get_nowait().close()


class SqliteDatabase(Database):
    """A file with a write-ahead log. Commits survive a machine crash (synchronous = FULL)."""

    begin_write = "BEGIN IMMEDIATE"
    begin_read = "BEGIN"
    has_row_locks = False
    errors = (sqlite3.Error, OverflowError)

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        super().__init__(str(path), clock)
        self._path = path
        self._writing = threading.Lock()

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        # SQLite's own waiting polls; among the threads of a process a lock is fairer and faster.
        if not self._writing.acquire(timeout=WAIT_S):
            raise Unavailable(f"{self.name} was not free for writing in {WAIT_S:.0f} s")
        try:
            with super().write() as transaction:
                yield transaction
        finally:
            self._writing.release()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=WAIT_S, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = _named_row
        use_write_ahead_log(connection, WAIT_S)
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    def _abandon(self, connection: sqlite3.Connection) -> None:
        # Closing alone does not end a transaction while a traceback still holds its statement.
        connection.rollback()
        connection.close()

    def _explained(self, error: Exception) -> Exception | None:
        if isinstance(error, OverflowError):
            return Refused(f"a number has more than 64 bits: {error}")
        code = getattr(error, "sqlite_errorname", "")
        cures = {
            "SQLITE_FULL": "free some space",
            "SQLITE_READONLY": "make it writable, and its folder",
            "SQLITE_CANTOPEN": "check that its folder exists and is writable",
            "SQLITE_IOERR": "check its disk, and free some space",
            "SQLITE_NOTADB": "choose another file, or a new one",
            "SQLITE_CORRUPT": "restore a backup of it",
        }
        if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return Unavailable(f"{self.name} was not free in {WAIT_S:.0f} s")
        cure = next((cure for start, cure in cures.items() if code.startswith(start)), None)
        return UserError(f"cannot use the database {self.name}: {error}; {cure}") if cure else None


@lru_cache
def _row_type(names: tuple[str, ...]) -> Any:
    return namedtuple("Row", names)


def _named_row(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> Any:
    return _row_type(tuple(column[0] for column in cursor.description))._make(row)


class PostgresDatabase(Database):
    """A server that several services may use at once; commits are on its disk unless
    synchronous_commit says otherwise.
    """

    begin_write = "BEGIN"
    begin_read = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
    has_row_locks = True

    def __init__(self, url: str, clock: Callable[[], float] | None, wait_s: float) -> None:
        """`wait_s`: longest time of a statement, and of a pause between two; 0: any."""
        super().__init__(_without_password(url), clock)
        self._wait_s = wait_s
        try:
            import psycopg
            from psycopg import conninfo, errors, rows
        except ImportError as error:
            raise UserError(
                "a PostgreSQL database needs psycopg: pip install -e '.[postgres]'"
            ) from error
        try:
            conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError as error:
            raise UserError(f"database {self.name!r}: {error}") from error
        self._url = url
        self._psycopg, self._rows = psycopg, rows
        self.errors = (psycopg.Error,)
        self._mendable = (
            errors.DiskFull,
            errors.ReadOnlySqlTransaction,
            errors.InsufficientPrivilege,
            errors.InvalidCatalogName,
        )
        self._passing = (
            psycopg.OperationalError,
            psycopg.InterfaceError,
            errors.IdleInTransactionSessionTimeout,
        )

    def _explained(self, error: Exception) -> Exception | None:
        line = " ".join(str(error).split())
        if isinstance(error, self._psycopg.DataError):
            return Refused(f"the database takes no such value: {line}")
        if isinstance(error, self._mendable):
            return UserError(f"cannot use the database {self.name}: {line}")
        if isinstance(error, self._passing):
            return Unavailable(f"the database {self.name} did not answer: {line}")
        return None

    def _abandon(self, connection: Any) -> None:
        self._has_failed |= connection.broken
        connection.close()

    def _connect(self) -> Any:
        # A peer that vanishes in the middle of a transaction must not keep its locks.
        wait = f"{self._wait_s:.0f}s"
        settings = {
            "lock_timeout": wait,
            "statement_timeout": wait,
            "idle_in_transaction_session_timeout": wait,
        }
        url_options = self._psycopg.conninfo.conninfo_to_dict(self._url).get("options") or ""
        options = " ".join(
            [str(url_options), *(f"-c {name}={value}" for name, value in settings.items())]
        )
        try:
            return self._psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=10,
                options=options,
                row_factory=self._rows.namedtuple_row,
            )
        except self._psycopg.Error:
            self._has_failed = True
            raise


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.replace(f":{parts.password}@", "@")).geturl()
