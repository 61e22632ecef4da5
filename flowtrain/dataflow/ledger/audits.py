"""Audits: an auditor that the run trusts checks a random share of the committed groups. A node that
lied is shut out, and what waits of its groups is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowtrain.config import Config
from flowtrain.dataflow.codec import unpack
from flowtrain.dataflow.contract import (
    AuditRequest,
    Done,
    Finding,
    Refused,
    StoredPayload,
    ToAudit,
)
from flowtrain.dataflow.ledger.leases import end_leases_of, make_lease
from flowtrain.dataflow.ledger.schema import locked
from flowtrain.dataflow.ledger.sql import Database, Transaction
from flowtrain.dataflow.ledger.trainers import policy_states
from flowtrain.dataflow.ledger.trust import drop_distrusted
from flowtrain.types import Task

_AUDIT_S = 600.0
"""Seconds after which another auditor gets a group of which nothing was heard."""
_MAX_PROBLEM = 500


@dataclass(frozen=True, slots=True)
class Audits:
    database: Database
    config: Config

    def to_audit(self, request: AuditRequest) -> ToAudit:
        """Give out the oldest group that is to be checked and that no other auditor has."""
        with locked(self.database) as (transaction, _):
            policies = transaction.all("SELECT * FROM policies")
            states = policy_states(policies)
            now = transaction.now()
            row = self._next(transaction, now)
            if row is None:
                is_over = bool(policies) and all(policy.is_done for policy in policies)
                return ToAudit(states, is_over=is_over)
            transaction.run(
                "UPDATE audits SET auditor = ?, until_s = ? WHERE work_item = ?",
                *(request.auditor, now + _AUDIT_S, row.work_item),
            )
        task = unpack(bytes(row.task), Task)
        lease = make_lease(self.config, row.work_item, row.attempt, row.position, task)
        stored = StoredPayload(row.key, row.num_bytes, row.sha256) if row.key else None
        return ToAudit(states, lease, bytes(row.payload), stored)

    def _next(self, transaction: Transaction, now: float) -> Any:
        """Return the row of the next group; those whose payload is gone were missed."""
        transaction.run(
            "UPDATE audits SET state = 'missed' WHERE state = 'open' AND work_item NOT IN"
            " (SELECT work_item FROM payloads)"
        )
        return transaction.one(
            "SELECT a.work_item, a.attempt, w.position, w.task, d.payload, d.key, d.num_bytes,"
            " d.sha256 FROM audits a JOIN work_items w ON w.id = a.work_item"
            " JOIN payloads d ON d.work_item = a.work_item"
            " WHERE a.state = 'open' AND a.until_s < ? ORDER BY a.work_item LIMIT 1",
            now,
        )

    def found(self, request: Finding) -> Done:
        """Note a finding; the first about a group counts."""
        with locked(self.database) as (transaction, _):
            row = transaction.one(
                "SELECT * FROM audits WHERE work_item = ? AND attempt = ?",
                *(request.work_item, request.attempt),
            )
            if row is None or row.auditor != request.auditor:
                raise Refused(
                    f"work item {request.work_item} was not given to the auditor "
                    f"{request.auditor[:100]!r}"
                )
            if row.state not in ("open", "missed"):
                return Done()
            state = "lie" if request.is_lie else "unclear" if request.problem else "sound"
            problem = request.problem[:_MAX_PROBLEM]
            transaction.run(
                "UPDATE audits SET state = ?, problem = ? WHERE work_item = ?",
                *(state, problem, request.work_item),
            )
            if request.is_lie:
                self._shut_out(transaction, row.node, request.work_item, problem)
        return Done()

    def _shut_out(self, transaction: Transaction, node: str, work_item: int, problem: str) -> None:
        """End the leases of a node and drop its groups that no batch has had."""
        transaction.run(
            "INSERT INTO distrusted VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
            *(node, work_item, problem, transaction.now()),
        )
        end_leases_of(transaction, node, "node lied", self.config.dataflow)
        for policy in transaction.all("SELECT name, newest FROM policies"):
            drop_distrusted(transaction, policy)


def audits_report(transaction: Transaction) -> dict[str, Any]:
    """Count audited groups by state, and name the nodes that lied with what they did."""
    groups = transaction.all("SELECT state, count(*) AS num FROM audits GROUP BY state ORDER BY 1")
    nodes = transaction.all("SELECT node, problem FROM distrusted ORDER BY since_s, node")
    return {
        "groups": {row.state: row.num for row in groups},
        "distrusted": {row.node: row.problem for row in nodes},
    }
