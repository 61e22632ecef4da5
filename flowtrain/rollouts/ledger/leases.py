"""Leases: a node takes work items, renews them while it works and gives back the rest.

A lease that ran out or was released goes to another node as the next attempt, before new work items
do. Backpressure bounds how many groups wait or are under way, so that sampled groups can still be
trained in time. Questions of evaluations come before all that, and backpressure does not know them.

Every request locks rows in one order, so that none wait in a circle: `meta`, the node's row of
`nodes`, `work_items` by number, `live_leases`, `sampled`. Leases skip work items that others have
locked, and need the lock of `meta` only where new ones have to be drawn.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from flowtrain.config import Config, Dataflow
from flowtrain.records import Task
from flowtrain.rollouts.codec import unpack
from flowtrain.rollouts.contract import (
    WAITING,
    Done,
    Lease,
    LeaseRequest,
    Leases,
    Refused,
    Release,
    Renewal,
    Renewed,
)
from flowtrain.rollouts.ledger.backpressure import Openings
from flowtrain.rollouts.ledger.counters import kind_of
from flowtrain.rollouts.ledger.evaluations import (
    evaluation_of,
    is_any_left,
    question,
    take_questions,
)
from flowtrain.rollouts.ledger.prompts import Prompts, num_leased
from flowtrain.rollouts.ledger.sql import Database, Transaction, marks
from flowtrain.rollouts.ledger.token_accounts import note_sampled
from flowtrain.rollouts.ledger.trainers import (
    check_layouts,
    check_seconds,
    known_policies,
    policy_rows,
    policy_states,
)
from flowtrain.utils.seeds import derive_seed

MAX_VERSION = 1 << 40
MAX_WORK_ITEMS = 1024
"""Work items in a request."""
LEASES_PER_ATTEMPT = 10
"""A work item fails without a failure, too, after so many leases times `max_attempts`."""
_log = logging.getLogger(__name__)
_CHECK = 0.05
"""Shortest time between two looks for leases that have run out, as a part of what they last."""
RAN_OUT = "ran out"
_EXTEND = (
    "INSERT INTO live_leases VALUES (?, ?, ?)"
    " ON CONFLICT (work_item) DO UPDATE SET node = excluded.node, until_s = excluded.until_s"
)
"""Lets a lease last longer, or begins one."""
_RETRY_S = {
    "": 0.0,
    "full": 0.5,
    "filtered": 0.5,
    "no trainer": 1.0,
    "evaluating": 1.0,
    "done": 5.0,
}
_MAX_RATE = 100.0
"""Requests per second of all nodes that wait, where none of them is held open."""


@dataclass(slots=True)
class LeaseBook:
    database: Database
    config: Config
    prompts: Prompts
    _steady_since: float | None = None
    """Time of the first request since the service began, or since its database was away last."""
    _checked_s: float = -inf
    """When leases that have run out were ended last, on the database's clock."""

    def lease(self, request: LeaseRequest) -> Leases:
        if not 1 <= request.num <= MAX_WORK_ITEMS:
            raise Refused(f"num={request.num}: a node may ask for 1 to {MAX_WORK_ITEMS} work items")
        if len(request.key) > 100:
            raise Refused(
                f"the key of a request has at most 100 characters, this one {len(request.key)}"
            )
        for name, version in request.versions.items():
            if not 0 <= version <= MAX_VERSION:
                raise Refused(f"version {version} of {name[:100]!r} does not exist")
        # First without the lock of `meta`, which only drawing new work items needs.
        with self.database.write() as transaction:
            answer = self._answer(transaction, request)
        if answer is None:
            with self.prompts.drawing(self.database) as (transaction, meta):
                answer = self._answer(transaction, request, meta)
                assert answer is not None
        return answer

    def _answer(
        self, transaction: Transaction, request: LeaseRequest, meta: Any = None
    ) -> Leases | None:
        """Grant leases, or return None where work items have to be drawn first and the caller has
        not locked `meta`.
        """
        now = transaction.now()
        node = self._locked_node(transaction, request)
        policies = policy_rows(transaction)
        states = policy_states(policies)
        check_layouts(request.node, json.loads(node.layouts), policies)
        if request.key and (earlier_leases := self._granted(transaction, request)):
            self._note_node(transaction, request, node, now)
            return Leases(tuple(earlier_leases), states)
        self._end_overdue(transaction, now)
        questions = take_questions(transaction, request.versions, request.num)
        num_wanted = request.num - len(questions)
        num, reason = self._allowed(transaction, request, num_wanted, policies, now)
        leases = self._take(transaction, num)
        if len(leases) < num:
            if meta is None:
                return None
            self.prompts.draw(transaction, meta, num - len(leases))
            leases = self._take(transaction, num)  # with those found before, granted below
        granted = (*questions, *leases)
        self._note_node(transaction, request, node, now)
        self._grant(transaction, request, granted, now)
        if len(leases) < num:
            reason = "filtered"
        retry_s = self._retry_s(transaction, reason, now)
        return Leases(granted, states, retry_s, reason)

    def _locked_node(self, transaction: Transaction, request: LeaseRequest) -> Any:
        """Lock the node's row, so that the same request sent twice, and the node's next process,
        wait for this one.
        """
        node = transaction.one(
            f"SELECT * FROM nodes WHERE name = ? AND life = ? {transaction.lock('nodes')}",
            *(request.node, request.life),
        )
        if node is None:
            raise Refused(f"node {request.node!r} has not joined")
        if node.is_current != 1:
            raise Refused(f"node {request.node!r}: another process has joined under this name")
        return node

    def _note_node(
        self, transaction: Transaction, request: LeaseRequest, node: Any, now: float
    ) -> None:
        """Note what the node reports about itself."""
        is_new = not request.key or request.key != node.last_key
        transaction.run(
            "UPDATE nodes SET seen_s = ?, versions = ?, last_key = ?, busy_s = busy_s + ?,"
            " waited_s = waited_s + ? WHERE name = ? AND life = ?",
            now,
            known_policies(self.config, request.versions),
            request.key,
            check_seconds(request.busy_s) if is_new else 0.0,
            check_seconds(request.waited_s) if is_new else 0.0,
            request.node,
            request.life,
        )
        note_sampled(transaction, self.config, request.node, request.life, request.sampled)

    def _granted(self, transaction: Transaction, request: LeaseRequest) -> list[Lease]:
        """Return the leases of an earlier request with the same key; they may have ended since."""
        rows = transaction.all(
            "SELECT l.work_item AS id, l.attempt, w.position, w.task FROM leases l"
            " JOIN work_items w ON w.id = l.work_item WHERE l.node = ? AND l.key = ?"
            " ORDER BY l.work_item",
            request.node,
            request.key,
        )
        return [
            self._lease_of(row, row.attempt)
            if row.id > 0
            else question(row, row.attempt, evaluation_of(transaction, row.id))
            for row in rows
        ]

    def _lease_of(self, row: Any, attempt: int) -> Lease:
        """Make the lease of a work item to train; its seed is the same for every attempt."""
        seed = derive_seed(self.config.run.seed, "unit", row.id)
        return Lease(row.id, attempt, unpack(bytes(row.task), Task), seed, row.position)

    def ends_overdue(self, now: float) -> bool:
        """Return whether the next request ends the leases that have run out. None does for the
        length of a lease after the service began, or its database came back that was away for half
        as long: nodes could not renew theirs.
        """
        lease_s = self.config.dataflow.lease_s
        if self._steady_since is None or self.database.take_outage_s() > lease_s / 2:
            self._steady_since = now
        # Seldom, because a reader of the whole history keeps every row that a renewal left behind.
        return now >= max(self._steady_since + lease_s, self._checked_s + _CHECK * lease_s)

    def _end_overdue(self, transaction: Transaction, now: float) -> None:
        if not self.ends_overdue(now):
            return
        self._checked_s = now
        rows = transaction.all(
            "SELECT w.id, w.attempt, v.node FROM live_leases v JOIN work_items w ON w.id ="
            f" v.work_item WHERE v.until_s < ? ORDER BY w.id {transaction.lock('v, w', skip=True)}",
            now,
        )
        overdue = [(row.id, row.attempt) for row in rows]
        end_leases(transaction, overdue, RAN_OUT, self.config.dataflow)
        for node, num in Counter(row.node for row in rows).items():
            text = "node %s has been silent for %g s: its %d work items go to other nodes"
            _log.info(text, node, self.config.dataflow.lease_s, num)

    def _allowed(
        self,
        transaction: Transaction,
        request: LeaseRequest,
        num_wanted: int,
        policies: Sequence[Any],
        now: float,
    ) -> tuple[int, str]:
        """Return how many leases of work to train the node may have, and why fewer than it wants.
        Requests of one moment do not see each other's leases, so a few more may be under way.
        """
        openings = Openings(policies, num_leased(transaction), now, self.config.dataflow)
        num, reason = openings.room(request.versions, num_wanted)
        if reason == "done" and is_any_left(transaction):
            reason = "evaluating"
        return num, reason

    def _retry_s(self, transaction: Transaction, reason: str, now: float) -> float:
        """Return when to ask again: the more nodes there are, the later."""
        if reason not in WAITING:
            return _RETRY_S[reason]
        nodes = transaction.one(
            "SELECT count(*) AS num FROM nodes WHERE is_current = 1 AND seen_s > ?",
            now - self.config.dataflow.lease_s,
        )
        return max(_RETRY_S[reason], float(nodes.num / _MAX_RATE))

    def _take(self, transaction: Transaction, num: int) -> list[Lease]:
        """Lease work items whose last lease has ended, except those just being pushed late, then
        those that have had none.
        """
        rows: list[Any] = []
        for state in ("waiting", "drawn"):
            if len(rows) < num:
                rows += transaction.all(
                    f"SELECT id, attempt, position, task FROM work_items WHERE state = '{state}'"
                    " AND evaluation = 0 ORDER BY id LIMIT ?"
                    f" {transaction.lock('work_items', skip=True)}",
                    num - len(rows),
                )
        return [self._lease_of(row, row.attempt + 1) for row in rows]

    def _grant(
        self, transaction: Transaction, request: LeaseRequest, leases: Sequence[Lease], now: float
    ) -> None:
        until = now + self.config.dataflow.lease_s
        transaction.many(
            "UPDATE work_items SET state = 'leased', attempt = ? WHERE id = ?",
            [(lease.attempt, lease.work_item) for lease in leases],
        )
        transaction.many(_EXTEND, [(lease.work_item, request.node, until) for lease in leases])
        common = (request.node, request.life, request.key, now, "")
        transaction.many(
            f"INSERT INTO leases VALUES {marks(range(7))}",
            [(lease.work_item, lease.attempt, *common) for lease in leases],
        )

    def renew(self, request: Renewal) -> Renewed:
        """Renew the leases; one that ran out is renewed too if no other node has taken it. Without
        any lease the node shows that it lives, and hears what is new.
        """
        leases = _bounded(request.work_items, 0)
        with self.database.write() as transaction:
            now = transaction.now()
            is_known = transaction.run(
                "UPDATE nodes SET seen_s = ? WHERE name = ? AND life = ?",
                *(now, request.node, request.life),
            )
            _lock_work_items(transaction, leases)
            rows = transaction.all(
                # A cross join, or SQLite would read all leases that the node ever had.
                "SELECT w.id, w.attempt, w.state FROM work_items w CROSS JOIN leases l"
                " WHERE l.work_item = w.id AND l.attempt = w.attempt"
                " AND l.node = ? AND l.life = ? AND (w.state = 'leased'"
                f" OR (w.state = 'waiting' AND l.ending = '{RAN_OUT}'))"
                f" AND w.id IN {marks(leases)} ORDER BY w.id",
                request.node,
                request.life,
                *(work_item for work_item, _ in leases),
            )
            renewable = [row for row in rows if (row.id, row.attempt) in leases]
            until = now + self.config.dataflow.lease_s
            transaction.many(_EXTEND, [(row.id, request.node, until) for row in renewable])
            taken_back = [(row.id, row.attempt) for row in renewable if row.state == "waiting"]
            transaction.many(
                "UPDATE work_items SET state = 'leased' WHERE id = ? AND attempt = ?", taken_back
            )
            transaction.many(
                "UPDATE leases SET ending = '' WHERE work_item = ? AND attempt = ?", taken_back
            )
            transaction.count("", "ended", RAN_OUT, -len(taken_back))
            if is_known:
                note_sampled(transaction, self.config, request.node, request.life, request.sampled)
            policies = transaction.all("SELECT * FROM policies")
        renewed = {(row.id, row.attempt) for row in renewable}
        lost = tuple(number for number, attempt in leases if (number, attempt) not in renewed)
        return Renewed(lost, policy_states(policies))

    def release(self, request: Release) -> Done:
        leases = _bounded(request.work_items, 0 if request.life else 1)
        with self.database.write() as transaction:
            num_ended = transaction.run(
                "UPDATE nodes SET is_current = 0 WHERE name = ? AND life = ? AND is_current = 1",
                *(request.node, request.life),
            )
            _lock_work_items(transaction, leases)
            rows = transaction.all(
                "SELECT w.id, w.attempt, l.life FROM work_items w JOIN leases l"
                " ON l.work_item = w.id AND l.attempt = w.attempt"
                f" WHERE w.state = 'leased' AND l.node = ? AND w.id IN {marks(leases)}",
                *(request.node, *(work_item for work_item, _ in leases)),
            )
            keys = [(row.id, row.attempt) for row in rows if (row.id, row.attempt) in leases]
            ending, options = f"released: {request.reason[:200]}", self.config.dataflow
            end_leases(transaction, keys, ending, options, is_failure=request.is_failure)
            for life in sorted({row.life for row in rows}):
                note_sampled(transaction, self.config, request.node, life, request.sampled)
        if num_ended:
            _log.info("node %s ended: %s", request.node, request.reason[:200] or "its work is done")
        return Done()


