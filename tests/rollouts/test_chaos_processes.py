"""kill -9 of services, nodes and the trainer, each a process of its own, while they work."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_runs import Process, Server
from many_nodes import TOKEN, Notes
from ports import free_port

from flowtrain.rollouts.client import Client
from flowtrain.rollouts.ledger import audit_database
from flowtrain.rollouts.ledger.sql import connect

pytest_plugins = ("cli_runs",)
HERE = Path(__file__).parent
NUM_STEPS, NUM_KILLS = 12, 5
SKEWS_S = (-90, 90)
LEASE_S = 60.0
"""No lease runs out within the test; what is killed begins anew and says so."""
CONFIG = (
    "--rollout.group_size 2 --rollout.num_questions 4 --train.num_minibatches 1 --tasks.num_train "
    "64 --dataflow.lease_s"
)
LIMIT_S = 120.0
SKEWED = "import time; real = time.time; time.time = lambda: real() + {skew_s}"
"""On a machine whose clock is wrong."""
ACTOR = """
import sys
sys.path[:0] = [{here!r}, {tests!r}]
import many_nodes
many_nodes.main(*{words!r})
os._exit(0)
"""
"""A node or the trainer in place of a command."""


class Crew:
    """Processes by name, which are started again when they are killed."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._started: dict[str, tuple[tuple[str, ...], str]] = {}
        self._alive: dict[str, Process] = {}
        self._ended: dict[str, int] = {}
        """Exit codes."""

    def start(self, name: str, *command: str, before: str = "") -> None:
        """Start the command `flowtrain.rollouts`, unless `before` does something else."""
        self._started[name] = command, before
        env = {"FLOWTRAIN_TOKEN": TOKEN, "no_proxy": "*"}
        self._alive[name] = self._server.start("rollouts", *command, before=before, env=env)

    def act(self, name: str, *words: str) -> None:
        both = {"here": str(HERE), "tests": str(HERE.parent)}
        self.start(name, before=ACTOR.format(**both, words=words))

    def kill(self, name: str, number: int) -> int:
        """With a signal; its exit code. It begins anew."""
        os.kill(self._alive[name].pid, number)
        code = self._alive[name].wait(30)
        command, before = self._started[name]
        self.start(name, *command, before=before)
        return code

    def has_ended(self, name: str) -> bool:
        """And nobody by an error."""
        for each, process in [*self._alive.items()]:
            if (code := process.poll()) is not None:
                del self._alive[each]
                self._ended[each] = code
                assert code == 0, f"{each}: {process.err.read_text()}"
        return name in self._ended

    def close(self) -> None:
        for process in self._alive.values():
            os.kill(process.pid, signal.SIGKILL)
            process.wait(30)


@pytest.fixture
def crew(server: Server) -> Iterator[Crew]:
    crew = Crew(server)
    with contextlib.closing(crew):
        yield crew


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end, "it does not go on"
        time.sleep(0.01)


def num_committed(database: str) -> int:
    return audit_database(database).counts.get("committed", 0)


def test_nothing_is_lost_and_nothing_doubled(postgres: str, tmp_path: Path, crew: Crew) -> None:
    """No lease is taken away though the clocks of the services differ by minutes."""
    num_services = len(SKEWS_S)
    ports = [free_port() for _ in SKEWS_S]
    for at, (port, skew_s) in enumerate(zip(ports, SKEWS_S, strict=True)):
        serve = ["serve", "--database", postgres, "--port", str(port)]
        options = (*CONFIG.split(), str(LEASE_S))
        crew.start(f"service {at}", *serve, *options, before=SKEWED.format(skew_s=skew_s))
    notes = tmp_path / "notes"
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with Client(urls[0], TOKEN, wait_s=60.0) as client:
        assert client.status()["work_items"]["committed"] == 0
    for at in range(2):
        crew.act(f"node {at}", "node", urls[at], str(at), f"n{at}")
    crew.act("trainer", "trainer", urls[-1], "0", str(notes), str(NUM_STEPS))

    rng = random.Random(num_services)
    num_kills = 0
    victims = [f"service {at}" for at in range(num_services)] * 2 + [
        "node 0",
        "node 1",
        "trainer",
        "trainer",
    ]
    while num_kills < NUM_KILLS and not crew.has_ended("trainer"):
        enough = num_committed(postgres) + rng.randint(1, 6)
        until(lambda: crew.has_ended("trainer") or num_committed(postgres) >= enough)  # noqa: B023
        victim = rng.choice(victims)
        if not crew.has_ended(victim):
            how = signal.SIGTERM if rng.random() < 0.2 else signal.SIGKILL
            assert crew.kill(victim, how) in (0, -how)
            num_kills += 1
    until(lambda: crew.has_ended("trainer"))
    until(lambda: crew.has_ended("node 0") and crew.has_ended("node 1"))
    assert num_kills >= NUM_KILLS / 2

    Notes(notes).check(NUM_STEPS)
    audit = audit_database(postgres)
    assert audit.problems == () and "failed" not in audit.counts
    with connect(postgres).read() as transaction:
        endings = transaction.all("SELECT ending FROM leases WHERE ending <> '' ORDER BY 1")
    assert endings and {row.ending for row in endings}.isdisjoint({"ran out"})
    assert audit.counts["planner.assigned"] == sum(map(len, Notes(notes).batches.values()))
    found = sum(num for name, num in audit.counts.items() if name.startswith("planner."))
    assert found == audit.counts["committed"]
