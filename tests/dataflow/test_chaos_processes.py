"""kill -9 of services, nodes and the trainer, each a process of its own, while they work."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from many_nodes import TOKEN, Notes

from flowtrain.dataflow.client import Client
from flowtrain.dataflow.ledger import audit_database
from flowtrain.dataflow.ledger.sql import connect

HERE = Path(__file__).parent
NUM_STEPS, NUM_KILLS = 20, 6
CONFIG = (
    "--rollout.group_size 2 --rollout.num_questions 4 --train.num_minibatches 1 --tasks.num_train "
    "64 --dataflow.lease_s"
)
LIMIT_S = 120.0
SKEWED = """
import runpy, sys, time
real, skew_s = time.time, float(sys.argv.pop(1))
time.time = lambda: real() + skew_s
runpy.run_module("flowtrain.dataflow", run_name="__main__", alter_sys=True)
"""
"""A service on a machine whose clock is wrong by the seconds of its first argument."""


class Crew:
    """Processes by name, which are started again when they are killed."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
        self._env = {**os.environ, "PYTHONPATH": path, "FLOWTRAIN_TOKEN": TOKEN, "no_proxy": "*"}
        self._commands: dict[str, list[str]] = {}
        self._alive: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> None:
        self._commands[name] = [sys.executable, *command]
        self._alive[name] = subprocess.Popen(
            self._commands[name], env=self._env, stdout=subprocess.DEVNULL
        )

    def kill(self, name: str, number: int) -> int:
        """With a signal; its exit code. It begins anew."""
        self._alive[name].send_signal(number)
        code = self._alive[name].wait(30)
        self.start(name, *self._commands[name][1:])
        return code

    def has_ended(self, name: str) -> bool:
        """And nobody by an error."""
        codes = {each: process.poll() for each, process in self._alive.items()}
        assert not any(codes.values()), codes
        return codes[name] is not None

    def close(self) -> None:
        for process in self._alive.values():
            process.kill()
            process.wait(30)


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew()
    with contextlib.closing(crew):
        yield crew


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end, "it does not go on"
        time.sleep(0.01)


def num_committed(database: str) -> int:
    return audit_database(database).counts.get("committed", 0)


def test_nothing_is_lost_and_nothing_doubled(database: str, tmp_path: Path, crew: Crew) -> None:
    """On PostgreSQL each node and the trainer ask a service of their own, on machines whose clocks
    differ by minutes: no lease is taken away for that.
    """
    is_postgres = database.startswith("postgresql")
    # On PostgreSQL no lease runs out within the test; what is killed begins anew and says so.
    skews, lease_s = ((-90, 0, 90), 60.0) if is_postgres else ((0,), 0.5)
    num_services = len(skews)
    ports = [free_port() for _ in skews]
    for at, (port, skew_s) in enumerate(zip(ports, skews, strict=True)):
        serve = ["serve", "--database", database, "--port", str(port)]
        crew.start(
            f"service {at}", "-c", SKEWED, str(skew_s), *serve, *CONFIG.split(), str(lease_s)
        )
    many_nodes, notes = str(HERE / "many_nodes.py"), tmp_path / "notes"
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with Client(urls[0], TOKEN, wait_s=60.0) as client:
        assert client.status()["work_items"]["committed"] == 0
    for at in range(2):
        crew.start(f"node {at}", many_nodes, "node", urls[at % num_services], str(at), f"n{at}")
    crew.start("trainer", many_nodes, "trainer", urls[-1], "0", str(notes), str(NUM_STEPS))

    rng = random.Random(num_services)
    num_kills = 0
    victims = [f"service {at}" for at in range(num_services)] * 2 + [
        "node 0",
        "node 1",
        "trainer",
        "trainer",
    ]
    while num_kills < NUM_KILLS and not crew.has_ended("trainer"):
        enough = num_committed(database) + rng.randint(1, 6)
        until(lambda: crew.has_ended("trainer") or num_committed(database) >= enough)  # noqa: B023
        victim = rng.choice(victims)
        if not crew.has_ended(victim):
            how = signal.SIGTERM if rng.random() < 0.2 else signal.SIGKILL
            assert crew.kill(victim, how) in (0, -how)
            num_kills += 1
    until(lambda: crew.has_ended("trainer"))
    until(lambda: crew.has_ended("node 0") and crew.has_ended("node 1"))
    assert num_kills >= NUM_KILLS / 2

    Notes(notes).check(NUM_STEPS)
    audit = audit_database(database)
    assert audit.problems == () and "failed" not in audit.counts
    if is_postgres:
        with connect(database).read() as transaction:
            endings = transaction.all("SELECT ending FROM leases WHERE ending <> '' ORDER BY 1")
        assert endings and {row.ending for row in endings}.isdisjoint({"ran out"})
    assert audit.counts["planner.assigned"] == sum(map(len, Notes(notes).batches.values()))
    assert (
        sum(num for name, num in audit.counts.items() if name.startswith("planner."))
        == audit.counts["committed"]
    )
