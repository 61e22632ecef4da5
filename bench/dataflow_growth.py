"""Requests to ledgers of different sizes:

    python -m bench.dataflow_growth [--groups 1000 100000 3000000] [--postgres URL] [--json F]

The groups have been trained, as rows in the tables; the ledger is asked in this process. Then the
same after it was opened anew, and after a refusal, which is the next lease's alone. Milliseconds,
the median of many.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bench.dataflow_service import database_of, group
from bench.grown_ledger import LIFE, NUM_GROUPS, PER_LEASE, POLICIES, Size, grown, opened
from bench.measure import print_table, write_json
from flowtrain.dataflow.codec import pack_group
from flowtrain.dataflow.contract import (
    BatchRequest,
    Join,
    LeaseRequest,
    Progress,
    Push,
    Refused,
    Renewal,
)
from flowtrain.dataflow.ledger import Ledger

NUM_NODES, NUM_LEASED, NUM_ROUNDS, NUM_STARTS = 100, 1000, 25, 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[1000, 100_000, 3_000_000])
    parser.add_argument("--postgres", metavar="URL", default="", help="of a server, beside SQLite")
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    args = parser.parse_args()
    rows = []
    for name in ("SQLite", *(["PostgreSQL"] if args.postgres else [])):
        for num in args.groups:
            with ExitStack() as cleanup:
                if name == "SQLite":
                    folder = cleanup.enter_context(tempfile.TemporaryDirectory())
                    database = str(Path(folder) / "ledger.db")
                else:
                    database = cleanup.enter_context(database_of(args.postgres))
                rows.append({"database": name, "groups": num} | costs(database, num))
                print_table(rows[-1:])
    if args.json:
        write_json(args.json, rows)


def costs(database: str, num_groups: int) -> dict[str, float]:
    """Milliseconds of each request to a ledger with so many groups."""
    policies = POLICIES[:1]
    num_groups -= num_groups % NUM_GROUPS
    ledger = grown(database, Size(NUM_NODES, NUM_LEASED, num_groups), policies)
    found = _costs(ledger, num_groups // NUM_GROUPS + 1)
    ledger.close()
    first = []
    for _ in range(NUM_STARTS):
        ledger = opened(database, policies)
        took, _ = _timed(ledger.lease, LeaseRequest("node-1", LIFE, PER_LEASE))
        first.append(took)
        ledger.close()
    return found | {"first_lease": median(first)}


def _costs(ledger: Ledger, step: int) -> dict[str, float]:
    took: dict[str, list[float]] = {}

    def timed(name: str, ask: Callable[..., Any], *request: Any) -> Any:
        ms, answer = _timed(ask, *request)
        took.setdefault(name, []).append(ms)
        return answer

    for done in range(step, step + NUM_ROUNDS):
        timed("join", ledger.join, Join(f"new-{done}", LIFE))
        held = []
        for part in range(NUM_GROUPS // PER_LEASE):
            request = LeaseRequest("node-1", LIFE, PER_LEASE, key=f"{done} {part}")
            held += timed("lease", ledger.lease, request).leases
        leases = tuple((lease.work_item, 1) for lease in held)
        timed("renew", ledger.renew, Renewal("node-1", LIFE, leases))
        for lease in held:
            payload = pack_group(group(lease))
            timed("push", ledger.push, Push("node-1", lease.work_item, 1, payload))
        timed("batch", ledger.batch, BatchRequest("planner", done))
        timed("progress", ledger.progress, Progress("planner", done, done))
        with contextlib.suppress(Refused):
            ledger.lease(LeaseRequest("node-1", "of nobody", 1))
        asked = LeaseRequest("node-1", LIFE, PER_LEASE, key=f"{done} refused")
        timed("lease_after_refusal", ledger.lease, asked)
        timed("status", ledger.status)
        timed("health", ledger.answers)
    return {name: median(each) for name, each in took.items()}


def _timed(ask: Callable[..., Any], *request: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    answer = ask(*request)
    return 1e3 * (time.perf_counter() - began), answer


if __name__ == "__main__":
    main()
