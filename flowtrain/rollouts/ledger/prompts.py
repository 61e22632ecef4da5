"""The choice of prompts: the order of the ledger's events, the prompt filter that observes them,
and its recorded decisions.

Groups and new versions become events in the order of their commits, numbered without gaps by the
holder of the lock of `meta`. Pushes do not take that lock: the next process that needs the order
numbers the groups that were pushed until then.

A prompt filter observes only events whose numbers are committed, and those of a long history before
the lock is taken, a portion at a time: so no error takes anything back that it has seen, and
neither memory nor the time that a transaction may take bounds a run. A filter that admits all has
nothing to observe: its work items are drawn ahead, so that most leases need no lock but theirs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from flowtrain.records import Task
from flowtrain.rollouts.codec import pack, unpack
from flowtrain.rollouts.ledger.schema import locked
from flowtrain.rollouts.ledger.sql import Database, Transaction, marks
from flowtrain.rollouts.rules import Candidate, Outcome, PromptFilter
from flowtrain.rollouts.rules.builtin import AllPrompts
from flowtrain.utils.seeds import derive_uniform

_MAX_DRAWS = 1000
"""Tasks that the prompt filter may reject in one request."""
_AHEAD = 256
"""Work items that are drawn at once where the prompt filter admits all."""
_PORTION = 10_000
"""Events that are read at once."""
_CHECKED = 256
"""Work items whose tasks are compared when a ledger is opened."""


@dataclass(frozen=True, slots=True)
class Event:
    number: int
    """1, 2, 3, ... in the order of commits."""
    outcome: Outcome | None
    """None for a new version."""
    version: int = 0


def number_groups(transaction: Transaction, num_events: int) -> int:
    """Number the groups committed since the last call and return the number of events. The caller
    holds the lock of `meta`.
    """
    num_new = transaction.run(
        "UPDATE groups SET event = ? + new.position FROM"
        " (SELECT work_item, row_number() OVER (ORDER BY pushed_s, work_item) AS position"
        " FROM groups WHERE event IS NULL) AS new WHERE groups.work_item = new.work_item",
        num_events,
    )
    if num_new:
        transaction.run(
            "UPDATE meta SET num_events = ?, num_groups = num_groups + ?",
            *(num_events + num_new, num_new),
        )
    return num_events + num_new


def num_leased(transaction: Transaction) -> int:
    """Count the work items to train that are leased: those that are nothing else, so that the
    count takes no longer the more there are.
    """
    # Without the plus SQLite would read all work items that there ever were, by another index.
    other_states = " - ".join(
        f"(SELECT count(*) FROM work_items WHERE state = '{state}' AND +evaluation = 0)"
        for state in ("waiting", "drawn", "failed")
    )
    row = transaction.one(
        f"SELECT num_work_items - num_groups - {other_states}"
        " - (SELECT count(*) FROM groups WHERE event IS NULL) AS num FROM meta"
    )
    return int(row.num)


def read_events(transaction: Transaction, after: int, to: int) -> list[Event]:
    """Read the events with numbers from `after` + 1 to `to`; the versions are those of the policy
    registered first.
    """
    groups = transaction.all(
        "SELECT g.event, g.work_item, g.rewards, g.num_tokens, g.pushed_s, w.task_id, w.kind"
        " FROM groups g JOIN work_items w ON w.id = g.work_item WHERE g.event > ? AND g.event <= ?",
        *(after, to),
    )
    bumps = transaction.all(
        "SELECT event, version FROM bumps WHERE event > ? AND event <= ?", after, to
    )
    events = [Event(row.event, outcome(row)) for row in groups]
    events += [Event(row.event, None, row.version) for row in bumps]
    return sorted(events, key=lambda event: event.number)


def outcome(row: Any) -> Outcome:
    rewards = tuple(json.loads(row.rewards))
    task_fields = (row.work_item, row.task_id, row.kind)
    return Outcome(*task_fields, rewards, row.num_tokens, row.pushed_s)


def candidate(row: Any, max_staleness: int) -> Candidate:
    """Make a candidate from the row of a share with its group and work item."""
    return Candidate(outcome(row), row.min_version + max_staleness, row.event)


class Cursor(Protocol):
    """Walks over tasks, like `flowtrain.tasks.TaskCursor`; its position is its whole state."""

    position: int

    def take(self, n: int) -> list[Task]: ...


class TaskOrder:
    """Random access to the order in which a cursor takes batches of `batch_size` tasks."""

    def __init__(self, cursor: Cursor, batch_size: int) -> None:
        self._cursor = cursor
        self._size = batch_size
        self._number = -1
        self._batch: list[Task] = []

    def __getitem__(self, position: int) -> Task:
        number, index = divmod(position, self._size)
        if number != self._number:
            self._cursor.position = number * self._size
            self._batch = self._cursor.take(self._size)
            self._number = number
        return self._batch[index]


class Prompts:
    """Draws new work items: the next tasks that the prompt filter admits."""

    def __init__(self, tasks: TaskOrder, prompt_filter: PromptFilter, seed: int) -> None:
        """`prompt_filter` has observed nothing yet."""
        self._tasks = tasks
        self._seed = seed
        self._filter = prompt_filter
        self._has_state = not isinstance(prompt_filter, AllPrompts)
        self._num_seen = 0
        self._mutex = threading.Lock()

    @contextmanager
    def drawing(self, database: Database) -> Iterator[tuple[Transaction, Any]]:
        """Begin a transaction that may draw, as a context: it, and the locked row of `meta`."""
        with self._mutex:  # what the filter has observed is a state of this process alone
            if self._has_state:
                self._catch_up(database)
            with locked(database) as (transaction, meta):
                yield transaction, meta

    def _catch_up(self, database: Database) -> None:
        """Number the groups that were pushed until now, and observe all events."""
        with database.read() as transaction:
            group = transaction.one("SELECT work_item FROM groups WHERE event IS NULL LIMIT 1")
        if group is not None:
            with locked(database) as (transaction, meta):
                number_groups(transaction, meta.num_events)
        while events := self._next_events(database):
            self._observe(events)

    def _next_events(self, database: Database) -> list[Event]:
        with database.read() as transaction:
            return read_events(transaction, self._num_seen, self._num_seen + _PORTION)

    def _observe(self, events: list[Event]) -> None:
        for event in events:
            if event.outcome is None:
                self._filter.on_version(event.version)
            else:
                self._filter.observe(event.outcome)
            self._num_seen = event.number

    def draw(self, transaction: Transaction, meta: Any, num: int) -> None:
        """Add `num` work items or more, if the prompt filter admits as many; `drawing` made the
        transaction.
        """
        if self._has_state:  # what others have numbered since `drawing` looked
            self._observe(read_events(transaction, self._num_seen, meta.num_events))
        else:
            num = max(num, _AHEAD)
        drawn: list[tuple[int, int, Task]] = []
        decisions: list[tuple[object, ...]] = []
        while len(drawn) < num and len(decisions) < num + _MAX_DRAWS:
            position = meta.num_positions + len(decisions)
            task = self._tasks[position]
            draw = derive_uniform(self._seed, "curate", position)
            is_admitted = self._filter.admits(task.id, task.kind, draw)
            decisions.append((position, task.id, task.kind, int(is_admitted)))
            if is_admitted:
                drawn.append((meta.num_work_items + len(drawn) + 1, position, task))
        transaction.many(f"INSERT INTO decisions VALUES {marks(range(4))}", decisions)
        transaction.many(
            "INSERT INTO work_items VALUES (?, ?, ?, ?, ?, 'drawn', 0, 0, 0)",
            [
                (number, position, task.id, task.kind, pack(task))
                for number, position, task in drawn
            ],
        )
        transaction.run(
            "UPDATE meta SET num_positions = ?, num_work_items = ?",
            meta.num_positions + len(decisions),
            meta.num_work_items + len(drawn),
        )

    def open(self, database: Database) -> str:
        """Walk to where the ledger is in the order of tasks, which takes longer the more there have
        been and so must not happen under its lock. Return how the first tasks differ from those
        that the ledger has given out; "": they do not. Their file may have moved.
        """
        with database.read() as transaction:
            position = transaction.one("SELECT num_positions FROM meta").num_positions
            rows = transaction.all(
                "SELECT position, task FROM work_items WHERE evaluation = 0"
                " ORDER BY position LIMIT ?",
                _CHECKED,
            )
        for row in rows:
            old_task = unpack(bytes(row.task), Task)
            new_task = unpack(pack(self._tasks[row.position]), Task)
            if old_task != new_task:
                return f"the task at {row.position} was {old_task.id!r} and is {new_task.id!r} now"
        self._tasks[position]
        return ""
