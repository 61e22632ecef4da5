"""What the service of the dataflow bears:  python -m bench.dataflow [--json F] [--postgres URL]

The service is a process of its own, on loopback (`bench/dataflow_service.py`). Groups are packed
beforehand, for that is the nodes' work.

"alone": one lease, one push and a place in one batch, one after another, while nothing else
happens: what the service adds to a group. "at once": --groups groups are leased, then pushed by 8
threads, then served, on the cores that service and client share.

"idle nodes": a whole batch waits, so that no node gets a lease; each asks for an answer that waits
until there is something to lease, and asks again when it comes. Meanwhile a busy node renews its
lease and a trainer reports its progress, ten times a second each, by the project's client.

"busy nodes": each node, without a model and in one process with the others, leases one work item,
renews it at a third of `lease_s`, pushes its group after --paces seconds, and leases the next; a
trainer takes the batches. What comes before all nodes have pushed one is not counted.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench.dataflow_service import LIFE, NODE, POLICY, Service, group, new_database, service
from bench.light_nodes import Node, Seen
from bench.measure import new_parser, report
from flowtrain.config import Checkpoint
from flowtrain.rollouts.client import Client
from flowtrain.rollouts.codec import pack_group
from flowtrain.rollouts.contract import (
    BatchRequest,
    Join,
    Lease,
    LeaseRequest,
    Progress,
    Push,
    Renewal,
)

NUM_GROUPS, IDLE_GROUPS, BUSY_GROUPS = 16, 4, 64
"""Groups of a batch: the quickstart's, with idle and with busy nodes."""
NUM_ALONE, NUM_THREADS, PER_REQUEST, PER_LEASE = 128, 8, 64, 512
_CHECKPOINT_EVERY = Checkpoint().every
Row = dict[str, Any]
Work = Callable[[Node], Coroutine[Any, Any, None]]


def main() -> None:
    full = {"groups": 1024, "idle": [100, 300, 1000], "busy": 1000, "seconds": 60.0}
    parser = new_parser(__doc__, **full, paces=[40.0, 20.0, 10.0, 5.0])
    add = parser.add_argument
    add("--groups", type=int, default=256, help="at once")
    add("--idle", type=int, nargs="*", default=[100], help="idle nodes")
    add("--busy", type=int, default=100, help="busy nodes")
    add("--paces", type=float, nargs="*", default=[10.0], help="seconds of a group")
    add("--seconds", type=float, default=20.0, help="of each row of nodes")
    add("--postgres", metavar="URL", default="", help="of a server, beside SQLite")
    args = parser.parse_args()
    servers = {"SQLite": "", **({"PostgreSQL": args.postgres} if args.postgres else {})}

    def rows() -> Iterator[Row]:
        for name, server in servers.items():
            for row in service_rows(server, args.groups, NUM_ALONE):
                yield {"database": name} | row
        for name, server in servers.items():
            for row in idle_rows(server, args.idle, args.seconds):
                yield {"database": name} | row
        groups = packed(args.busy, args.seconds, args.paces)
        for name, server in servers.items():
            for pace_s in args.paces:
                row = busy_row(server, args.busy, pace_s, args.seconds, groups)
                yield {"database": name} | row

    report(args.json, rows())


# ---- one client