def end_leases_of(transaction: Transaction, node: str, ending: str, options: Dataflow) -> None:
    """End all leases that a node holds."""
    rows = transaction.all(
        "SELECT w.id, w.attempt FROM work_items w JOIN live_leases v ON v.work_item = w.id"
        f" WHERE v.node = ? AND w.state = 'leased' ORDER BY w.id {transaction.lock('w')}",
        node,
    )
    end_leases(transaction, [(row.id, row.attempt) for row in rows], ending, options)


def end_leases(
    transaction: Transaction,
    leases: list[tuple[int, int]],
    ending: str,
    options: Dataflow,
    *,
    is_failure: bool = False,
) -> None:
    """Let work items wait for another lease, or fail after `max_attempts` failures. The caller has
    locked them.

    Nodes that end or are slow say nothing about the work; many leases say that it ends nodes.
    """
    transaction.many(
        "UPDATE work_items SET failures = failures + ?, state = CASE"
        " WHEN failures + ? >= ? OR attempt >= ? THEN 'failed' ELSE 'waiting' END WHERE id = ?",
        [
            (
                *(int(is_failure), int(is_failure)),
                *(options.max_attempts, options.max_attempts * LEASES_PER_ATTEMPT, work_item),
            )
            for work_item, _ in leases
        ],
    )
    transaction.many(
        "UPDATE leases SET ending = ? WHERE work_item = ? AND attempt = ?",
        [(ending, work_item, n) for work_item, n in leases],
    )
    transaction.count("", "ended", kind_of(ending), len(leases))
    transaction.many(
        "DELETE FROM live_leases WHERE work_item = ?", [(work_item,) for work_item, _ in leases]
    )


def _lock_work_items(transaction: Transaction, leases: Sequence[tuple[int, int]]) -> None:
    """Lock work items, so that a later statement sees what others have made of their leases."""
    transaction.all(
        f"SELECT id FROM work_items WHERE id IN {marks(leases)} ORDER BY id"
        f" {transaction.lock('work_items')}",
        *(work_item for work_item, _ in leases),
    )


def _bounded(work_items: Sequence[tuple[int, int]], minimum: int = 1) -> Sequence[tuple[int, int]]:
    if not minimum <= len(work_items) <= MAX_WORK_ITEMS:
        raise Refused(f"{len(work_items)} work items: name {minimum} to {MAX_WORK_ITEMS} of them")
    return work_items
