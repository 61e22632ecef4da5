"""What rollout nodes ask for besides pushing: to take part, leases, their renewal, and to give them
back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from flowtrain.config.options import to_toml
from flowtrain.dataflow.codec import pack, unpack
from flowtrain.dataflow.contract import (
    Done,
    Join,
    Joined,
    Lease,
    LeaseRequest,
    Leases,
    Refused,
    Release,
    Renewal,
    Renewed,
    check_protocol,
)
from flowtrain.dataflow.ledger.base import LedgerBase, seconds, states
from flowtrain.dataflow.ledger.curation import number_groups
from flowtrain.dataflow.ledger.room import drop_surplus, room_of, sampled_version, standing
from flowtrain.dataflow.ledger.sql import Transaction, marks
from flowtrain.types import Task
from flowtrain.utils.seeds import derive_seed, derive_uniform

MAX_UNITS = 1024
"""In a request."""
_MAX_DRAWS = 1000
"""Tasks that the curator is asked about for a request."""
_RETRY_S = {"": 0.0, "full": 0.5, "curated": 0.5, "no trainer": 1.0, "done": 5.0}


class NodeRequests(LedgerBase):
    def join(self, request: Join) -> Joined:
        check_protocol("node", request.protocol)
        for name in (request.node, request.life):
            if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name):
                raise Refused(
                    f"node {name[:100]!r}: a name has 1 to 100 letters, digits, '.', '_' and '-', "
                    "and so has a life"
                )
        with self._alone() as (transaction, meta):
            policies = transaction.all("SELECT * FROM policies")
            _check_layouts(request.node, request.layouts, policies)
            if not transaction.one(
                "SELECT life FROM nodes WHERE name = ? AND life = ?", request.node, request.life
            ):
                self._begin(transaction, request)
        return Joined(
            meta.run,
            to_toml(self._config),
            self._config.rollout.group_size,
            self._options.lease_s,
            states(policies),
        )

    def _begin(self, transaction: Transaction, request: Join) -> None:
        """A new life; leases of the last one end."""
        now = self._clock()
        transaction.run("UPDATE nodes SET is_current = 0 WHERE name = ?", request.node)
        life = (
            request.node,
            request.life,
            1,
            now,
            now,
            self._own(request.layouts),
            "{}",
            "",
            0.0,
            0.0,
        )
        transaction.run(f"INSERT INTO nodes VALUES {marks(life)}", *life)
        lock = transaction.lock("units")
        held = transaction.all(
            f"SELECT id, attempt FROM units WHERE state = 'leased' AND node = ? ORDER BY id {lock}",
            request.node,
        )
        self._give_back(transaction, [(row.id, row.attempt) for row in held], "node began anew")

    def lease(self, request: LeaseRequest) -> Leases:
        if not 1 <= request.num <= MAX_UNITS:
            raise Refused(f"num={request.num}: a node may ask for 1 to {MAX_UNITS} units")
        if len(request.key) > 100:
            raise Refused(
                f"the key of a request has at most 100 characters, this one {len(request.key)}"
            )
        now = self._clock()
        with self._fold.turn(), self._alone() as (transaction, meta):
            node = self._heard(transaction, request, now)
            policies = standing(transaction)
            _check_layouts(request.node, json.loads(node.layouts), policies)
            if request.key and (same := self._granted(transaction, request)):
                return Leases(tuple(same), states(policies))
            self._end_overdue(transaction, now)
            drop_surplus(transaction, policies, self._options)
            num, reason = self._allowed(transaction, request, policies, now)
            leases = self._waiting(transaction, num)
            leases += self._drawn(transaction, meta, num - len(leases))
            self._grant(transaction, request, leases, now)
        if len(leases) < num:
            reason = "curated"
        return Leases(tuple(leases), states(policies), _RETRY_S[reason], reason)

    def _heard(self, transaction: Transaction, request: LeaseRequest, now: float) -> Any:
        """The node's row; notes what it says of itself."""
        node = transaction.one(
            "SELECT * FROM nodes WHERE name = ? AND life = ?", request.node, request.life
        )
        if node is None or not node.is_current:
            raise Refused(
                f"node {request.node!r}: "
                + (
                    "it has not joined"
                    if node is None
                    else "another process has joined by its name"
                )
            )
        is_new = not request.key or request.key != node.last_key
        transaction.run(
            "UPDATE nodes SET seen_s = ?, versions = ?, last_key = ?, busy_s = busy_s + ?, "
            "waited_s = waited_s + ?"
            " WHERE name = ? AND life = ?",
            now,
            self._own(request.versions),
            request.key,
            seconds(request.busy_s) if is_new else 0.0,
            seconds(request.waited_s) if is_new else 0.0,
            request.node,
            request.life,
        )
        return node

    def _allowed(
        self, transaction: Transaction, request: LeaseRequest, policies: Sequence[Any], now: float
    ) -> tuple[int, str]:
        """How many leases the node may have, and why not all that it wants."""
        if policies and all(policy.is_done for policy in policies):
            return 0, "done"
        live = [policy for policy in policies if self._is_live(policy, now)]
        if not live:
            return 0, "no trainer"
        num_leased = transaction.one("SELECT count(*) AS num FROM units WHERE state = 'leased'").num
        room = max(
            room_of(policy, num_leased, self._options, sampled_version(policy, request.versions))
            for policy in live
        )
        return max(0, min(request.num, room)), "full" if room < request.num else ""

    def _waiting(self, transaction: Transaction, num: int) -> list[Lease]:
        """Units that another node has had; one that is just being pushed late is passed over."""
        rows = transaction.all(
            "SELECT id, attempt, position, task FROM units WHERE state = 'waiting' ORDER BY id "
            "LIMIT ?"
            f" {transaction.lock('units', skip=True)}",
            num,
        )
        return [
            self._lease(row.id, row.attempt + 1, row.position, unpack(bytes(row.task), Task))
            for row in rows
        ]

    def _lease(self, unit: int, attempt: int, position: int, task: Task) -> Lease:
        return Lease(
            unit, attempt, task, derive_seed(self._config.run.seed, "unit", unit), position
        )

    def _drawn(self, transaction: Transaction, meta: Any, num: int) -> list[Lease]:
        """New units, of the next tasks that the curator admits."""
        if num == 0:
            return []
        num_events = number_groups(transaction, meta.num_events)
        curator = self._fold.caught_up(transaction)
        leases: list[Lease] = []
        decisions: list[tuple[object, ...]] = []
        while len(leases) < num and len(decisions) < num + _MAX_DRAWS:
            position = meta.num_positions + len(decisions)
            task = self._tasks[position]
            draw = derive_uniform(self._config.run.seed, "curate", position)
            is_admitted = curator.admits(task.id, task.kind, draw)
            decisions.append((position, task.id, task.kind, int(is_admitted), draw, num_events))
            if is_admitted:
                leases.append(self._lease(meta.num_units + len(leases) + 1, 1, position, task))
        transaction.many(f"INSERT INTO decisions VALUES {marks(range(6))}", decisions)
        transaction.many(
            "INSERT INTO units VALUES (?, ?, ?, ?, ?, 'waiting', 0, '', 0)",
            [
                (lease.unit, lease.index, lease.task.id, lease.task.kind, pack(lease.task))
                for lease in leases
            ],
        )
        transaction.run(
            "UPDATE meta SET num_positions = ?, num_units = ?",
            meta.num_positions + len(decisions),
            meta.num_units + len(leases),
        )
        return leases

    def _grant(
        self, transaction: Transaction, request: LeaseRequest, leases: Sequence[Lease], now: float
    ) -> None:
        until = now + self._options.lease_s
        transaction.many(
            "UPDATE units SET state = 'leased', attempt = ?, node = ?, until_s = ? WHERE id = ?",
            [(lease.attempt, request.node, until, lease.unit) for lease in leases],
        )
        transaction.many(
            f"INSERT INTO leases VALUES {marks(range(7))}",
            [
                (lease.unit, lease.attempt, request.node, request.life, request.key, now, "")
                for lease in leases
            ],
        )

    def _granted(self, transaction: Transaction, request: LeaseRequest) -> list[Lease]:
        """What the same request was answered before; it may have ended since."""
        rows = transaction.all(
            "SELECT l.unit, l.attempt, u.position, u.task FROM leases l JOIN units u ON u.id = "
            "l.unit"
            " WHERE l.node = ? AND l.key = ? ORDER BY l.unit",
            request.node,
            request.key,
        )
        return [
            self._lease(row.unit, row.attempt, row.position, unpack(bytes(row.task), Task))
            for row in rows
        ]

    def _own(self, by_policy: Mapping[str, object]) -> str:
        """Without what is said of policies that the flow has not."""
        return json.dumps(
            {
                policy: by_policy[policy]
                for policy in self._config.policy_names
                if policy in by_policy
            }
        )

    def renew(self, request: Renewal) -> Renewed:
        """A lease that ran out without another one having been given since goes on, too."""
        leases = _bounded(request.units)
        with self._database.write() as transaction:
            rows = transaction.all(
                "SELECT u.id, u.attempt FROM units u JOIN leases l ON l.unit = u.id AND l.attempt "
                "= u.attempt"
                " WHERE l.node = ? AND l.life = ? AND (u.state = 'leased' OR (u.state = 'waiting' "
                "AND l.ending = 'ran out'))"
                f" AND u.id IN {marks(leases)} ORDER BY u.id {transaction.lock('u')}",
                request.node,
                request.life,
                *(unit for unit, _ in leases),
            )
            held = [(row.id, row.attempt) for row in rows if (row.id, row.attempt) in leases]
            until = self._clock() + self._options.lease_s
            transaction.many(
                "UPDATE units SET state = 'leased', until_s = ? WHERE id = ?",
                [(until, unit) for unit, _ in held],
            )
            transaction.many(
                "UPDATE leases SET ending = '' WHERE unit = ? AND attempt = ? AND ending <> ''",
                held,
            )
            transaction.run(
                "UPDATE nodes SET seen_s = ? WHERE name = ? AND life = ?",
                self._clock(),
                request.node,
                request.life,
            )
            policies = transaction.all("SELECT * FROM policies")
        return Renewed(
            tuple(unit for unit, attempt in leases if (unit, attempt) not in held), states(policies)
        )

    def release(self, request: Release) -> Done:
        leases = _bounded(request.units)
        with self._database.write() as transaction:
            rows = transaction.all(
                "SELECT id, attempt FROM units WHERE state = 'leased' AND node = ? AND id IN "
                f"{marks(leases)} ORDER BY id"
                f" {transaction.lock('units')}",
                request.node,
                *(unit for unit, _ in leases),
            )
            held = [(row.id, row.attempt) for row in rows if (row.id, row.attempt) in leases]
            self._give_back(transaction, held, f"released: {request.reason[:200]}")
        return Done()


def _bounded(units: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    if not 1 <= len(units) <= MAX_UNITS:
        raise Refused(f"{len(units)} units: name 1 to {MAX_UNITS} of them")
    return units


def _check_layouts(node: str, layouts: Mapping[str, str], policies: Sequence[Any]) -> None:
    """Raises Refused when the node samples with another model than a trainer trains."""
    for policy in policies:
        if layouts.get(policy.name, policy.layout) != policy.layout:
            raise Refused(
                f"node {node!r} has a {policy.name} of layout {layouts[policy.name]}, the "
                f"trainer's is {policy.layout}:"
                " start the node with the model, the dtype and the tokenizer that are trained"
            )
