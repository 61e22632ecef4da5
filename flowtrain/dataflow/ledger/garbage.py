"""Deletion of payloads in an object store (`dataflow.payloads`).

The key of an object enters `garbage` before the object is written, and leaves it in the transaction
that commits its group. So an object whose push was cut off is deleted once no push can be that old.
A key enters again in the transaction that takes its row from `payloads`. The object is deleted
later: a process that is killed in between leaves the key, and the next one deletes the object.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flowtrain.dataflow.contract import Unavailable
from flowtrain.dataflow.ledger.sql import Database, Transaction
from flowtrain.dataflow.payloads import PayloadStore
from flowtrain.types import UserError

_log = logging.getLogger(__name__)

PUSH_S = 3600.0
"""Seconds after which an object without a group is deleted; no push takes as long."""
_AT_ONCE = 500
_COLLECT_S = 30.0


def expect(database: Database, key: str) -> None:
    """Note that an object is about to be written, and may never get a group."""
    with database.write() as transaction:
        row = (key, transaction.now() + PUSH_S)
        transaction.run("INSERT INTO garbage VALUES (?, ?, 0)", *row)


def keep(transaction: Transaction, key: str) -> None:
    """Let an object be that of a group. Raises Unavailable when it may be gone by now."""
    if not transaction.run("DELETE FROM garbage WHERE key = ? AND is_deleted = 0", key):
        raise Unavailable(f"{key} was written over {PUSH_S:.0f} s ago; push again")


def discard(transaction: Transaction, key: str) -> None:
    """Note that an expected object can be deleted."""
    transaction.run("UPDATE garbage SET since_s = ? WHERE key = ?", transaction.now(), key)


@dataclass(frozen=True, slots=True)
class Collector:
    database: Database
    payloads: PayloadStore

    def collect(self) -> int:
        """Delete the objects that are garbage by now; returns their number."""
        num_deleted = 0
        while keys := self._next_keys():
            self.payloads.delete(keys)
            with self.database.write() as transaction:
                rows = [(key,) for key in keys]
                transaction.many("DELETE FROM garbage WHERE key = ?", rows)
            num_deleted += len(keys)
        return num_deleted

    def _next_keys(self) -> list[str]:
        """Return some keys after marking them, so that no group gets their objects any more."""
        with self.database.write() as transaction:
            found = transaction.all(
                f"SELECT key FROM garbage WHERE since_s <= ? ORDER BY key LIMIT {_AT_ONCE}"
                f" {transaction.lock('garbage', skip=True)}",
                transaction.now(),
            )
            rows = [(row.key,) for row in found]
            transaction.many("UPDATE garbage SET is_deleted = 1 WHERE key = ?", rows)
        return [row.key for row in found]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Collect on a thread, again and again, until the block ends."""
        ended = threading.Event()

        def work() -> None:
            while not ended.wait(_COLLECT_S):
                try:
                    self.collect()
                except (Unavailable, UserError) as error:
                    _log.warning("payloads are not deleted now: %s", error)

        thread = threading.Thread(target=work, name="collector", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
