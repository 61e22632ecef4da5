"""Seeded chaos: whatever dies, whatever is lost, comes late, twice or in another order, every group is committed once and trained once."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from flowtrain.dataflow import client as client_module
from flowtrain.dataflow.client import Client
from flowtrain.dataflow.service import Service

for name in ("faulty_proxy", "fleet", "groups"):
    pytest.register_assert_rewrite(name)
import groups  # noqa: E402
from faulty_proxy import faulty  # noqa: E402
from fleet import TOKEN, Notes, run_node, run_trainer  # noqa: E402
from http_servers import running  # noqa: E402

NUM_STEPS = 4


class Actor(threading.Thread):
    """A thread whose error is the test's."""

    def __init__(self, call: Any, *args: Any) -> None:
        super().__init__(daemon=True)
        self._call, self._args = call, args
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call(*self._args)
        except BaseException as error:  # noqa: BLE001
            self.error = error

    def ended(self) -> None:
        self.join(60)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(client_module, "_FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(client_module, "_LONGEST_PAUSE_S", 0.02)


def check_ledger(ledger: Any, notes: Notes) -> None:
    audit = ledger.audit()
    assert audit.problems == ()
    notes.check(NUM_STEPS)
    counts = audit.counts
    shares = {name.partition(".")[2]: num for name, num in counts.items() if name.startswith("planner.")}
    assert sum(shares.values()) == counts["committed"], "each group has one share"
    assert shares["served"] == sum(map(len, notes.batches.values())), "and what was served is what was trained"


@pytest.mark.parametrize("seed", range(60))
def test_through_a_faulty_network(seed: int, tmp_path: Path) -> None:
    ledger = groups.ledger(tmp_path / "flow.sqlite", lease_s=0.2)
    rng, is_over, notes = random.Random(seed), threading.Event(), Notes()
    with running(Service(ledger, ledger.run, TOKEN)) as url, faulty(url, seed) as (front, counts):
        clients = [Client(front, TOKEN, wait_s=60.0, attempt_s=5.0) for _ in range(4)]
        nodes = [Actor(run_node, flow, f"n{at}", random.Random(rng.random()), is_over.is_set) for at, flow in enumerate(clients[1:])]
        Actor(run_trainer, clients[0], notes, rng, NUM_STEPS).ended()
        is_over.set()
        for node in nodes:
            node.ended()
        for client in clients:
            client.close()
    assert len(counts) > 4
    check_ledger(ledger, notes)
    ledger.close()
