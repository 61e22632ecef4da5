"""kill -9 of nodes, trainer and database: the ledger adds up, and batches come again the same."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_groups import begun, events, group, joined, lease, ledger, planner, push
from many_nodes import NUM_GROUPS
from node_processes import NUM_STEPS

from flowtrain.rollouts.codec import pack_group
from flowtrain.rollouts.contract import BatchRequest, LeaseRequest, Progress, Push, Unavailable
from flowtrain.rollouts.ledger import Ledger, prompts

HERE = Path(__file__).parent


def node_processes(
    databases: list[str], on_death: Callable[[int], None] = lambda number: None
) -> int:
    """Run `node_processes.py`, and return how many were killed; `on_death` gets the number."""
    path = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent, HERE)))
    command = [sys.executable, str(HERE / "node_processes.py"), *databases]
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        guard = threading.Timer(200, process.kill)
        guard.start()
        num_deaths = 0
        for line in process.stdout:
            if line == "died\n":
                num_deaths += 1
                on_death(num_deaths)
        errors = process.stderr.read()
        guard.cancel()
    assert process.returncode == 0, errors
    return num_deaths


def check(database: str) -> None:
    """What was served is what was trained, and every group has one share."""
    flow = ledger(database)
    audit = flow.audit()
    assert audit.problems == ()
    assert audit.counts["planner.assigned"] == NUM_GROUPS * NUM_STEPS
    work_items = flow.status()["work_items"]
    assert work_items["failed"] == 0
    found = sum(n for name, n in audit.counts.items() if name.startswith("planner."))
    assert found == work_items["committed"]
    flow.close()


def test_killed_nodes_and_trainers_lose_and_double_nothing_on_sqlite(tmp_path: Path) -> None:
    databases = [str(tmp_path / f"{number}.db") for number in range(2)]
    assert node_processes(databases) > 8 * len(databases)
    for database in databases:
        check(database)


def test_killed_nodes_and_trainers_and_server_lose_and_double_nothing_on_postgres(
    postgres_server: Any,
) -> None:
    postgres_server.execute("CREATE DATABASE killed")
    url = postgres_server.url("killed")

    def restart(number: int) -> None:
        if number % 8 == 4:
            postgres_server.restart()

    assert node_processes([url], restart) > 8
    check(url)


def test_the_next_request_after_a_restart_of_the_server_is_answered(
    postgres: str, postgres_server: Any
) -> None:
    flow = begun(postgres)
    (each,) = lease(flow)
    postgres_server.restart()
    with pytest.raises(Unavailable, match="did not answer"):
        push(flow, each)
    assert push(flow, each) == "committed"
    assert flow.audit().problems == ()


def test_many_threads_at_once(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six nodes over two services; every push is sent twice at the same time."""
    monkeypatch.setattr(prompts, "_AHEAD", 10)
    flows = [ledger(database, max_waiting=1000) for _ in range(2)]
    flows[0].register(planner(num_groups=4, max_staleness=100))
    steps: list[list[int]] = []

    def node(number: int) -> int:
        flow = flows[number % 2]
        name, num_committed = f"n{number}", 0
        joined(flow, name)
        with ThreadPoolExecutor(2) as twice:
            for turn in range(8):
                for each in flow.lease(LeaseRequest(name, "a", 2, key=str(turn))).leases:
                    request = Push(name, each.work_item, each.attempt, pack_group(group(each.task)))
                    answers = sorted(
                        answer.status for answer in twice.map(flow.push, [request, request])
                    )
                    assert answers == ["committed", "duplicate"]
                    num_committed += 1
        return num_committed

    def trainer(flow: Ledger) -> None:
        for step in range(1, 6 * 16 // 4 + 1):
            while (answer := flow.batch(BatchRequest("planner", step))).num_missing:
                time.sleep(0.01)
            steps.append([served.work_item for served in answer.groups])
            flow.progress(Progress("planner", step, step))

    with ThreadPoolExecutor(7) as pool:
        training = pool.submit(trainer, flows[-1])
        assert sum(pool.map(node, range(6))) == 6 * 16
        training.result(timeout=60)
    assert sorted(work_item for step in steps for work_item in step) == list(range(1, 97))
    audit = flows[0].audit()
    assert audit.problems == ()
    assert (audit.counts["committed"], audit.counts["planner.assigned"]) == (96, 96)
    assert [event.number for event in events(flows[0])] == list(range(1, 96 + 24 + 1))
    for flow in flows:
        flow.close()
