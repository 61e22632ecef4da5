"""Idle nodes and the service of the dataflow:

    python -m bench.dataflow_idle [--nodes 100 300 1000] [--seconds 120] [--postgres URL] [--json F]

A whole batch waits, so that no node gets a lease. The service is a process of its own, on loopback;
the idle nodes are another, with light clients over plain sockets: each asks as a node does, for an
answer that waits until there is something to lease, and asks again when it comes. Meanwhile a busy
node renews its lease and a trainer reports its progress, ten times a second each, by the project's
client.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles
from typing import Any
from urllib.parse import urlsplit

from bench.dataflow_service import NODE, POLICY, database_of, group, service
from bench.measure import print_table, write_json
from flowtrain.dataflow.client import Client
from flowtrain.dataflow.codec import pack, pack_group, unpack
from flowtrain.dataflow.contract import (
    Join,
    Lease,
    LeaseRequest,
    Leases,
    Progress,
    Push,
    Register,
    Renewal,
)
from flowtrain.dataflow.wire import MAX_WAIT_S, PREFIX
from flowtrain.net.retries import pause_s

NUM_GROUPS, LIFE = 4, "a"
OPTIONS = ["--rollout.num_questions", str(NUM_GROUPS), "--rollout.group_size", "8"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--seconds", type=float, default=120.0, help="of each number of nodes")
    parser.add_argument("--postgres", metavar="URL", default="", help="of a server, beside SQLite")
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    args = parser.parse_args()
    rows = []
    with ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory())
        databases = {"SQLite": str(Path(folder) / "ledger.db")}
        if args.postgres:
            databases["PostgreSQL"] = cleanup.enter_context(database_of(args.postgres))
        for name, database in databases.items():
            rows += list(idle_rows(name, database, args.nodes, args.seconds))
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def idle_rows(
    name: str, database: str, sizes: list[int], seconds: float
) -> Iterator[dict[str, Any]]:
    with (
        service(database, OPTIONS) as (url, token),
        Client(url, token, wait_s=120.0) as client,
    ):
        client.join(Join(NODE, LIFE))
        client.register(Register(POLICY, "", "", NUM_GROUPS, 4, 1 << 16, 1 << 16))
        leases = client.lease(LeaseRequest(NODE, LIFE, NUM_GROUPS + 1, {POLICY: 0})).leases
        for lease in leases[1:]:  # a whole batch waits, so nobody gets a lease
            client.push(Push(NODE, lease.work_item, lease.attempt, pack_group(group(lease))))
        for num in sizes:
            for number in range(num):
                client.join(Join(f"idle-{number}", LIFE))
            yield {"database": name, "idle nodes": num} | _measured(
                client, url, token, (num, seconds, leases[0])
            )


def _measured(
    client: Client, url: str, token: str, load: tuple[int, float, Lease]
) -> dict[str, Any]:
    num, seconds, held = load
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(
        target=_idle, args=(theirs, url, token, num, seconds)
    )
    child.start()
    renewal = Renewal(NODE, LIFE, ((held.work_item, held.attempt),))
    took_s: dict[str, list[float]] = {"renew": [], "progress": []}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, request in (("renew", renewal), ("progress", Progress(POLICY, 0, 0))):
            began = time.monotonic()
            getattr(client, name)(request)
            took_s[name].append(time.monotonic() - began)
        time.sleep(0.1)
    statuses = ours.recv()
    child.join()
    num_asked = sum(statuses.values())
    row = {"requests_per_s": num_asked / seconds, "refused": 1 - statuses[200] / num_asked}
    for name, of in took_s.items():
        cuts = [1e3 * cut for cut in quantiles(of, n=100)]
        row |= {f"{name}_p50_ms": cuts[49], f"{name}_p99_ms": cuts[98]}
    return row


def _idle(pipe: Connection, url: str, token: str, num: int, seconds: float) -> None:
    statuses: Counter[int] = Counter()
    end = time.monotonic() + seconds

    async def together() -> None:
        nodes = (_node(f"idle-{number}", url, token, end, statuses) for number in range(num))
        await asyncio.gather(*nodes)

    asyncio.run(together())
    pipe.send(statuses)


async def _node(name: str, url: str, token: str, end: float, statuses: Counter[int]) -> None:
    """One node until the end; notes the status of each request when it is sent, 200 until it is
    known to be another.
    """
    await asyncio.sleep(random.random())
    kept: list[Any] = []
    failures, wait_s = 0, 0.0
    while (left_s := end - time.monotonic()) > 0:
        heard = {POLICY: 0}
        key = f"{time.monotonic()}"
        own = (name, LIFE, 1, {POLICY: 0})
        body = pack(LeaseRequest(*own, key=key, wait_s=wait_s, heard=heard))
        statuses[200] += 1
        try:
            async with asyncio.timeout(left_s):
                status, content = await _ask(url, token, body, kept)
        except TimeoutError:
            return  # it waits still
        except (OSError, asyncio.IncompleteReadError):
            status, content = 0, b""
        statuses[200] -= 1
        statuses[status] += 1
        if status == 200:
            answer = unpack(content, Leases)
            assert answer.reason == "full", answer
            failures, pause, wait_s = 0, 0.0, MAX_WAIT_S * random.uniform(0.7, 1.0)
        else:
            failures += 1
            pause = max(1.0, pause_s(failures, 0.1, 10.0))
        await asyncio.sleep(pause)


async def _ask(url: str, token: str, body: bytes, kept: list[Any]) -> tuple[int, bytes]:
    """Status and body; the service ends a connection with an answer that is an error."""
    place = urlsplit(url)
    reader, writer = (
        kept.pop() if kept else await asyncio.open_connection(place.hostname, place.port)
    )
    head = (
        f"POST {PREFIX}lease HTTP/1.1\r\nHost: service\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/vnd.msgpack\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    lines = (await reader.readuntil(b"\r\n\r\n")).lower()
    content = await reader.readexactly(int(lines.split(b"content-length:")[1].split()[0]))
    status = int(lines.split()[1])
    if status == 200:
        kept.append((reader, writer))
    else:
        writer.close()
    return status, content


if __name__ == "__main__":
    main()
