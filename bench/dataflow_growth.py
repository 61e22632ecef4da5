"""How the ledger's requests grow with its nodes, leases and groups: milliseconds of each, in this
process, without HTTP.

    python -m bench.dataflow_growth --json F --postgres postgresql://user@host/name

Leases are granted by the ledger; earlier groups are inserted as rows without payloads, which
checkpoints would have deleted, and with the batches that trained them. The groups that are pushed
have the size of the quickstart's: what a larger one costs does not depend on the ledger.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.dataflow_service import GROUP_SIZE, database_of, group
from bench.measure import print_table, write_json
from flowtrain.config import Config
from flowtrain.dataflow.codec import pack_group
from flowtrain.dataflow.contract import (
    BatchRequest,
    Join,
    Lease,
    LeaseRequest,
    Progress,
    Push,
    Register,
    Renewal,
)
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


SIZES = (Size(10, 100), Size(100, 1000), Size(1000, 10_000), Size(1000, 10_000, 100_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument("--postgres", default="", help="URL of a server; empty: SQLite alone")
    parser.add_argument("--requests", type=int, default=40, help="of each kind (default: 40)")
    options = parser.parse_args()
    rows = []
    for database in ("SQLite", "PostgreSQL") if options.postgres else ("SQLite",):
        for size in SIZES:
            with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
                name = str(Path(folder) / "ledger.db")
                if database == "PostgreSQL":
                    name = cleanup.enter_context(database_of(options.postgres))
                rows.append({"database": database, **row(name, size, options.requests)})
                print_table(rows[-1:])
    if options.json:
        write_json(options.json, rows)


def row(database: str, size: Size, num_requests: int) -> dict[str, Any]:
    """The median milliseconds of each request to a ledger of that size."""
    ledger = grown(database, size)
    times: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        answer = run()
        times.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
        return answer

    leases: list[tuple[str, Lease]] = []
    for number in range(num_requests):
        node = f"node-{number % size.num_nodes}"
        asked = LeaseRequest(node, _LIFE, PER_LEASE, dict.fromkeys(POLICIES, 0), key=f"t{number}")
        granted = timed("lease", partial(ledger.lease, asked)).leases
        assert len(granted) == PER_LEASE
        held = tuple((lease.work_item, lease.attempt) for lease in granted)
        renewal = Renewal(node, _LIFE, held)
        assert not timed("renew", partial(ledger.renew, renewal)).lost
        leases += ((node, lease) for lease in granted)
    first = size.num_committed // NUM_GROUPS + 1
    num_batches = len(leases) // NUM_GROUPS
    for (node, lease), _ in zip(leases, range(num_batches * NUM_GROUPS), strict=False):
        request = Push(node, lease.work_item, lease.attempt, pack_group(group(lease)))
        timed("push", partial(ledger.push, request))
    for step in range(first, first + num_batches):
        timed("batch", partial(ledger.batch, BatchRequest(POLICIES[0], step)))
        progress = Progress(POLICIES[0], step, step)
        timed("progress", partial(ledger.progress, progress))
    for _ in range(max(3, num_requests // 8)):
        timed("status", ledger.status)
    ledger.close()
    medians = {f"{name}_ms": statistics.median(found) for name, found in times.items()}
    return {
        "nodes": size.num_nodes,
        "leased": size.num_leased,
        "committed": size.num_committed,
        **medians,
    }


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
        num = transaction.one("SELECT count(*) AS num FROM work_items").num
        num_nodes = transaction.one("SELECT count(*) AS num FROM nodes").num
        step = f"(id - 1) / {NUM_GROUPS} + 1"
        node = f"'node-' || CAST(id % {num_nodes} AS TEXT)"
        transaction.run(f"UPDATE work_items SET state = 'committed', node = {node}")
        transaction.run(
            "UPDATE leases SET node = 'node-' || CAST(work_item % ? AS TEXT)", num_nodes
        )
        transaction.run(
            "INSERT INTO groups SELECT id, node, 1, 0.0, '[0,1,0,1,0,1,0,1]',"
            " 300 + id % 400, id FROM work_items"
        )
        for policy in POLICIES:
            transaction.run(
                f"INSERT INTO shares SELECT id, '{policy}', 'assigned', 0, 300 + id % 400, {step}"
                " FROM work_items"
            )
            transaction.run(
                f"INSERT INTO assignments SELECT '{policy}', {step}, (id - 1) % {NUM_GROUPS}, id, 0"
                " FROM work_items"
            )
            transaction.run(
                f"INSERT INTO batches SELECT '{policy}', {step}, 0.0, {NUM_GROUPS}, 10000, max(id),"
                f" '{{}}', '{{}}' FROM work_items GROUP BY {step}"
            )
            done = num // NUM_GROUPS
            transaction.run(
                "UPDATE policies SET version = ?, top_version = ?, newest = ?, checkpoint = ?",
                *(done, done, done, done),
            )
        transaction.run("UPDATE meta SET num_events = ?, num_groups = ?", num, num)
        if ledger.database.has_row_locks:
            transaction.run("ANALYZE")  # as PostgreSQL does by itself, though a minute later


if __name__ == "__main__":
    main()