def service_rows(server: str, num_groups: int, num_alone: int) -> Iterator[Row]:
    with (
        new_database(server) as database,
        service(database, NUM_GROUPS, num_groups + num_alone) as (_, client),
    ):
        client.join(Join(NODE, LIFE))
        yield {"service": "alone", "groups": num_alone} | alone(client, num_alone)
        found = at_once(client, num_groups, next_step=num_alone // NUM_GROUPS + 1)
        yield {"service": "at once", "groups": num_groups} | found


def alone(client: Client, num_groups: int) -> Row:
    """Milliseconds per group, and bytes of one."""
    took: dict[str, list[float]] = {"lease": [], "push": [], "batch": []}
    payload = b""
    for number in range(1, num_groups + 1):
        seconds, (lease,) = _timed(partial(_leased, client, 1))
        took["lease"].append(seconds)
        payload = pack_group(group(lease))
        push = Push(NODE, lease.work_item, lease.attempt, payload)
        took["push"].append(_timed(partial(client.push, push))[0])
        if number % NUM_GROUPS == 0:
            seconds, _ = _timed(partial(_batch, client, number // NUM_GROUPS))
            took["batch"].append(seconds / NUM_GROUPS)
    medians = {f"{name}_ms": 1e3 * median(each) for name, each in took.items()}
    return medians | {"ms_per_group": sum(medians.values()), "bytes_per_group": len(payload)}


def at_once(client: Client, num_groups: int, next_step: int) -> Row:
    """Groups per second of each part, and of all of them one after another."""
    parts = {}
    requests = range(0, num_groups, PER_REQUEST)
    parts["lease"], found = _timed(lambda: [_leased(client, PER_REQUEST) for _ in requests])
    leases = [lease for each in found for lease in each]
    pushes = [
        Push(NODE, lease.work_item, lease.attempt, pack_group(group(lease))) for lease in leases
    ]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        parts["push"], _ = _timed(lambda: list(threads.map(client.push, pushes)))
    steps = range(next_step, next_step + len(leases) // NUM_GROUPS)
    parts["batch"], _ = _timed(lambda: list(map(partial(_batch, client), steps)))
    rates = {f"{name}_per_s": len(leases) / seconds for name, seconds in parts.items()}
    return rates | {"groups_per_s": len(leases) / sum(parts.values())}


def _leased(client: Client, num: int) -> Sequence[Lease]:
    request = LeaseRequest(NODE, LIFE, num, {POLICY: 0}, key=secrets.token_hex(8))
    leases = client.lease(request).leases
    assert len(leases) == num, "there is room for all"
    return leases


def _batch(client: Client, step: int) -> None:
    """And the trainer's report of it; now and then there is a checkpoint, which lets the ledger
    forget groups.
    """
    batch = client.batch(BatchRequest(POLICY, step, wait_s=10.0))
    assert len(batch.groups) == NUM_GROUPS, batch.num_missing
    client.progress(Progress(POLICY, step, step - step % _CHECKPOINT_EVERY))


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    answer = run()
    return time.perf_counter() - began, answer


# ---- many nodes


def idle_rows(server: str, sizes: Sequence[int], seconds: float) -> Iterator[Row]:
    with new_database(server) as database, service(database, IDLE_GROUPS) as (at, client):
        client.join(Join(NODE, LIFE))
        leases = client.lease(LeaseRequest(NODE, LIFE, IDLE_GROUPS + 1, {POLICY: 0})).leases
        for lease in leases[1:]:  # a whole batch waits, so nobody gets a lease
            client.push(Push(NODE, lease.work_item, lease.attempt, pack_group(group(lease))))
        for num in sizes:
            yield {"idle nodes": num} | _beside_idle(client, at, num, seconds, leases[0])


def _beside_idle(client: Client, at: Service, num: int, seconds: float, held: Lease) -> Row:
    renewal = Renewal(NODE, LIFE, ((held.work_item, held.attempt),))
    took_s: dict[str, list[float]] = {"renew": [], "progress": []}
    with _nodes(client, at, num, seconds, Node.waits) as answer:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for name, request in (("renew", renewal), ("progress", Progress(POLICY, 0, 0))):
                took_s[name].append(_timed(partial(getattr(client, name), request))[0])
            time.sleep(0.1)
        seen, _ = answer.recv()
    num_answers = seen.statuses.total()
    common = {
        "requests_per_s": num_answers / seconds,
        "refused": 1 - seen.statuses[200] / max(1, num_answers),
    }
    return common | _latencies(took_s)


def packed(num_nodes: int, seconds: float, paces: Sequence[float]) -> dict[int, bytes]:
    """The groups of the first work items, which are the same in every run of these options."""
    num = round(num_nodes * (4 + seconds / min(paces))) if paces else 0
    found: dict[int, bytes] = {}
    with new_database("") as database, service(database, BUSY_GROUPS, 2 * num) as (_, client):
        client.join(Join(NODE, LIFE))
        while len(found) < num:
            leases = client.lease(LeaseRequest(NODE, LIFE, PER_LEASE, {POLICY: 0})).leases
            found |= {lease.work_item: pack_group(group(lease)) for lease in leases}
    return found


def busy_row(server: str, num: int, pace_s: float, seconds: float, groups: dict[int, bytes]) -> Row:
    with (
        new_database(server) as database,
        service(database, BUSY_GROUPS, 10 * num) as (at, client),
    ):
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
    for name, each in took_s.items():
        cuts = quantiles(each, n=100) if len(each) > 1 else each * 99
        row |= {f"{name}_p50_ms": 1e3 * cuts[49], f"{name}_p99_ms": 1e3 * cuts[98]}
    return row


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
