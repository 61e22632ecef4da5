"""Measure the service of the dataflow in real time: `python -m flowtrain.dataflow serve` over HTTP
on loopback, its database on disk.

"alone": one lease, one push and a place in one batch, one after another, while nothing else
happens: what the service adds to a group. "at once": many groups are leased, then pushed by 8
threads, then served, on the cores that service and client share. Groups are as large as those of
the quickstart, and packed beforehand, for that is the nodes' work.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from flowtrain.config import Checkpoint
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
)
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

NUM_GROUPS, GROUP_SIZE = 16, 8
"""The quickstart's: groups of a step, rollouts of a group."""
NUM_THREADS, PER_REQUEST = 8, 64
NODE, POLICY = "bench", "planner"
_CHECKPOINT_EVERY = Checkpoint().every


class Shape(NamedTuple):
    """Turns of a rollout, and tokens of each turn."""

    turns: int
    prompt: int
    response: int


SMALL = Shape(2, 90, 24)
"""The quickstart's, in the middle of training."""
LARGE = Shape(10, 4000, 400)
"""Of an agent with ten turns."""


Service = tuple[str, str]
"""URL and token."""


def rows(num_groups: int, num_alone: int, postgres: str) -> list[dict[str, Any]]:
    """`postgres` is the URL of a server where databases may be made; "": SQLite alone."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        found += _rows("SQLite", str(Path(folder) / "ledger.db"), num_groups, num_alone)
    if postgres:
        with database_of(postgres) as url:
            found += _rows("PostgreSQL", url, num_groups, num_alone)
    return found


def _rows(name: str, database: str, num_groups: int, num_alone: int) -> list[dict[str, Any]]:
    sizes = {
        "rollout.num_questions": NUM_GROUPS,
        "rollout.group_size": GROUP_SIZE,
        "dataflow.max_waiting": num_groups + num_alone,
    }
    options = [word for key, number in sizes.items() for word in (f"--{key}", str(number))]
    with (
        service(database, options) as (url, token),
        Client(url, token, wait_s=120.0) as client,
    ):
        client.join(Join(NODE, NODE))
        client.register(Register(POLICY, "", "", NUM_GROUPS, 10_000, 1 << 16, 1 << 16))
        alone, num_bytes = _alone(client, num_alone)
        at_once = _at_once(client, num_groups, next_step=num_alone // NUM_GROUPS + 1)
    common = {"database": name, "bytes_per_group": num_bytes}
    return [
        {**common, "service": "alone", "groups": num_alone, **alone},
        {**common, "service": "at once", "groups": num_groups, **at_once},
    ]


def _alone(client: Client, num_groups: int) -> tuple[dict[str, float], int]:
    """Milliseconds per group, and bytes of one."""
    leases_s, pushes_s, batches_s, payload = [], [], [], b""
    for number in range(num_groups):
        seconds, (lease,) = _timed(partial(_leased, client, 1))
        leases_s.append(seconds)
        payload = pack_group(group(lease))
        seconds, _ = _timed(
            partial(client.push, Push(NODE, lease.work_item, lease.attempt, payload))
        )
        pushes_s.append(seconds)
        if (number + 1) % NUM_GROUPS == 0:
            seconds, _ = _timed(partial(_batch, client, (number + 1) // NUM_GROUPS))
            batches_s.append(seconds / NUM_GROUPS)
    medians = {
        name: 1e3 * statistics.median(of)
        for name, of in (("lease", leases_s), ("push", pushes_s), ("batch", batches_s))
    }
    return {
        **{f"{name}_ms": value for name, value in medians.items()},
        "ms_per_group": sum(medians.values()),
    }, len(payload)


def _at_once(client: Client, num_groups: int, next_step: int) -> dict[str, float]:
    """Groups per second of each part, and of all of them one after another."""
    leased_s, leases = _timed(
        lambda: [
            lease
            for _ in range(0, num_groups, PER_REQUEST)
            for lease in _leased(client, PER_REQUEST)
        ]
    )
    pushes = [
        Push(NODE, lease.work_item, lease.attempt, pack_group(group(lease))) for lease in leases
    ]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        pushed_s, _ = _timed(lambda: list(threads.map(client.push, pushes)))
    num_steps = len(leases) // NUM_GROUPS
    served_s, _ = _timed(
        lambda: list(map(partial(_batch, client), range(next_step, next_step + num_steps)))
    )
    parts = {"lease": leased_s, "push": pushed_s, "batch": served_s}
    return {
        **{f"{name}_per_s": len(leases) / seconds for name, seconds in parts.items()},
        "groups_per_s": len(leases) / sum(parts.values()),
    }


def _leased(client: Client, num: int) -> tuple[Lease, ...]:
    leases = client.lease(
        LeaseRequest(NODE, NODE, num, {POLICY: 0}, key=secrets.token_hex(8))
    ).leases
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


def group(lease: Lease, shape: Shape = SMALL) -> Group:
    """Make a group as hard to compress as a real one: its tokens are drawn."""
    order = random.Random(lease.seed)
    rollouts = tuple(
        Trajectory(
            lease.task,
            tuple(_turn(order, shape, number == shape.turns - 1) for number in range(shape.turns)),
            "1284",
            0.7,
            rollout,
            reward=rollout % 2,
        )
        for rollout in range(GROUP_SIZE)
    )
    return Group(lease.index, rollouts)


def _turn(order: random.Random, shape: Shape, is_last: bool) -> Turn:
    said = "".join(order.choices(string.ascii_lowercase + " ", k=60))
    call = Call(
        prompt_ids=tuple(range(100, 100 + shape.prompt)),
        response_ids=tuple(order.randrange(300) for _ in range(shape.response)),
        logprobs=tuple(-order.random() for _ in range(shape.response)),
        spans=(VersionSpan(0, shape.response, 0),),
        finish_reason=FinishReason.STOP,
        text=said,
    )
    return Turn(
        calls={"planner": call},
        action=Action("", "", said[:20], "Search"),
        command=f"tool.execute(query={said[:20]!r})",
        result=ToolResult(f"The {said[:20]} is 1284.", seconds=order.random()),
        verdict=Verdict.STOP if is_last else Verdict.CONTINUE,
        seconds=0.3,
        plan_s=0.29,
    )


@contextmanager
def service(database: str, options: Sequence[str]) -> Iterator[Service]:
    """`python -m flowtrain.dataflow serve` as a process of its own: its URL and token."""
    token = secrets.token_urlsafe(16)
    command = [
        sys.executable,
        "-m",
        "flowtrain.dataflow",
        "serve",
        "--database",
        database,
        "--port",
        "0",
        *options,
    ]
    with subprocess.Popen(
        command, env={**os.environ, "FLOWTRAIN_TOKEN": token}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        try:
            if (match := re.search(r"http://\S+", said)) is None:
                raise SystemExit(f"the service did not start: {said}")
            yield match[0], token
        finally:
            process.terminate()


@contextmanager
def database_of(server: str) -> Iterator[str]:
    """A new database of the server, which is dropped afterwards."""
    import psycopg

    name = f"flowtrain_bench_{secrets.token_hex(4)}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield urlsplit(server)._replace(path=f"/{name}").geturl()
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
