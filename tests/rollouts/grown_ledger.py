"""A ledger as it is after many nodes, leases and groups.

Leases under way are granted by the ledger; earlier groups are inserted as rows without payloads,
which checkpoints would have deleted, and with the batches that trained them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from flowtrain.config import Config
from flowtrain.records import PolicyName, Task
from flowtrain.rollouts.codec import pack
from flowtrain.rollouts.contract import Join, LeaseRequest, Register
from flowtrain.rollouts.ledger import Ledger
from flowtrain.rollouts.ledger.counters import recount
from flowtrain.rollouts.ledger.sql import Transaction, connect
from flowtrain.tasks.cursor import TaskCursor

POLICIES: tuple[PolicyName, ...] = ("planner", "verifier", "refiner")
"""All that a flow can have; groups here have tokens of the first."""
PER_LEASE, NUM_GROUPS = 8, 32
"""Work items that a node asks for at a time; groups of a batch."""
GROUP_SIZE, LIFE, _AT_ONCE = 8, "a", 1000
_TASKS = [Task(f"task-{number}", "What is it?", ("1284",)) for number in range(1000)]


@dataclass(frozen=True, slots=True)
class Size:
    num_nodes: int
    num_leased: int
    num_committed: int = 0


def grown(database: str, size: Size, policies: Sequence[PolicyName] = POLICIES) -> Ledger:
    """A ledger with so many nodes, leases and groups that have been trained."""
    ledger = opened(database, policies)
    for policy in policies:
        ledger.register(Register(policy, "", "", NUM_GROUPS, 10_000_000, 1 << 16, 1 << 20))
    for number in range(size.num_nodes):
        ledger.join(Join(f"node-{number}", LIFE))
    ledger.close()
    patient = connect(database, is_patient=True)
    with closing(patient), patient.write() as transaction:
        _add_trained(transaction, size.num_nodes, size.num_committed, policies)
        transaction.run(
            "INSERT INTO sampled SELECT l.node, l.life, t.policy, sum(t.num_tokens - t.num_shared)"
            " FROM tokens t JOIN leases l ON l.work_item = t.work_item AND l.attempt = t.attempt"
            " GROUP BY l.node, l.life, t.policy ON CONFLICT DO NOTHING"
        )
        for key, num_counted in recount(transaction).items():
            transaction.count(*key, num_counted)
    ledger = opened(database, policies)
    for number in range(size.num_nodes):
        for num in _parts(size.num_leased // size.num_nodes):
            _lease(ledger, f"node-{number}", num)
    patient = connect(database, is_patient=True)
    if patient.has_row_locks:
        with closing(patient), patient.write() as transaction:
            transaction.run("ANALYZE")  # as PostgreSQL does by itself, though a minute later
    return ledger


def opened(database: str, policies: Sequence[PolicyName] = POLICIES) -> Ledger:
    config = Config.model_validate(
        {
            "rollout": {"num_questions": NUM_GROUPS, "group_size": GROUP_SIZE},
            "roles": dict.fromkeys(policies[1:], "own"),
            "dataflow": {
                "max_waiting": 1 << 20,
                "lease_s": 86400.0,
                "trainer_timeout_s": 86400.0,  # millions of groups take longer than its own
            },
        }
    )
    return Ledger(database, config, TaskCursor(_TASKS, 0))


def _parts(num: int) -> Iterator[int]:
    while num > 0:
        yield min(num, _AT_ONCE)
        num -= _AT_ONCE


def _lease(ledger: Ledger, node: str, num: int) -> None:
    assert len(ledger.lease(LeaseRequest(node, LIFE, num)).leases) == num


def _add_trained(
    transaction: Transaction, num_nodes: int, num: int, policies: Sequence[str]
) -> None:
    """Add groups that have been trained: rows as pushes, batches and checkpoints leave them."""
    order = TaskCursor(_TASKS, 0).take(len(_TASKS))  # all epochs have that of the first
    transaction.run(
        "CREATE TEMPORARY TABLE made (id BIGINT PRIMARY KEY, task_id TEXT, kind TEXT, task BYTEA)"
    )
    transaction.many(
        "INSERT INTO made VALUES (?, ?, ?, ?)",
        [(number, task.id, task.kind, pack(task)) for number, task in enumerate(order)],
    )
    transaction.run(
        "INSERT INTO work_items WITH RECURSIVE n (id) AS"
        " (SELECT 1 UNION ALL SELECT id + 1 FROM n WHERE id < ?) SELECT n.id, n.id - 1,"
        " made.task_id, made.kind, made.task, 'committed', 1, 0, 0 FROM n"
        f" JOIN made ON made.id = (n.id - 1) % {len(order)} WHERE n.id <= ? ORDER BY n.id",
        *(num, num),
    )
    step, node = f"(id - 1) / {NUM_GROUPS} + 1", f"'node-' || CAST(id % {num_nodes} AS TEXT)"
    rows = {
        "decisions": "id - 1, task_id, kind, 1",
        "leases": f"id, 1, {node}, '{LIFE}', '', 0.0, ''",
        "groups": f"id, {node}, 1, 0.0, '[0,1,0,1,0,1,0,1]', 300 + id % 400, id",
    }
    for table, values in rows.items():
        transaction.run(f"INSERT INTO {table} SELECT {values} FROM work_items")
    done = num // NUM_GROUPS
    for policy in policies:
        of_policy = {
            "shares": f"id, '{policy}', 'assigned', 0, 300 + id % 400, {step}",
            "assignments": f"'{policy}', {step}, (id - 1) % {NUM_GROUPS}, id, 0",
        }
        for table, values in of_policy.items():
            transaction.run(f"INSERT INTO {table} SELECT {values} FROM work_items")
        transaction.run(
            f"INSERT INTO batches SELECT '{policy}', {step}, 0.0, {NUM_GROUPS}, 10000,"
            f" '{{}}', '{{}}' FROM work_items GROUP BY {step}"
        )
    transaction.run(
        "UPDATE policies SET version = ?, top_version = ?, newest = ?, checkpoint = ?",
        *(done, done, done, done),
    )
    transaction.run(
        "UPDATE meta SET num_positions = ?, num_work_items = ?, num_events = ?, num_groups = ?",
        *(num, num, num, num),
    )
