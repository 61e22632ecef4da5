"""Groups in the database, or in a folder of `dataflow.payloads`: pushes per second and their times.

    python -m bench.payloads --groups 2000 --postgres postgresql://user@host/name

Several clients push groups of 256 KB, as they are packed, to `python -m flowtrain.dataflow serve`
over HTTP on loopback. With "nodes" they put them into the folder themselves, with "service" the
service does. The database is durable in its default way, files of the folder are flushed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.dataflow_service import NUM_GROUPS, POLICY, database_of, service
from flowtrain.dataflow.client import Client
from flowtrain.dataflow.codec import pack_group
from flowtrain.dataflow.contract import Join, Lease, LeaseRequest, Push, Register
from flowtrain.dataflow.payloads import PayloadStore
from flowtrain.types import (
    Action,
    Call,
    FinishReason,
    Group,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
    VersionSpan,
)

_NODE, _GROUP_SIZE, _NUM_CLIENTS, _PER_REQUEST = "bench", 8, 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--group-bytes", type=int, default=256_000)
    parser.add_argument("--postgres", default="", help="URL of a server; empty: SQLite alone")
    options = parser.parse_args()
    print("| database | payloads | pushes/s | p50 ms | p99 ms | database MB | folder MB |")
    print("|---|---|---|---|---|---|---|")
    for name in ("SQLite", "PostgreSQL") if options.postgres else ("SQLite",):
        for uploads in ("", "service", "nodes"):
            with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
                database = str(Path(folder) / "ledger.db")
                if name == "PostgreSQL":
                    database = cleanup.enter_context(database_of(options.postgres))
                row = _row(database, Path(folder) / "store", uploads, options)
            print(f"| {name} | {uploads or 'in the database'} | {row} |", flush=True)


def _row(database: str, store: Path, uploads: str, options: argparse.Namespace) -> str:
    sizes = {
        "rollout.num_questions": NUM_GROUPS,
        "rollout.group_size": _GROUP_SIZE,
        "dataflow.max_waiting": options.groups,
        "dataflow.lease_s": 3600,
    }
    words = [word for key, number in sizes.items() for word in (f"--{key}", str(number))]
    words += ["--dataflow.payloads", str(store)] if uploads else []
    with service(database, words) as (url, token), Client(url, token, wait_s=300.0) as client:
        run = client.join(Join(_NODE, _NODE)).run
        client.register(Register(POLICY, "", "", NUM_GROUPS, 10_000, 1 << 16, 1 << 20))
        payloads = PayloadStore(str(store), run) if uploads == "nodes" else None

        def push(request: Push) -> float:
            began = time.perf_counter()
            if payloads is not None:
                stored = payloads.put(request.work_item, request.attempt, request.payload)
                request = replace(request, payload=b"", stored=stored)
            client.push(request)
            return time.perf_counter() - began

        busy_s = 0.0
        times: list[float] = []
        with ThreadPoolExecutor(_NUM_CLIENTS) as clients:
            for leases in _leases(client, options.groups):
                pushes = [
                    Push(_NODE, each.work_item, each.attempt, _payload(each, options.group_bytes))
                    for each in leases
                ]
                began = time.perf_counter()
                times += clients.map(push, pushes)
                busy_s += time.perf_counter() - began
        size = database_bytes(database)
    held = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    p99 = statistics.quantiles(times, n=100)[98]
    numbers = (len(times) / busy_s, 1e3 * statistics.median(times), 1e3 * p99)
    return " | ".join(f"{number:.0f}" for number in (*numbers, size / 1e6, held / 1e6))


def _leases(client: Client, num: int) -> Iterator[tuple[Lease, ...]]:
    while num > 0:
        request = LeaseRequest(_NODE, _NODE, min(num, _PER_REQUEST), {POLICY: 0}, key=str(num))
        leases = client.lease(request).leases
        num -= len(leases)
        yield leases


def _payload(lease: Lease, num_bytes: int) -> bytes:
    """A group of the lease's task of about so many bytes: zlib makes 1.2 of two random hexadecimal
    digits.
    """
    text = os.urandom(num_bytes * 6 // 7 // _GROUP_SIZE).hex()
    call = Call((1, 2, 3), (4, 5), (-0.5, -0.5), (VersionSpan(0, 2, 0),), FinishReason.STOP, "")
    turn = Turn(
        calls={"planner": call},
        action=Action("", "", "", "Search"),
        command="",
        result=ToolResult(text),
        verdict=Verdict.STOP,
        seconds=0.1,
    )
    rollouts = (
        Trajectory(lease.task, (turn,), "answer", 0.1, seed, reward=seed % 2)
        for seed in range(_GROUP_SIZE)
    )
    return pack_group(Group(lease.index, tuple(rollouts)))


def database_bytes(database: str) -> int:
    if "://" not in database:
        return sum(path.stat().st_size for path in Path(database).parent.glob("ledger.db*"))
    import psycopg

    with psycopg.connect(database) as connection:
        row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
    assert row is not None
    return int(row[0])


if __name__ == "__main__":
    main()
