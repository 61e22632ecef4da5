"""What every node has to do, whoever wrote it: the same ordeals for ours and for the one of the
examples, each as a real process.
"""

from __future__ import annotations

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
from sites import TOKEN, Site, Trainer, make_config, make_model, once, site

from flowtrain.dataflow.codec import pack_group, unpack_group
from flowtrain.dataflow.contract import Join, LeaseRequest, Push, Pushed, Unavailable
from flowtrain.dataflow.ledger import Ledger
from flowtrain.tasks.sets import task_set

pytest_plugins = ("cli_runs",)
PLAIN = Path(__file__).parents[2] / "examples" / "plain_node.py"


@dataclass
class Ordeal:
    """A ledger that notes what it is asked, and lets a test step in before a push."""

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
def here(model: str, clock: list[float], tmp_path: Path) -> Iterator[Site]:
    config = make_config(model)
    ledger = Ledger(
        tmp_path / "ledger.sqlite", config, task_set(config).cursor(0, 0), clock=lambda: clock[0]
    )
    with site(config, tmp_path, ledger, Ordeal(ledger)) as made:
        made.registered = Trainer(ledger, model, tmp_path / "weights").register(num_groups=4)
        yield made
        assert not ledger.audit().problems


@pytest.fixture(params=["ours", "plain"])
def start(
    request: pytest.FixtureRequest, here: Site, tmp_path: Path
) -> Iterator[Callable[[int], Process]]:
    """A node that pushes so many groups."""
    import subprocess

    ours: Server | None = request.getfixturevalue("server") if request.param == "ours" else None
    started: list[Process] = []

    def begin(num_groups: int) -> Process:
        if ours is not None:
            words = ("--dataflow", here.url, "--name", "n1", "--num_groups", num_groups)
            started.append(once(ours.start("node", *words, env={"FLOWTRAIN_TOKEN": TOKEN})))
            return started[-1]
        out, err = tmp_path / "out", tmp_path / "err"
        words = (
            sys.executable,
            str(PLAIN),
            here.url,
            "--name",
            "n1",
            "--num_groups",
            str(num_groups),
        )
        process = subprocess.Popen(
            words,
            stdout=out.open("w"),
            stderr=err.open("w"),
            env={**os.environ, "FLOWTRAIN_TOKEN": TOKEN},
        )
        started.append(Process(process.pid, out, err, process.poll))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()


def work_items(here: Site) -> dict[str, int]:
    return dict(here.ledger.status()["work_items"])


def test_it_joins_leases_and_pushes_groups_that_can_be_trained(
    here: Site, start: Callable[[int], Process]
) -> None:
    node = start(8)
    assert node.wait() == 0, node.err.read_text()
    ordeal: Ordeal = here.answers
    assert work_items(here) == {"leased": 0, "waiting": 0, "committed": 8, "failed": 0}
    names = [name for name, _ in ordeal.calls]
    assert names.index("join") < names.index("lease") < names.index("push")
    assert all(
        isinstance(join, Join) and join.node == "n1" and join.life for join in ordeal.asked("join")
    )
    assert len({lease.key for lease in ordeal.asked("lease")}) == len(ordeal.asked("lease")), (
        "a key for each request"
    )
    assert here.ledger.status()["policies"]["planner"]["groups"]["fresh"]["num"] == 8, (
        "none is empty, stale or filtered"
    )
    for push in ordeal.asked("push"):
        group = unpack_group(push.payload)
        assert len(group.trajectories) == 2 and all(
            t.reward is not None for t in group.trajectories
        )
        assert len({t.seed for t in group.trajectories}) == 2


def test_a_push_whose_answer_was_lost_is_made_again(
    here: Site, start: Callable[[int], Process]
) -> None:
    """It had been committed: the second time it is a duplicate, and counts once."""
    lost: list[int] = []

    def lose(push: Push) -> None:
        if len(lost) < 2:
            lost.append(push.work_item)
            raise Unavailable("the answer is lost")

    here.answers.after_push = lose
    node = start(8)
    assert node.wait() == 0, node.err.read_text()
    again = [push.work_item for push in here.answers.asked("push")]
    assert all(again.count(work_item) == lost.count(work_item) + 1 for work_item in set(lost))
    assert work_items(here)["leased"] == 0 and 8 <= work_items(here)["committed"] <= 10


def test_a_lease_that_ran_out_costs_nothing_but_the_work(
    here: Site, clock: list[float], start: Callable[[int], Process]
) -> None:
    """Before its first push another node has got its work items and was faster with one of them."""
    ledger = here.ledger

    def overtake(push: Push) -> None:
        here.answers.before_push = lambda push: None
        clock[0] += 1000.0
        ledger.register(here.registered)
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

    here.answers.before_push = overtake
    node = start(8)
    assert node.wait() == 0, node.err.read_text()
    assert work_items(here)["failed"] == 0
    assert work_items(here)["committed"] >= 8
    assert here.ledger.status()["nodes"]["fast"]["num_groups"] == 1


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def test_it_gives_its_leases_back_when_it_is_told_to_end(
    here: Site, start: Callable[[int], Process]
) -> None:
    told = threading.Event()
    process: list[Process] = []

    def tell(push: Push) -> None:
        if not told.is_set():
            told.set()
            os.kill(process[0].pid, signal.SIGTERM)

    here.answers.before_push = tell
    process.append(start(1000))
    assert process[0].wait() == 0, process[0].err.read_text()
    left = work_items(here)
    assert left["leased"] == 0, "nobody has to wait until they run out"
    assert (
        left["committed"] >= 1 and left["waiting"] >= 1 and len(here.answers.asked("release")) == 1
    )
