"""A ledger as it is after many nodes, leases and groups.

Leases are granted by the ledger; earlier groups are inserted as rows without payloads, which
checkpoints would have deleted, and with the batches that trained them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.dataflow_service import GROUP_SIZE
from flowtrain.config import Config
from flowtrain.dataflow.contract import Join, LeaseRequest, Register
from flowtrain.dataflow.ledger import Ledger
from flowtrain.tasks.cursor import TaskCursor
from flowtrain.types import PolicyName, Task

POLICIES: tuple[PolicyName, ...] = ("planner", "verifier", "refiner")
"""All that a flow can have; groups here have tokens of the first."""
PER_LEASE, NUM_GROUPS = 8, 32
"""Work items that a node asks for at a time; groups of a batch."""
_LIFE, _AT_ONCE = "a", 1000


@dataclass(frozen=True, slots=True)
class Size:
    num_nodes: int
    num_leased: int
    num_committed: int = 0


def grown(database: str, size: Size) -> Ledger:
    """A ledger with so many nodes, leases and groups that have been trained."""
    config = Config.model_validate(
        {
            "rollout": {"num_questions": NUM_GROUPS, "group_size": GROUP_SIZE},
            "roles": dict.fromkeys(POLICIES[1:], "own"),
            "dataflow": {"max_waiting": 1 << 20, "lease_s": 86400.0},
        }
    )
    tasks = [Task(f"task-{number}", "What is it?", ("1284",)) for number in range(1000)]
    ledger = Ledger(database, config, TaskCursor(tasks, 0))
    for policy in POLICIES:
        ledger.register(Register(policy, "", "", NUM_GROUPS, 10_000, 1 << 16, 1 << 20))
    for number in range(size.num_nodes):
        ledger.join(Join(f"node-{number}", _LIFE))
    for start in range(0, size.num_committed, _AT_ONCE):
        _lease(ledger, "node-0", min(_AT_ONCE, size.num_committed - start))
    _commit_all(ledger)
    for number in range(size.num_nodes):
        for num in _parts(size.num_leased // size.num_nodes):
            _lease(ledger, f"node-{number}", num)
    return ledger


def _parts(num: int) -> Iterator[int]:
    while num > 0:
        yield min(num, _AT_ONCE)
        num -= _AT_ONCE


def _lease(ledger: Ledger, node: str, num: int) -> None:
    assert len(ledger.lease(LeaseRequest(node, _LIFE, num)).leases) == num


def _commit_all(ledger: Ledger) -> None:
    """Commit what is leased, spread over the nodes, and train it: rows as pushes, batches and
    checkpoints leave them.
    """
    with ledger.database.write() as transaction:
        committed = "work_items WHERE state = 'committed'"
        transaction.run("UPDATE work_items SET state = 'committed' WHERE state = 'leased'")
        transaction.run("DELETE FROM live_leases")
        num = transaction.one(f"SELECT count(*) AS num FROM {committed}").num
        num_nodes = transaction.one("SELECT count(*) AS num FROM nodes").num
        step = f"(id - 1) / {NUM_GROUPS} + 1"
        node = f"'node-' || CAST(id % {num_nodes} AS TEXT)"
        transaction.run(
            "UPDATE leases SET node = 'node-' || CAST(work_item % ? AS TEXT)", num_nodes
        )
        transaction.run(
            f"INSERT INTO groups SELECT id, {node}, 1, 0.0, '[0,1,0,1,0,1,0,1]',"
            f" 300 + id % 400, id FROM {committed}"
        )
        for policy in POLICIES:
            transaction.run(
                f"INSERT INTO shares SELECT id, '{policy}', 'assigned', 0, 300 + id % 400, {step}"
                f" FROM {committed}"
            )
            transaction.run(
                f"INSERT INTO assignments SELECT '{policy}', {step}, (id - 1) % {NUM_GROUPS}, id, 0"
                f" FROM {committed}"
            )
            transaction.run(
                f"INSERT INTO batches SELECT '{policy}', {step}, 0.0, {NUM_GROUPS}, 10000, max(id),"
                f" '{{}}', '{{}}' FROM {committed} GROUP BY {step}"
            )
            done = num // NUM_GROUPS
            transaction.run(
                "UPDATE policies SET version = ?, top_version = ?, newest = ?, checkpoint = ?",
                *(done, done, done, done),
            )
        transaction.run("UPDATE meta SET num_events = ?, num_groups = ?", num, num)
        if ledger.database.has_row_locks:
            transaction.run("ANALYZE")  # as PostgreSQL does by itself, though a minute later
