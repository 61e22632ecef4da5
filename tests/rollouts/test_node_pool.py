"""The pool of nodes of one machine, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_groups
import pytest

from examples.node_pool import Controller, Processes, main
from flowtrain.records import UserError
from flowtrain.rollouts.service import Service
from flowtrain.utils.net import serving

POOL = Path(__file__).parents[2] / "examples" / "node_pool.py"

# ---- processes

SLEEPER = (
    "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); "
    "time.sleep(600)"
)
STUBBORN = (
    "import signal, pathlib, sys, time; signal.signal(signal.SIGTERM, lambda *_: None); "
    "pathlib.Path(sys.argv[1]).touch()\n"
    "while True: time.sleep(60)"
)


def wait_for(is_so: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def pids(processes: Processes) -> list[int]:
    return [process.pid for process, _ in processes._running.values()]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_come_and_go_with_the_lowest_slots(tmp_path: Path) -> None:
    processes = Processes([sys.executable, "-S", "-c", SLEEPER, str(tmp_path / "{slot}")])
    try:
        processes.resize(3)
        first = pids(processes)
        wait_for(lambda: len(list(tmp_path.iterdir())) == 3)
        assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2"}
        processes.resize(2)
        assert pids(processes) == first[:2] and not is_alive(first[2])
        os.kill(first[0], signal.SIGKILL)
        wait_for(lambda: (processes.reap(), len(processes) == 1)[1])
        (tmp_path / "0").unlink()
        processes.resize(2)
        wait_for((tmp_path / "0").exists)
    finally:
        processes.close()
    assert len(processes) == 0 and not any(map(is_alive, first))


def test_who_does_not_end_is_killed(tmp_path: Path) -> None:
    processes = Processes(
        [sys.executable, "-S", "-c", STUBBORN, str(tmp_path / "{slot}")], grace_s=0.2
    )
    processes.resize(2)
    wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
    every = pids(processes)
    processes.close()
    assert not any(map(is_alive, every))


def test_a_command_that_fails_at_once_is_not_started_for_ever() -> None:
    processes = Processes([sys.executable, "-S", "-c", "raise SystemExit(2)"])
    with pytest.raises(UserError, match="3 nodes in a row ended at once with code 2"):
        while True:
            processes.resize(1)
            wait_for(lambda: processes._running[0][0].poll() is not None)
            processes.reap()
    with pytest.raises(UserError, match="no-such-command: No such file"):
        Processes(["no-such-command"]).resize(1)


class Sizes:
    """In place of processes: only how many there are."""

    def __init__(self) -> None:
        self.num = 0

    def __len__(self) -> int:
        return self.num

    def resize(self, num: int) -> None:
        self.num = num

    def reap(self) -> None:
        pass


def test_the_pool_follows_the_service_within_its_bounds_and_restarts_what_ends() -> None:
    processes = Sizes()
    controller = Controller(processes, 2, 6)

    def look(num_nodes: int, target: int, decided_s: float) -> int:
        pool = {"num_nodes": num_nodes, "target": target, "decided_s": decided_s}
        assert controller.look({"policies": {"planner": {"state": "live"}}, "pool": pool})
        return processes.num

    assert look(0, 0, 0.0) == 2
    assert look(2, 4, 1.0) == 4
    assert look(3, 4, 1.0) == 4, "one of them is still starting"
    processes.num = 3
    assert look(3, 4, 1.0) == 4, "one has died"
    assert look(4, 9, 2.0) == 6
    assert look(6, 1, 3.0) == 2
    done = {"num_nodes": 2, "target": 0, "decided_s": 3.0}
    assert not controller.look({"policies": {"planner": {"state": "done"}}, "pool": done})


def test_nodes_elsewhere_count_and_are_left_alone() -> None:
    processes = Sizes()
    controller = Controller(processes, 1, 8)

    def look(num_nodes: int, target: int, decided_s: float) -> int:
        pool = {"num_nodes": num_nodes, "target": target, "decided_s": decided_s}
        controller.look({"policies": {}, "pool": pool})
        return processes.num

    assert look(4, 4, 0.0) == 1
    assert look(5, 7, 1.0) == 3, "7 are enough, 4 are there"
    assert look(5, 7, 1.0) == 3, "two of its own have not joined yet"
    assert look(7, 4, 2.0) == 1, "at least that; the others are not ours"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    book = fake_groups.ledger(tmp_path / "ledger.sqlite")
    server, listener = serving.make_server(Service(book, book.run, "of-the-tests"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield serving.address(listener)
    server.should_exit = True
    thread.join(20)
    book.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_every_node_it_started(url: str, tmp_path: Path, number: int) -> None:
    place = tmp_path / "nodes"
    place.mkdir()
    node = (sys.executable, "-S", "-c", SLEEPER, str(place / "{slot}"))
    words = ("--url", url, "--min", "2", "--max", "3", "--every", "0.05", "--", *node)
    pool = subprocess.Popen(
        [sys.executable, str(POOL), *words], env={**os.environ, "FLOWTRAIN_TOKEN": "of-the-tests"}
    )
    try:
        wait_for(
            lambda: (
                len(list(place.iterdir())) == 2
                and all(path.read_text() for path in place.iterdir())
            ),
            40.0,
        )
        nodes = [int(path.read_text()) for path in place.iterdir()]
        assert all(map(is_alive, nodes))
        pool.send_signal(number)
        assert pool.wait(30) == 0
        assert not any(map(is_alive, nodes))
    finally:
        pool.kill()
        pool.wait()


@pytest.mark.parametrize(
    "words",
    [["--min", "3", "--max", "2"], ["--min", "0", "--max", "2"], ["--max", "2", "--every", "0"]],
)
def test_bounds_that_contradict_each_other(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--url", "http://127.0.0.1:9", *words, "--", "true"]) == 2
    assert "1 <= min <= max" in capsys.readouterr().err
