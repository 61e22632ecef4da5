"""Which tasks become units: the curator as a fold over the ledger, and its decisions on record.

Groups and version bumps become events in the order of their commits, numbered without gaps by
whoever holds the lock of `meta`. Pushes do not take that lock: the next one who needs the order
numbers what was pushed until then.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flowtrain.dataflow.ledger.sql import Transaction
from flowtrain.dataflow.rules import Curator, Outcome


@dataclass(frozen=True, slots=True)
class Event:
    number: int
    """1, 2, 3, ... in the order of commits."""
    outcome: Outcome | None
    """None for a new version."""
    version: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Of the curator, about one place in the order of the tasks."""

    position: int
    task_id: str
    kind: str
    draw: float
    num_events: int
    """It had seen the first so many."""
    is_admitted: bool


class Fold:
    """A curator that has seen the first events, used by one thread at a time."""

    def __init__(self, make_curator: Callable[[], Curator]) -> None:
        self._make = make_curator
        self._curator = make_curator()
        self._num_seen = 0
        self._mutex = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around a transaction that uses the fold. If it fails, events that were seen may not have
        come to pass: the fold begins anew.
        """
        with self._mutex:
            try:
                yield
            except BaseException:
                self._curator, self._num_seen = self._make(), 0
                raise

    def caught_up(self, transaction: Transaction) -> Curator:
        """Needs the lock of `meta` and that all events are numbered."""
        for event in events(transaction, self._num_seen):
            if event.outcome is None:
                self._curator.on_version(event.version)
            else:
                self._curator.observe(event.outcome)
            self._num_seen = event.number
        return self._curator


def number_groups(transaction: Transaction, num_events: int) -> int:
    """Numbers the groups that have been committed since; needs the lock of `meta`. Returns how many
    events there are now.
    """
    num_new = transaction.run(
        "UPDATE groups SET event = ? + new.place"
        " FROM (SELECT unit, row_number() OVER (ORDER BY pushed_s, unit) AS place FROM groups "
        "WHERE event IS NULL) AS new"
        " WHERE groups.unit = new.unit",
        num_events,
    )
    if num_new:
        transaction.run("UPDATE meta SET num_events = ?", num_events + num_new)
    return num_events + num_new


def events(transaction: Transaction, after: int) -> Iterator[Event]:
    """Those with greater numbers; versions are those of the policy that was registered first."""
    groups = transaction.all(
        "SELECT g.event, g.unit, g.rewards, g.num_tokens, u.task_id, u.kind FROM groups g JOIN "
        "units u ON u.id = g.unit WHERE g.event > ?",
        after,
    )
    bumps = transaction.all("SELECT event, version FROM bumps WHERE event > ?", after)
    found = [
        Event(
            row.event,
            Outcome(
                row.unit, row.task_id, row.kind, tuple(json.loads(row.rewards)), row.num_tokens
            ),
        )
        for row in groups
    ]
    found += [Event(row.event, None, row.version) for row in bumps]
    yield from sorted(found, key=lambda event: event.number)


def decisions(transaction: Transaction) -> list[Decision]:
    return [
        Decision(row.position, row.task_id, row.kind, row.draw, row.num_events, bool(row.admitted))
        for row in transaction.all("SELECT * FROM decisions ORDER BY position")
    ]
