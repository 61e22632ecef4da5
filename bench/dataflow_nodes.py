"""Many nodes and the service of the dataflow:

    python -m bench.dataflow_nodes [--idle 100 300 1000] [--busy 1000] [--paces 40 20 10 5]
        [--large] [--seconds 60] [--postgres URL] [--json F]

The service is a process of its own, on loopback; the nodes are another, without a model.

Idle: a whole batch waits, so that no node gets a lease; each asks for an answer that waits until
there is something to lease, and asks again when it comes. Meanwhile a busy node renews its lease
and a trainer reports its progress, ten times a second each, by the project's client.

Busy: each node leases one work item, renews it at a third of `lease_s`, pushes its group after
`--paces` seconds, and leases the next; a trainer takes the batches. Groups are packed beforehand;
what comes before all nodes have pushed one is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles
from typing import Any

from bench.dataflow_service import (
    LARGE,
    NODE,
    POLICY,
    SMALL,
    Service,
    Shape,
    database_of,
    group,
    service,
)
from bench.light_nodes import LIFE, Node, Seen
from bench.measure import print_table, report
from flowtrain.dataflow.client import Client
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

IDLE_GROUPS, BUSY_GROUPS, GROUP_SIZE = 4, 64, 8
"""Groups of a batch, rollouts of a group."""
PER_LEASE = 512
Work = Callable[[Node], Coroutine[Any, Any, None]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--idle", type=int, nargs="*", default=[100, 300, 1000])
    parser.add_argument("--busy", type=int, default=1000)
    parser.add_argument("--paces", type=float, nargs="*", default=[40.0, 20.0, 10.0, 5.0])
    parser.add_argument("--large", action="store_true", help="groups of ten turns, 320 KB")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each row")
    parser.add_argument("--postgres", metavar="URL", default="", help="of a server, beside SQLite")
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    args = parser.parse_args()
    shape = LARGE if args.large else SMALL
    num = round(args.busy * (4 + args.seconds / min(args.paces))) if args.paces else 0
    groups = _packed(num, shape)
    idle, busy = [], []
    for name in ("SQLite", *(["PostgreSQL"] if args.postgres else [])):
        own = args.postgres if name == "PostgreSQL" else ""
        with _database(own) as database:
            idle += [
                {"database": name} | row for row in idle_rows(database, args.idle, args.seconds)
            ]
        for pace_s in args.paces:
            with _database(own) as database:
                row = busy_row(database, args.busy, pace_s, args.seconds, groups)
            busy.append({"database": name} | row)
            print_table(busy[-1:])
    report(args.json, idle, busy)


def idle_rows(database: str, sizes: list[int], seconds: float) -> Iterator[dict[str, Any]]:
    with _asked(database, IDLE_GROUPS) as (at, client):
        client.join(Join(NODE, LIFE))
        leases = client.lease(LeaseRequest(NODE, LIFE, IDLE_GROUPS + 1, {POLICY: 0})).leases
        for lease in leases[1:]:  # a whole batch waits, so nobody gets a lease
            client.push(Push(NODE, lease.work_item, lease.attempt, pack_group(group(lease))))
        for num in sizes:
            yield {"idle nodes": num} | _beside_idle(client, at, num, seconds, leases[0])


def _beside_idle(
    client: Client, at: Service, num: int, seconds: float, held: Lease
) -> dict[str, Any]:
    renewal = Renewal(NODE, LIFE, ((held.work_item, held.attempt),))
    took_s: dict[str, list[float]] = {"renew": [], "progress": []}
    with _nodes(client, at, num, seconds, Node.waits) as answer:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for name, request in (("renew", renewal), ("progress", Progress(POLICY, 0, 0))):
                began = time.monotonic()
                getattr(client, name)(request)
                took_s[name].append(time.monotonic() - began)
            time.sleep(0.1)
        seen, _ = answer.recv()
    num_answers = seen.statuses.total()
    common = {
        "requests_per_s": num_answers / seconds,
        "refused": 1 - seen.statuses[200] / max(1, num_answers),
    }
    return common | _latencies(took_s)


def busy_row(
    database: str, num: int, pace_s: float, seconds: float, groups: dict[int, bytes]
) -> dict[str, Any]:
    with _asked(database, BUSY_GROUPS, 10 * num) as (at, client):
        lease_s = client.join(Join(NODE, LIFE)).lease_s

        def works(node: Node) -> Coroutine[Any, Any, None]:
            return node.works(pace_s, lease_s, groups)

        begin_s = 1.5 * pace_s
        nodes = _nodes(client, at, num, begin_s + seconds, works)
        with nodes as answer, _trained(client) as trained:
            time.sleep(begin_s)
            began, before = time.monotonic(), (len(trained), *_cpu_s(database))
            seen, nodes_cpu_s = answer.recv()
            after = (len(trained), *_cpu_s(database))
    num_steps, service_s, database_s = (b - a for a, b in zip(before, after, strict=True))
    took_s = {
        name: [took for when, took in answers if when >= began]
        for name, answers in seen.took_s.items()
    }
    num_groups = len(took_s["push"])
    common = {
        "busy nodes": num,
        "offered_per_s": num / pace_s,
        "pushed_per_s": num_groups / seconds,
        "trained_per_s": num_steps * BUSY_GROUPS / seconds,
        "refused": 1 - seen.statuses[200] / seen.statuses.total(),
        "service_ms_per_group": 1e3 * service_s / num_groups,
        "database_ms_per_group": 1e3 * database_s / num_groups,
        "nodes_cores": nodes_cpu_s / (begin_s + seconds),
    }
    return common | _latencies(took_s)


def _latencies(took_s: dict[str, list[float]]) -> dict[str, float]:
    row: dict[str, float] = {}
    for name, of in took_s.items():
        cuts = quantiles(of, n=100)
        row |= {f"{name}_p50_ms": 1e3 * cuts[49], f"{name}_p99_ms": 1e3 * cuts[98]}
    return row


@contextmanager
def _asked(
    database: str, num_groups: int, max_waiting: int = 0
) -> Iterator[tuple[Service, Client]]:
    """A service with a trainer that has registered, and its client."""
    sizes = {
        "rollout.num_questions": num_groups,
        "rollout.group_size": GROUP_SIZE,
        "dataflow.max_waiting": max_waiting,
    }
    options = [word for key, number in sizes.items() for word in (f"--{key}", str(number))]
    with service(database, options) as at, Client(*at, wait_s=120.0) as client:
        client.register(Register(POLICY, "", "", num_groups, 10_000, 1 << 16, 1 << 16))
        yield at, client


@contextmanager
def _database(server: str) -> Iterator[str]:
    with ExitStack() as cleanup:
        if server:
            yield cleanup.enter_context(database_of(server))
        else:
            folder = cleanup.enter_context(tempfile.TemporaryDirectory())
            yield str(Path(folder) / "ledger.db")


def _packed(num: int, shape: Shape) -> dict[int, bytes]:
    """The groups of the first work items, which are the same in every run of these options."""
    found: dict[int, bytes] = {}
    with _database("") as database, _asked(database, BUSY_GROUPS, 2 * num) as (_, client):
        client.join(Join(NODE, LIFE))
        while len(found) < num:
            leases = client.lease(LeaseRequest(NODE, LIFE, PER_LEASE, {POLICY: 0})).leases
            found |= {lease.work_item: pack_group(group(lease, shape)) for lease in leases}
    return found


@contextmanager
def _nodes(
    client: Client, at: Service, num: int, seconds: float, work: Work
) -> Iterator[Connection]:
    """A process of nodes that have joined; it tells at the end what they saw and took of a CPU."""
    for number in range(num):
        client.join(Join(f"node-{number}", LIFE))
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_together, args=(theirs, at, num, seconds, work)
    )
    process.start()
    try:
        yield ours
    finally:
        process.join()


def _together(pipe: Connection, at: Service, num: int, seconds: float, work: Work) -> None:
    seen = Seen()
    end = time.monotonic() + seconds

    async def all_of_them() -> None:
        await asyncio.gather(*(work(Node(f"node-{n}", at, end, seen)) for n in range(num)))

    asyncio.run(all_of_them())
    used = resource.getrusage(resource.RUSAGE_SELF)
    pipe.send((seen, used.ru_utime + used.ru_stime))


@contextmanager
def _trained(client: Client) -> Iterator[list[int]]:
    """A trainer that takes batches as fast as they come, and its steps."""
    steps: list[int] = []
    ended = threading.Event()

    def train() -> None:
        while not ended.is_set():
            step = len(steps) + 1
            if client.batch(BatchRequest(POLICY, step, wait_s=1.0)).groups:
                client.progress(Progress(POLICY, step, step))
                steps.append(step)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield steps
    finally:
        ended.set()
        thread.join()


def _cpu_s(database: str) -> tuple[float, float]:
    """CPU seconds of the service of a database, and of all that PostgreSQL has had."""
    service_s = postgres_s = 0.0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        own, with_children = (sum(map(int, fields[11:end])) for end in (13, 15))
        if b"serve" in command and database.encode() in command:
            service_s += own
        elif b"postgres" in command[0]:
            postgres_s += with_children
    ticks = os.sysconf("SC_CLK_TCK")
    return service_s / ticks, postgres_s / ticks


if __name__ == "__main__":
    main()
