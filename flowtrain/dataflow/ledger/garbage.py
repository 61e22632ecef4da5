"""Deletion of payloads in an object store (`dataflow.payloads`).

A key enters `garbage` in the transaction that takes its row from `payloads`, or that finds it to be
an orphan; the object is deleted later. So a process that is killed in between leaves a key there,
and the next one deletes the object. A key stays for a while afterwards, so that a push that was
checked before the deletion cannot be committed after it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from flowtrain.dataflow.contract import Refused, StoredPayload, Unavailable
from flowtrain.dataflow.ledger.schema import meta_row
from flowtrain.dataflow.ledger.sql import Database, Transaction, connect
from flowtrain.dataflow.payloads import PayloadStore
from flowtrain.types import UserError

_log = logging.getLogger(__name__)

ORPHAN_S = 86400.0
"""Seconds after which an object that no group has counts as an orphan; no push takes as long."""
_KEPT_S = 3600.0
"""Seconds for which the key of a deleted object is remembered; no transaction takes as long."""
_AT_ONCE = 500
_COLLECT_S, _SWEEP_S = 30.0, 3600.0


def discard(transaction: Transaction, keys: Sequence[str]) -> None:
    """Note that objects can be deleted."""
    now = transaction.now()
    transaction.many(
        "INSERT INTO garbage VALUES (?, ?, 0) ON CONFLICT DO NOTHING", [(key, now) for key in keys]
    )


def check_kept(transaction: Transaction, stored: StoredPayload) -> None:
    """Raises Refused when the object is being deleted; asked under the lock of its work item."""
    if transaction.one("SELECT key FROM garbage WHERE key = ?", stored.key):
        raise Refused(f"{stored.key} was uploaded too long ago and has been deleted")


@dataclass(frozen=True, slots=True)
class Collector:
    database: Database
    payloads: PayloadStore

    def collect(self) -> int:
        """Delete the objects of `garbage`; returns their number."""
        num_deleted = 0
        while True:
            with self.database.read() as transaction:
                rows = transaction.all(
                    f"SELECT key FROM garbage WHERE is_deleted = 0 LIMIT {_AT_ONCE}"
                )
            if not rows:
                break
            self.payloads.delete([row.key for row in rows])
            with self.database.write() as transaction:
                transaction.many(
                    "UPDATE garbage SET is_deleted = 1 WHERE key = ?", [(row.key,) for row in rows]
                )
            num_deleted += len(rows)
        with self.database.write() as transaction:
            transaction.run(
                "DELETE FROM garbage WHERE is_deleted = 1 AND since_s < ?",
                transaction.now() - _KEPT_S,
            )
        return num_deleted

    def sweep(self, older_than_s: float = ORPHAN_S) -> int:
        """Note the orphans, objects that were uploaded and never committed; returns their number.
        `older_than_s` must be longer than any push.
        """
        num_orphans = 0
        owners = {key: self.payloads.owner(key) for key in self.payloads.older(older_than_s)}
        # Rows are locked in the order of their numbers, so that two sweeps do not wait in a circle.
        keys = sorted(owners, key=lambda key: (owners[key] or (0, 0), key))
        for first in range(0, len(keys), _AT_ONCE):
            some = keys[first : first + _AT_ONCE]
            with self.database.write() as transaction:
                orphans = [key for key in some if _is_orphan(transaction, key, owners[key])]
                discard(transaction, orphans)
            num_orphans += len(orphans)
        return num_orphans

    @contextmanager
    def running(self) -> Iterator[None]:
        """Collect and sweep on a thread, again and again, until the block ends."""
        ended = threading.Event()

        def work() -> None:
            until_sweep = _SWEEP_S
            while not ended.wait(_COLLECT_S):
                until_sweep -= _COLLECT_S
                try:
                    if until_sweep <= 0:
                        until_sweep = _SWEEP_S
                        self.sweep()
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


def collect_database(database: str, url: str, older_than_s: float) -> tuple[int, int]:
    """Sweep and collect the run of a ledger that may be in use; returns the number of orphans and
    the number of objects deleted. UserError if there is none.
    """
    if "://" not in database and not Path(database).is_file():
        raise UserError(f"there is no database {database}")
    with closing(connect(database)) as found:
        with found.read() as transaction:
            run = meta_row(transaction, found.name).run
        collector = Collector(found, PayloadStore(url, run))
        return collector.sweep(older_than_s), collector.collect()


def _is_orphan(transaction: Transaction, key: str, owner: tuple[int, int] | None) -> bool:
    """Tell whether no group has the object, and none can get it: the row that a push locks is
    locked.
    """
    if owner is not None:  # else the beginning of an upload to a folder that was killed
        transaction.one(
            f"SELECT id FROM work_items WHERE id = ? {transaction.lock('work_items')}", owner[0]
        )
        row = transaction.one("SELECT key FROM payloads WHERE work_item = ?", owner[0])
        if row is not None and row.key == key:
            return False
    return transaction.one("SELECT key FROM garbage WHERE key = ?", key) is None
