"""The audit: queries that must find nothing. They ask the tables, not the code that wrote them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from flowtrain.records import TokenAccount, UserError
from flowtrain.rollouts.ledger.counters import counter_problems
from flowtrain.rollouts.ledger.schema import meta_row
from flowtrain.rollouts.ledger.sql import Transaction, connect
from flowtrain.rollouts.ledger.token_accounts import token_account, token_problems


@dataclass(frozen=True, slots=True)
class Audit:
    problems: tuple[str, ...]
    """Each contradiction, with the first work item, step or position where it was found; empty:
    nothing is lost, nothing counted twice."""
    counts: dict[str, int]
    """Work items by state, shares by policy and state ("planner.assigned"), leases that ended
    without a group by reason, questions of evaluations by state ("questions.committed")."""
    tokens: dict[str, TokenAccount]
    """Where all tokens of a policy went."""


_QUERIES = {
    "work items are not numbered without gaps": """
        SELECT num_work_items AS at FROM meta
        WHERE num_work_items <> (SELECT count(*) FROM work_items WHERE evaluation = 0)
        OR num_work_items <> (SELECT coalesce(max(id), 0) FROM work_items WHERE evaluation = 0)""",
    "a work item has no known state": """
        SELECT id AS at FROM work_items
        WHERE state NOT IN ('drawn', 'leased', 'waiting', 'committed', 'failed')""",
    "a position in the order of tasks was not decided about once": """
        SELECT num_positions AS at FROM meta
        WHERE num_positions <> (SELECT count(*) FROM decisions)
        OR num_positions <> (SELECT coalesce(max(position), -1) + 1 FROM decisions)""",
    "an admitted task has no work item": """
        SELECT d.position AS at FROM decisions d LEFT JOIN work_items w
        ON w.position = d.position AND w.evaluation = 0
        WHERE d.admitted = 1 AND (w.id IS NULL OR w.task_id <> d.task_id)""",
    "a work item's task was not admitted": """
        SELECT w.id AS at FROM work_items w LEFT JOIN decisions d ON d.position = w.position
        WHERE w.evaluation = 0 AND coalesce(d.admitted, 0) = 0""",
    "a work item does not have as many leases as attempts": """
        SELECT w.id AS at FROM work_items w
        WHERE w.attempt <> (SELECT count(*) FROM leases l WHERE l.work_item = w.id)""",
    "a work item is open and its last lease says otherwise": """
        SELECT w.id AS at FROM work_items w
        JOIN leases l ON l.work_item = w.id AND l.attempt = w.attempt
        WHERE (w.state = 'leased' AND l.ending <> '')
        OR (w.state IN ('waiting', 'failed') AND l.ending = '')""",
    "a work item is leased and does not end, or ends and is not leased": """
        SELECT w.id AS at FROM work_items w LEFT JOIN live_leases v ON v.work_item = w.id
        WHERE (w.state = 'leased') <> (v.work_item IS NOT NULL)""",
    "a lease is of one node and lasts for another": """
        SELECT w.id AS at FROM work_items w JOIN live_leases v ON v.work_item = w.id
        LEFT JOIN leases l ON l.work_item = w.id AND l.attempt = w.attempt
        WHERE coalesce(l.node, '') <> v.node""",
    "a committed work item has no group": """
        SELECT w.id AS at FROM work_items w LEFT JOIN groups g ON g.work_item = w.id
        WHERE w.state = 'committed' AND w.evaluation = 0 AND g.work_item IS NULL""",
    "a group's work item is not committed": """
        SELECT g.work_item AS at FROM groups g LEFT JOIN work_items w ON w.id = g.work_item
        WHERE coalesce(w.state, '') <> 'committed' OR w.evaluation > 0""",
    "a group was not leased to the node that pushed it": """
        SELECT g.work_item AS at FROM groups g
        LEFT JOIN leases l ON l.work_item = g.work_item AND l.attempt = g.attempt
        WHERE coalesce(l.node, '') <> g.node""",
    "events are not numbered without gaps": """
        SELECT num_events AS at FROM meta
        WHERE num_events <> (SELECT count(event) FROM groups) + (SELECT count(*) FROM bumps)
        OR num_groups <> (SELECT count(event) FROM groups)
        OR num_events < (SELECT coalesce(max(event), 0) FROM groups)
        OR num_events < (SELECT coalesce(max(event), 0) FROM bumps)""",
    "two events have one number": """
        SELECT g.event AS at FROM groups g JOIN bumps b ON b.event = g.event""",
    "a group has no share": """
        SELECT g.work_item AS at FROM groups g LEFT JOIN shares s ON s.work_item = g.work_item
        WHERE s.work_item IS NULL""",
    "a share has no group": """
        SELECT s.work_item AS at FROM shares s LEFT JOIN groups g ON g.work_item = s.work_item
        WHERE g.work_item IS NULL""",
    "a share has no known state": """
        SELECT work_item AS at FROM shares
        WHERE state NOT IN
        ('fresh', 'assigned', 'stale', 'filtered', 'surplus', 'empty', 'disowned')
        OR (state = 'fresh') <> (step IS NULL)""",
    "an assigned share is not in the batch of its step once": """
        SELECT s.work_item AS at FROM shares s WHERE s.state = 'assigned' AND 1 <>
        (SELECT count(*) FROM assignments a WHERE a.policy = s.policy
        AND a.work_item = s.work_item AND a.is_replay = 0 AND a.step = s.step)""",
    "a share is in a batch and was not assigned": """
        SELECT a.work_item AS at FROM assignments a
        LEFT JOIN shares s ON s.work_item = a.work_item AND s.policy = a.policy
        WHERE coalesce(s.state, '') <> 'assigned'""",
    "a group is trained again before it was trained": """
        SELECT a.work_item AS at FROM assignments a
        JOIN shares s ON s.work_item = a.work_item AND s.policy = a.policy
        WHERE a.is_replay = 1 AND s.step >= a.step""",
    "a group is twice in one batch": """
        SELECT work_item AS at FROM assignments
        GROUP BY policy, step, work_item HAVING count(*) > 1""",
    "a batch does not have its groups": """
        SELECT b.step AS at FROM batches b WHERE b.num_groups <>
        (SELECT count(*) FROM assignments a WHERE a.policy = b.policy AND a.step = b.step
        AND a.position >= 0 AND a.position < b.num_groups)""",
    "a group has no batch": """
        SELECT a.step AS at FROM assignments a
        LEFT JOIN batches b ON b.policy = a.policy AND b.step = a.step WHERE b.step IS NULL""",
    "a batch has a group that is too old, or too new": """
        SELECT a.work_item AS at FROM assignments a
        JOIN shares s ON s.work_item = a.work_item AND s.policy = a.policy
        JOIN batches b ON b.policy = a.policy AND b.step = a.step
        WHERE a.step - 1 - s.min_version > b.max_staleness OR a.step - 1 < s.min_version""",
    "steps between the first batch and the newest have none": """
        SELECT p.newest AS at FROM policies p JOIN batches b ON b.policy = p.name
        GROUP BY p.name, p.newest
        HAVING max(b.step) <> p.newest OR count(*) <> max(b.step) - min(b.step) + 1""",
    "a trainer is ahead of its batches": """
        SELECT newest AS at FROM policies
        WHERE NOT (checkpoint <= version AND version <= newest)""",
    "a group that is still needed is gone": """
        SELECT s.work_item AS at FROM shares s JOIN policies p ON p.name = s.policy
        LEFT JOIN payloads d ON d.work_item = s.work_item
        WHERE d.work_item IS NULL
        AND (s.state = 'fresh' OR (s.state = 'assigned' AND s.step > p.checkpoint))""",
    "an evaluation does not have its questions": """
        SELECT e.id AS at FROM evaluations e WHERE e.num_questions <>
        (SELECT count(*) FROM work_items w WHERE w.evaluation = e.id AND w.id < 0
        AND w.position >= 0 AND w.position < e.num_questions)""",
    "a question has no evaluation": """
        SELECT w.id AS at FROM work_items w LEFT JOIN evaluations e ON e.id = w.evaluation
        WHERE (w.id < 0 OR w.evaluation > 0) AND e.id IS NULL""",
    "an evaluation is over and a question is left": """
        SELECT w.id AS at FROM work_items w JOIN evaluations e ON e.id = w.evaluation
        WHERE e.state <> 'open' AND w.state NOT IN ('committed', 'failed')""",
    "a question is not answered once, with its result": """
        SELECT w.id AS at FROM work_items w LEFT JOIN results r ON r.work_item = w.id
        WHERE w.evaluation > 0 AND (w.state = 'committed') <> (r.work_item IS NOT NULL)""",
    "a result has no question": """
        SELECT r.work_item AS at FROM results r LEFT JOIN work_items w ON w.id = r.work_item
        WHERE coalesce(w.evaluation, 0) = 0""",
    "a result was not leased to the node that pushed it": """
        SELECT r.work_item AS at FROM results r
        LEFT JOIN leases l ON l.work_item = r.work_item AND l.attempt = r.attempt
        WHERE coalesce(l.node, '') <> r.node""",
    "a result that is still needed is gone": """
        SELECT r.work_item AS at FROM results r JOIN work_items w ON w.id = r.work_item
        JOIN evaluations e ON e.id = w.evaluation
        WHERE (e.state = 'collected') <> (r.payload IS NULL)""",
}


def audit_database(database: str | Path) -> Audit:
    """Audit a ledger that may be in use. UserError if there is none."""
    if "://" not in str(database) and not Path(database).is_file():
        raise UserError(f"there is no database {database}")
    offline = connect(database, is_patient=True)
    with closing(offline) as ledger, ledger.read() as transaction:
        meta_row(transaction, ledger.name)
        return audit(transaction)


def audit(transaction: Transaction) -> Audit:
    findings = [(problem, transaction.one(query)) for problem, query in _QUERIES.items()]
    problems = tuple(f"{problem} ({row.at})" for problem, row in findings if row)
    problems += (*counter_problems(transaction), *token_problems(transaction))
    names = transaction.all("SELECT name FROM policies ORDER BY number")
    tokens = {row.name: token_account(transaction, row.name) for row in names}
    problems += tuple(
        f"the tokens of {policy} do not add up: {account.text()}"
        for policy, account in tokens.items()
        if account.difference
    )
    counts = transaction.all(
        "SELECT 1 AS part, state AS name, count(*) AS num FROM work_items"
        " WHERE evaluation = 0 GROUP BY state UNION ALL"
        " SELECT 2, policy || '.' || state, count(*) FROM shares GROUP BY policy, state UNION ALL"
        " SELECT 3, ending, count(*) FROM leases WHERE ending <> '' GROUP BY ending UNION ALL"
        " SELECT 4, 'questions.' || state, count(*) FROM work_items WHERE evaluation > 0"
        " GROUP BY state"
        " ORDER BY part, name"
    )
    return Audit(problems, {row.name: row.num for row in counts}, tokens)
