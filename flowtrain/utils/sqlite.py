"""Open SQLite files in write-ahead mode."""

from __future__ import annotations

import sqlite3
import time


def use_write_ahead_log(connection: sqlite3.Connection, wait_s: float) -> None:
    """Turn on the write-ahead log, which the file keeps.

    When two processes begin with a new file at once, SQLite tells one of them that it is locked,
    without its usual waiting. Raises sqlite3.OperationalError after `wait_s` seconds of that.
    """
    end = time.monotonic() + wait_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if not error.sqlite_errorname.startswith("SQLITE_BUSY") or time.monotonic() > end:
                raise
            time.sleep(0.01)
