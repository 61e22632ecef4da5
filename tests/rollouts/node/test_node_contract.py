"""The contract of every node, ours and that of the examples, as real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Process, Server
from loopback_dataflow import (
    TOKEN,
    DataflowServer,
    Trainer,
    begin_node,
    killed_at_the_end,
    make_config,
    make_model,
    serve_dataflow,
)

from flowtrain.rollouts.codec import pack_group, unpack_group
from flowtrain.rollouts.contract import Join, LeaseRequest, Push, Pushed, Unavailable
from flowtrain.rollouts.ledger import Ledger
from flowtrain.tasks.sets import task_set

pytest_plugins = ("cli_runs",)
PLAIN = Path(__file__).parents[3] / "examples" / "plain_node.py"


@dataclass
class RecordingLedger:
    """A ledger that records its requests, and lets a test step in before and after a push."""

    ledger: Ledger
    calls: list[tuple[str, Any]] = field(default_factory=list)
    before_push: Callable[[Push], None] = lambda push: None
    after_push: Callable[[Push], None] = lambda push: None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def push(self, request: Push) -> Pushed:
        with self.lock:
            self.calls.append(("push", request))
            self.before_push(request)
            answer = self.ledger.push(request)
            self.after_push(request)
            return answer

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.ledger, name)
        if name not in ("join", "lease", "renew", "release"):
            return method

        def noted(request: Any) -> Any:
            self.calls.append((name, request))
            # No lease comes between what a hook of a push does.
            with self.lock if name in ("lease", "renew") else contextlib.nullcontext():
                return method(request)

        return noted

    def asked(self, name: str) -> list[Any]:
        return [request for method, request in self.calls if method == name]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def clock() -> list[float]:
    return [5e8]


@pytest.fixture
def dataflow(model: str, clock: list[float], tmp_path: Path) -> Iterator[DataflowServer]:
    config = make_config(model, dataflow={"max_waiting": 36})  # no trainer takes what they make
    ledger = Ledger(
        tmp_path / "ledger.sqlite", config, task_set(config).cursor(0, 0), clock=lambda: clock[0]
    )
    with serve_dataflow(config, tmp_path, ledger, RecordingLedger(ledger)) as made:
        made.registered = Trainer(ledger, model, tmp_path / "weights").register(num_groups=4)
        yield made
        assert not ledger.audit().problems


@pytest.fixture(params=["ours", "plain"])
def start(
    request: pytest.FixtureRequest, dataflow: DataflowServer, tmp_path: Path
) -> Iterator[Callable[[int], Process]]:
    """A node that pushes so many groups."""
    import subprocess

    ours: Server | None = request.getfixturevalue("server") if request.param == "ours" else None
    out, err = tmp_path / "out", tmp_path / "err"

    def new(num_groups: int) -> Process:
        if ours is not None:
            return begin_node(ours, dataflow, "n1", "--num_groups", num_groups)
        process = subprocess.Popen(
            f"{sys.executable} {PLAIN} {dataflow.url} --name n1 --num_groups {num_groups}".split(),
            stdout=out.open("w"),
            stderr=err.open("w"),
            env={**os.environ, "FLOWTRAIN_TOKEN": TOKEN},
        )
        return Process(process.pid, out, err, process.poll)

    with killed_at_the_end() as started:

        def begin(num_groups: int) -> Process:
            started.append(new(num_groups))
            return started[-1]

        yield begin


def work_items(dataflow: DataflowServer) -> dict[str, int]:
    return dict(dataflow.ledger.status()["work_items"])


def test_a_node_pushes_groups_that_can_be_trained_and_again_without_an_answer(
    dataflow: DataflowServer, start: Callable[[int], Process]
) -> None:
    """What had been committed is a duplicate the second time, and counts once."""
    lost: list[int] = []

    def lose(push: Push) -> None:
        if len(lost) < 2:
            lost.append(push.work_item)
            raise Unavailable("the answer is lost")

    recorded: RecordingLedger = dataflow.answers
    recorded.after_push = lose
    node = start(8)
    assert node.wait() == 0, node.err.read_text()
    again = [push.work_item for push in recorded.asked("push")]
    assert all(again.count(work_item) == lost.count(work_item) + 1 for work_item in set(lost))
    committed = work_items(dataflow)["committed"]
    assert 8 <= committed <= 10
    assert work_items(dataflow) == {"leased": 0, "waiting": 0, "committed": committed, "failed": 0}
    names = [name for name, _ in recorded.calls]
    assert names.index("join") < names.index("lease") < names.index("push")
    assert all(
        isinstance(join, Join) and join.node == "n1" and join.life
        for join in recorded.asked("join")
    )
    found = len({lease.key for lease in recorded.asked("lease")})
    assert found == len(recorded.asked("lease")), "a key for each request"
    groups = dataflow.ledger.status()["policies"]["planner"]["groups"]
    assert groups["fresh"]["num"] == committed, "none is empty, stale or filtered"
    for push in recorded.asked("push"):
        group = unpack_group(push.payload)
        assert len(group.trajectories) == 2
        assert all(t.reward is not None for t in group.trajectories)
        assert len({t.seed for t in group.trajectories}) == 2


def test_a_node_survives_a_lease_that_ran_out(
    dataflow: DataflowServer, clock: list[float], start: Callable[[int], Process]
) -> None:
    """Before its first push another node has got its work items and was faster with one of them."""
    ledger = dataflow.ledger

    def overtake(push: Push) -> None:
        dataflow.answers.before_push = lambda push: None
        clock[0] += 1000.0
        ledger.register(dataflow.registered)
        ledger.join(Join("fast", "life"))
        leases = ledger.lease(LeaseRequest("fast", "life", 1)).leases
        assert leases[0].attempt == 2, "what had been leased goes out again"
        group = unpack_group(push.payload)
        mine = next(lease for lease in leases)
        task = [type(t)(**{**_fields(t), "task": mine.task}) for t in group.trajectories]
        assert (
            ledger.push(
                Push("fast", mine.work_item, 2, pack_group(type(group)(0, tuple(task))))
            ).status
            == "committed"
        )

    dataflow.answers.before_push = overtake
    node = start(8)
    assert node.wait() == 0, node.err.read_text()
    assert work_items(dataflow)["failed"] == 0
    # Its other leases ran out, too: it may get some of them again, and push them twice.
    assert work_items(dataflow)["committed"] > 1
    assert dataflow.ledger.status()["nodes"]["fast"]["num_groups"] == 1


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def test_a_node_releases_its_leases_on_sigterm(
    dataflow: DataflowServer, start: Callable[[int], Process]
) -> None:
    told = threading.Event()
    process: list[Process] = []

    def tell(push: Push) -> None:
        if not told.is_set():
            told.set()
            os.kill(process[0].pid, signal.SIGTERM)

    dataflow.answers.before_push = tell
    process.append(start(1000))
    assert process[0].wait() == 0, process[0].err.read_text()
    left = work_items(dataflow)
    assert left["leased"] == 0, "nobody has to wait until they run out"
    assert left["committed"] >= 1
    assert left["waiting"] >= 1
    assert len(dataflow.answers.asked("release")) == 1
