"""The picture of what a ledger saw."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fake_groups import Clock, joined, lease, ledger, planner, push

from flowtrain.dataflow.__main__ import main
from flowtrain.dataflow.contract import BatchRequest
from flowtrain.dataflow.ledger.audit import reading
from flowtrain.dataflow.timeline import rates, read_timeline, trailing


def test_rates_by_hand() -> None:
    """Four events in 8 s, in bins of 2 s; the last moment is in the last bin."""
    assert rates([0.0, 0.5, 3.9, 8.0], 8.0, 4) == [1.0, 0.5, 0.0, 0.5]


def test_rates_lose_nothing() -> None:
    times = [random.Random(0).uniform(0, 9) for _ in range(100)]
    assert sum(rates(times, 9.0, 60)) * 9 / 60 == pytest.approx(100)


def test_a_trailing_mean_by_hand() -> None:
    assert trailing([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert trailing([], 3) == []


def test_a_ledger_becomes_a_picture(tmp_path: Path) -> None:
    """Two nodes push two groups each, which make a batch; the times are the ledger's."""
    clock = Clock()
    database = str(tmp_path / "flow.sqlite")
    flow = ledger(database, clock=clock)
    flow.register(planner(num_groups=4))
    for node in ("n1", "n2"):
        joined(flow, node, node)
        for each in lease(flow, 2, node, node):
            clock.now += 5
            assert push(flow, each, node=node) == "committed"
    flow.batch(BatchRequest("planner", 1))
    flow.close()

    with reading(database) as transaction:
        timeline = read_timeline(transaction)
    assert [(time, node) for time, node, _ in timeline.pushes] == [
        (5, "n1"),
        (10, "n1"),
        (15, "n2"),
        (20, "n2"),
    ]
    assert timeline.batches == {"planner": ((20, 0, 0, 0),)}
    assert timeline.leases == ((0, "n1", 1), (10, "n1", -1), (10, "n2", 1), (20, "n2", -1))

    out = tmp_path / "flow.png"
    assert main(["picture", "--database", database, "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_an_empty_ledger_has_no_picture(tmp_path: Path) -> None:
    database = str(tmp_path / "flow.sqlite")
    ledger(database).close()
    assert main(["picture", "--database", database]) == 2
    assert main(["picture", "--database", str(tmp_path / "none.sqlite")]) == 2
