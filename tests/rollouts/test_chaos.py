"""Seeded chaos: whatever is lost or comes late, every group is committed and trained once."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fake_groups
import pytest
from faulty_proxy import faulty
from http_servers import running
from many_nodes import TOKEN, Notes, run_node, run_trainer

from flowtrain.rollouts import client as client_module
from flowtrain.rollouts.client import Client
from flowtrain.rollouts.contract import Refused
from flowtrain.rollouts.service import Service

pytestmark = pytest.mark.attack

NUM_STEPS = 4
IS_CAMPAIGN = "ATTACK_MINUTES" in os.environ
"""`make attack` tries more seeds."""


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
        self.join(250)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(client_module, "_LONGEST_PAUSE_S", 0.02)


def check_ledger(ledger: Any, notes: Notes) -> None:
    audit = ledger.audit()
    assert audit.problems == ()
    notes.check(NUM_STEPS)
    counts, tokens = audit.counts, audit.tokens["planner"]
    assert tokens.fates["trained"] == sum(map(notes.num_tokens, notes.batches))
    assert tokens.sampled >= tokens.fates["trained"] and "in_batches" not in tokens.fates
    shares = {
        name.partition(".")[2]: num for name, num in counts.items() if name.startswith("planner.")
    }
    assert sum(shares.values()) == counts["committed"], "each group has one share"
    found = shares["assigned"]
    assert found == sum(map(len, notes.batches.values())), "and what was served is what was trained"


class FaultyCalls:
    """A client before the services of one database: each request reaches any of them, now or later,
    once or more often or not at all, and is repeated until it is answered. Now and then a service
    restarts.
    """

    def __init__(
        self, make_ledger: Callable[[], Any], ledgers: list[Any], rng: random.Random
    ) -> None:
        self._make, self._ledgers, self._random = make_ledger, ledgers, rng
        self._late: list[Callable[[], Any]] = []
        self._until = time.monotonic() + 250.0  # no thread goes on behind the tests after this one

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._ask, name)

    def _ask(self, name: str, request: Any) -> Any:
        while True:
            if time.monotonic() > self._until:
                raise TimeoutError(f"{name} is asked in vain: {self._ledgers[0].status()}")
            answer = [
                self._once(name, request) for _ in range(self._random.choice([0, 1, 1, 1, 1, 2]))
            ]
            if self._random.random() < 0.1:
                self._late.append(partial(self._once, name, request))
            if self._random.random() < 0.1:
                # IndexError: there is none; Refused: it was answered long ago.
                with contextlib.suppress(IndexError, Refused):
                    self._late.pop(self._random.randrange(len(self._late) or 1))()
            if answer and self._random.random() < 0.9:
                return answer[-1]

    def _once(self, name: str, request: Any) -> Any:
        if self._random.random() < 0.02:
            self._ledgers[self._random.randrange(len(self._ledgers))] = self._make()
        return getattr(self._random.choice(self._ledgers), name)(request)


def faulty_calls(database: str | Path, seed: int) -> None:
    """Three nodes and a trainer over two services, whose answers get lost."""
    opened: list[Any] = []

    def make() -> Any:
        opened.append(fake_groups.ledger(database, lease_s=0.1, max_attempts=1000))
        return opened[-1]

    rng, is_over, notes, ledgers = random.Random(seed), threading.Event(), Notes(), [make(), make()]
    flows = [FaultyCalls(make, ledgers, random.Random(rng.random())) for _ in range(4)]
    nodes = [
        Actor(run_node, flow, f"n{at}", random.Random(rng.random()), is_over.is_set)
        for at, flow in enumerate(flows[1:])
    ]
    try:
        Actor(run_trainer, flows[0], notes, rng, NUM_STEPS).ended()
    finally:
        is_over.set()
    for node in nodes:
        node.ended()
    check_ledger(opened[0], notes)
    for ledger in opened:
        ledger.close()


@pytest.mark.parametrize("seed", range(10 if IS_CAMPAIGN else 4))
def test_services_of_one_sqlite_file(seed: int, tmp_path: Path) -> None:
    faulty_calls(tmp_path / "flow.sqlite", seed)


@pytest.mark.parametrize("seed", range(3 if IS_CAMPAIGN else 2))
def test_services_of_one_postgresql_server(seed: int, postgres: str) -> None:
    faulty_calls(postgres, 1000 + seed)


def through_a_faulty_network(database: Path, seed: int) -> None:
    ledger = fake_groups.ledger(database, lease_s=0.2, max_attempts=1000)
    rng, is_over, notes = random.Random(seed), threading.Event(), Notes()
    with (
        running(Service(ledger, ledger.run, TOKEN)) as url,
        faulty(url, seed) as (front, counts),
        Client(front, TOKEN, wait_s=60.0, attempt_s=5.0) as flow,
    ):
        nodes = [
            Actor(run_node, flow, f"n{at}", random.Random(rng.random()), is_over.is_set)
            for at in range(3)
        ]
        try:
            Actor(run_trainer, flow, notes, rng, NUM_STEPS).ended()
        finally:
            is_over.set()
        for node in nodes:
            node.ended()
    assert len(counts) > 4, "faults of many kinds"
    check_ledger(ledger, notes)
    ledger.close()


@pytest.mark.parametrize("seed", range(3 if IS_CAMPAIGN else 1))
def test_through_a_faulty_network(seed: int, tmp_path: Path) -> None:
    through_a_faulty_network(tmp_path / "flow.sqlite", seed)
