"""What all answers of the ledger are made with: the database, the options, the order of the tasks,
the rules and the clock.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from flowtrain.config import Config
from flowtrain.dataflow.contract import PolicyState, Refused
from flowtrain.dataflow.ledger.curation import Fold
from flowtrain.dataflow.ledger.schema import prepare
from flowtrain.dataflow.ledger.sql import Transaction, connect
from flowtrain.dataflow.rules import Rules, load
from flowtrain.types import Task


class Cursor(Protocol):
    """Walks over tasks, as `flowtrain.tasks.TaskCursor`: where it is is the whole of its state."""

    position: int

    def take(self, n: int) -> list[Task]: ...


class TaskOrder:
    """The task at any place of the order in which a cursor takes batches of `batch_size`."""

    def __init__(self, cursor: Cursor, batch_size: int) -> None:
        self._cursor = cursor
        self._size = batch_size
        self._number = -1
        self._batch: list[Task] = []

    def __getitem__(self, position: int) -> Task:
        number, place = divmod(position, self._size)
        if number != self._number:
            self._cursor.position = number * self._size
            self._number, self._batch = number, self._cursor.take(self._size)
        return self._batch[place]


class LedgerBase:
    """Many threads may use it at once, and many processes the same database."""

    def __init__(
        self,
        database: str | Path,
        config: Config,
        tasks: Cursor,
        make_rules: Callable[[], Rules] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Makes the tables in an empty database. UserError when it cannot be used or belongs to
        another run.

        `make_rules` returns rules that have observed nothing; by default those that the config
        names.
        """
        self._make_rules = make_rules or (lambda: load(config.dataflow))
        rules = self._make_rules()
        self._config, self._options, self._clock = config, config.dataflow, clock
        self._filter, self._selector = rules.filter, rules.selector
        self._fold = Fold(lambda: self._make_rules().curator)
        self._tasks = TaskOrder(tasks, config.rollout.num_questions)
        self._database = connect(database)
        self._num_pushed = 0
        self._pushed = threading.Condition()
        self.run: str = prepare(self._database, _fixed(config)).run
        """Identity of the run."""

    def close(self) -> None:
        """Closes the connections; a later request opens new ones."""
        self._database.close()

    @contextmanager
    def _alone(self) -> Iterator[tuple[Transaction, Any]]:
        """A transaction with the lock of `meta`, and its row: one at a time over all processes."""
        with self._database.write() as transaction:
            yield transaction, transaction.one(f"SELECT * FROM meta {transaction.lock('meta')}")

    def _is_live(self, policy: Any, now: float) -> bool:
        return not policy.is_done and now - policy.seen_s <= self._options.trainer_timeout_s

    def _end_overdue(self, transaction: Transaction, now: float) -> None:
        """Leases that have run out end."""
        rows = transaction.all(
            "SELECT id, attempt FROM units WHERE state = 'leased' AND until_s < ? ORDER BY id "
            f"{transaction.lock('units', skip=True)}",
            now,
        )
        self._give_back(transaction, [(row.id, row.attempt) for row in rows], "ran out")

    def _give_back(
        self, transaction: Transaction, leases: list[tuple[int, int]], ending: str
    ) -> None:
        """Units wait for another lease, or have failed. The caller has locked them."""
        most = self._options.max_attempts
        transaction.many(
            "UPDATE units SET state = ? WHERE id = ?",
            [("failed" if n >= most else "waiting", unit) for unit, n in leases],
        )
        transaction.many(
            "UPDATE leases SET ending = ? WHERE unit = ? AND attempt = ?",
            [(ending, unit, n) for unit, n in leases],
        )


def states(policies: Sequence[Any]) -> Mapping[str, PolicyState]:
    return {row.name: PolicyState(row.version, row.store, row.layout) for row in policies}


def seconds(value: float) -> float:
    """Of what a node or trainer says it did; raises Refused for what no clock shows."""
    if not 0 <= value <= 1e9:
        raise Refused(f"{value} is no number of seconds")
    return value


def _fixed(config: Config) -> str:
    """The options that decide what a unit is, a line each; the others may change while a run goes
    on.
    """
    whole = config.model_dump(mode="json")
    keys = [
        "run.seed",
        *(f"tasks.{key}" for key in whole["tasks"]),
        "rollout.group_size",
        "rollout.num_questions",
    ]
    parts = [
        (key, *key.split(".")) for key in [*keys, "dataflow.curator", "dataflow.curator_options"]
    ]
    return "\n".join(
        f"{key} = {json.dumps(whole[section][name], sort_keys=True)}"
        for key, section, name in parts
    )
