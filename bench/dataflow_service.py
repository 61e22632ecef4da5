"""The service of the dataflow for `bench.dataflow`: `python -m flowtrain.rollouts serve` over HTTP
on loopback with its database on disk, and groups as large as those of the quickstart.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from flowtrain.records import (
    Action,
    Call,
    FinishReason,
    Group,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
    VersionSpan,
)
from flowtrain.rollouts.client import Client
from flowtrain.rollouts.contract import Lease, Register

NODE, LIFE, POLICY = "bench", "a", "planner"
GROUP_SIZE = 8
"""Rollouts of a group."""
_TURNS, _PROMPT, _RESPONSE = 2, 90, 24
"""Turns of a rollout, and tokens of each, as in the middle of the quickstart's training."""
Service = tuple[str, str]
"""URL and token."""


def group(lease: Lease) -> Group:
    """Make a group as hard to compress as a real one: its tokens are drawn."""
    order = random.Random(lease.seed)
    rollouts = tuple(
        Trajectory(
            lease.task,
            tuple(_turn(order, number == _TURNS - 1) for number in range(_TURNS)),
            "1284",
            0.7,
            rollout,
            reward=rollout % 2,
        )
        for rollout in range(GROUP_SIZE)
    )
    return Group(lease.index, rollouts)


def _turn(order: random.Random, is_last: bool) -> Turn:
    said = "".join(order.choices(string.ascii_lowercase + " ", k=60))
    call = Call(
        prompt_ids=tuple(range(100, 100 + _PROMPT)),
        response_ids=tuple(order.randrange(300) for _ in range(_RESPONSE)),
        logprobs=tuple(-order.random() for _ in range(_RESPONSE)),
        spans=(VersionSpan(0, _RESPONSE, 0),),
        finish_reason=FinishReason.STOP,
        text=said,
    )
    found = ToolResult(f"The {said[:20]} is 1284.", seconds=order.random())
    return Turn(
        calls={"planner": call},
        action=Action("", "", said[:20], "Search"),
        tool_calls=(ToolCall("Search", json.dumps({"query": said[:20]}), found),),
        verdict=Verdict.STOP if is_last else Verdict.CONTINUE,
        seconds=0.3,
        plan_s=0.29,
    )


@contextmanager
def service(
    database: str, num_groups: int, max_waiting: int = 0
) -> Iterator[tuple[Service, Client]]:
    """A service in a process of its own, asked by a trainer of batches of `num_groups`; and its
    client.
    """
    sizes = {
        "rollout.num_questions": num_groups,
        "rollout.group_size": GROUP_SIZE,
        "dataflow.max_waiting": max_waiting and max(max_waiting, num_groups),
    }
    command = [sys.executable, "-m", "flowtrain.rollouts", "serve", "--database", database]
    command += ["--port", "0"]
    command += [word for key, number in sizes.items() for word in (f"--{key}", str(number))]
    token = secrets.token_urlsafe(16)
    environment = {**os.environ, "FLOWTRAIN_TOKEN": token}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        try:
            if (match := re.search(r"http://\S+", said)) is None:
                raise SystemExit(f"the service did not start: {said}")
            with Client(match[0], token, wait_s=120.0) as client:
                client.register(Register(POLICY, "", "", num_groups, 10_000, 1 << 16, 1 << 16))
                yield (match[0], token), client
        finally:
            process.terminate()


@contextmanager
def new_database(server: str) -> Iterator[str]:
    """A new database of a PostgreSQL server, which is dropped afterwards; "": of SQLite."""
    if not server:
        with tempfile.TemporaryDirectory() as folder:
            yield str(Path(folder) / "ledger.db")
        return
    import psycopg

    name = f"flowtrain_bench_{secrets.token_hex(4)}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield urlsplit(server)._replace(path=f"/{name}").geturl()
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
