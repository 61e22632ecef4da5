"""Does the ledger add up? Queries that must find nothing; they ask the tables, not the code that
wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from flowtrain.dataflow.ledger.schema import ledger_row
from flowtrain.dataflow.ledger.sql import Transaction, connect
from flowtrain.types import UserError


@dataclass(frozen=True, slots=True)
class Audit:
    problems: tuple[str, ...]
    """What does not add up, with the first unit, step or place that it was found at; empty: nothing
    is lost, nothing counted twice."""
    counts: dict[str, int]
    """Units by state, shares by policy and state ("planner.served"), leases that ended without a
    group by why."""


_FINDS = {
    "units are not numbered without gaps": "SELECT num_units AS at FROM meta WHERE num_units <> "
    "(SELECT count(*) FROM units)"
    " OR num_units <> (SELECT coalesce(max(id), 0) FROM units)",
    "a unit has no known state": "SELECT id AS at FROM units WHERE state NOT IN ('leased', "
    "'waiting', 'committed', 'failed')",
    "a place in the order of tasks was not decided about once": "SELECT num_positions AS at FROM "
    "meta WHERE num_positions <>"
    " (SELECT count(*) FROM decisions) OR num_positions <> (SELECT coalesce(max(position), -1) + 1 "
    "FROM decisions)",
    "an admitted task has no unit": "SELECT d.position AS at FROM decisions d LEFT JOIN units u ON "
    "u.position = d.position"
    " WHERE d.admitted = 1 AND (u.id IS NULL OR u.task_id <> d.task_id)",
    "a unit's task was not admitted": "SELECT u.id AS at FROM units u LEFT JOIN decisions d ON "
    "d.position = u.position"
    " WHERE coalesce(d.admitted, 0) = 0",
    "a unit does not have as many leases as attempts": "SELECT u.id AS at FROM units u"
    " WHERE u.attempt <> (SELECT count(*) FROM leases l WHERE l.unit = u.id)",
    "a unit is open and its last lease says otherwise": "SELECT u.id AS at FROM units u JOIN "
    "leases l ON l.unit = u.id"
    " AND l.attempt = u.attempt WHERE (u.state = 'leased' AND l.ending <> '') OR (u.state IN "
    "('waiting', 'failed') AND l.ending = '')",
    "a committed unit has no group": "SELECT u.id AS at FROM units u LEFT JOIN groups g ON g.unit "
    "= u.id"
    " WHERE u.state = 'committed' AND g.unit IS NULL",
    "a group's unit is not committed": "SELECT g.unit AS at FROM groups g LEFT JOIN units u ON "
    "u.id = g.unit"
    " WHERE coalesce(u.state, '') <> 'committed'",
    "a group was not leased to who pushed it": "SELECT g.unit AS at FROM groups g LEFT JOIN leases "
    "l ON l.unit = g.unit"
    " AND l.attempt = g.attempt WHERE coalesce(l.node, '') <> g.node",
    "events are not numbered without gaps": "SELECT num_events AS at FROM meta WHERE num_events <> "
    "(SELECT count(event) FROM groups)"
    " + (SELECT count(*) FROM bumps) OR num_events < (SELECT coalesce(max(event), 0) FROM groups)"
    " OR num_events < (SELECT coalesce(max(event), 0) FROM bumps)",
    "two events have one number": "SELECT g.event AS at FROM groups g JOIN bumps b ON b.event = "
    "g.event",
    "a group has no share": "SELECT g.unit AS at FROM groups g LEFT JOIN shares s ON s.unit = "
    "g.unit WHERE s.unit IS NULL",
    "a share has no group": "SELECT s.unit AS at FROM shares s LEFT JOIN groups g ON g.unit = "
    "s.unit WHERE g.unit IS NULL",
    "a share has no known state": "SELECT unit AS at FROM shares"
    " WHERE state NOT IN ('fresh', 'served', 'stale', 'filtered', 'surplus', 'empty') OR (state = "
    "'fresh') <> (step IS NULL)",
    "a served share is not in the batch of its step once": "SELECT s.unit AS at FROM shares s "
    "WHERE s.state = 'served' AND 1 <>"
    " (SELECT count(*) FROM places l WHERE l.policy = s.policy AND l.unit = s.unit AND l.is_replay "
    "= 0 AND l.step = s.step)",
    "a share is in a batch and was not served": "SELECT l.unit AS at FROM places l LEFT JOIN "
    "shares s ON s.unit = l.unit"
    " AND s.policy = l.policy WHERE coalesce(s.state, '') <> 'served'",
    "a group is trained again before it was trained": "SELECT l.unit AS at FROM places l JOIN "
    "shares s ON s.unit = l.unit"
    " AND s.policy = l.policy WHERE l.is_replay = 1 AND s.step >= l.step",
    "a group is twice in one batch": "SELECT unit AS at FROM places GROUP BY policy, step, unit "
    "HAVING count(*) > 1",
    "a batch does not have its groups": "SELECT b.step AS at FROM batches b WHERE b.num_groups <> "
    "(SELECT count(*) FROM places l"
    " WHERE l.policy = b.policy AND l.step = b.step AND l.place >= 0 AND l.place < b.num_groups)",
    "a group has no batch": "SELECT l.step AS at FROM places l LEFT JOIN batches b ON b.policy = "
    "l.policy AND b.step = l.step"
    " WHERE b.step IS NULL",
    "a batch has a group that is too old, or too new": "SELECT l.unit AS at FROM places l JOIN "
    "shares s ON s.unit = l.unit"
    " AND s.policy = l.policy JOIN batches b ON b.policy = l.policy AND b.step = l.step"
    " WHERE l.step - 1 - s.min_version > b.max_staleness OR l.step - 1 < s.min_version",
    "steps between the first batch and the newest have none": "SELECT p.newest AS at FROM policies "
    "p JOIN batches b ON b.policy = "
    "p.name"
    " GROUP BY p.name, p.newest HAVING max(b.step) <> p.newest OR count(*) <> max(b.step) - "
    "min(b.step) + 1",
    "a trainer is ahead of its batches": "SELECT newest AS at FROM policies WHERE NOT (checkpoint "
    "<= version AND version <= newest)",
    "a group that is still needed is gone": "SELECT s.unit AS at FROM shares s JOIN policies p ON "
    "p.name = s.policy LEFT JOIN payloads d"
    " ON d.unit = s.unit WHERE d.unit IS NULL AND (s.state = 'fresh' OR (s.state = 'served' AND "
    "s.step > p.checkpoint))",
}


def audit_database(database: str | Path) -> Audit:
    """Of a ledger that may be in use. UserError where there is none."""
    with reading(database) as transaction:
        return audited(transaction)


@contextmanager
def reading(database: str | Path) -> Iterator[Transaction]:
    """One state of a ledger that may be in use. UserError where there is none."""
    if "://" not in str(database) and not Path(database).is_file():
        raise UserError(f"there is no database {database}")
    with closing(connect(database)) as found, found.read() as transaction:
        ledger_row(transaction, found.name)
        yield transaction


def audited(transaction: Transaction) -> Audit:
    found = [(problem, transaction.one(query)) for problem, query in _FINDS.items()]
    return Audit(
        tuple(f"{problem} ({row.at})" for problem, row in found if row), _counts(transaction)
    )


def _counts(transaction: Transaction) -> dict[str, int]:
    units = transaction.all(
        "SELECT state AS name, count(*) AS num FROM units GROUP BY state ORDER BY state"
    )
    shares = transaction.all(
        "SELECT policy || '.' || state AS name, count(*) AS num FROM shares GROUP BY policy, state "
        "ORDER BY policy, state"
    )
    endings = transaction.all(
        "SELECT ending AS name, count(*) AS num FROM leases WHERE ending <> '' GROUP BY ending "
        "ORDER BY ending"
    )
    return {row.name: row.num for row in [*units, *shares, *endings]}
