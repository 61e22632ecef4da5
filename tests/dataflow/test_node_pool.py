"""The pool of nodes: the rule by hand, on a simulated plant, and with real processes."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fake_groups
import pytest

from examples.node_pool import Controller, Processes, Window, main, target_size, window_between
from flowtrain.dataflow.service import Service
from flowtrain.net import serving
from flowtrain.types import UserError

POOL = Path(__file__).parents[2] / "examples" / "node_pool.py"

# ---- by hand


@pytest.mark.parametrize(
    ("num", "busy", "wait", "target"),
    [
        (4, 1.0, 0.20, 5),  # 4 / 0.8
        (4, 1.0, 0.45, 8),  # 7.3
        (4, 1.0, 0.90, 8),  # 40 would be too sudden: twice at most
        (4, 1.0, 1.00, 8),
        (4, 1.0, 0.10, 4),  # within the band
        (10, 0.5, 0.05, 10),  # and though half of the nodes idle
        (10, 0.5, 0.11, 10),  # the trainer waits for something else than nodes
        (4, 1.0, 0.00, 4),  # all are needed: a tenth above 4 is above 4
        (10, 0.5, 0.00, 6),  # 5.5
        (10, 0.1, 0.00, 5),  # half at most
        (10, 0.9, 0.02, 10),  # 0.9 * 10 / 0.98 * 1.1 = 10.1
        (10, 0.8, 0.00, 9),  # 8.8
        (1, 0.0, 0.00, 1),
    ],
)
def test_hand_worked(num: int, busy: float, wait: float, target: int) -> None:
    found = target_size(Window(num, busy * 60 * num, (1 - busy) * 60 * num, wait, 8), 1, 100)
    assert found == target


def test_bounds_hold_and_no_data_changes_nothing() -> None:
    assert target_size(Window(4, 240, 0, 0.5, 8), 1, 6) == 6
    assert target_size(Window(4, 0, 240, 0.0, 8), 3, 6) == 3
    assert target_size(Window(4, 240, 0, 0.9, 0), 1, 6) == 4, "no batch was trained"
    assert target_size(Window(4, 0, 0, 0.9, 8), 1, 6) == 4, "no node has said anything"
    assert target_size(Window(9, 0, 0, 0.9, 8), 1, 6) == 6
    assert target_size(Window(0, 0, 0, 0.0, 0), 2, 6) == 2


def status(
    steps: int, trainer: tuple[float, float], nodes: dict[str, tuple[float, float]], **more: Any
) -> dict[str, Any]:
    planner = {
        "state": "live",
        "step": steps,
        "num_groups": 4,
        "busy_s": trainer[0],
        "waited_s": trainer[1],
    }
    told = {
        name: {"seen_s_ago": 1.0, "busy_s": busy, "waited_s": waited, "num_groups": 1 + int(busy)}
        for name, (busy, waited) in nodes.items()
    }
    return {"policies": {"planner": planner, **more.pop("policies", {})}, "nodes": told, **more}


def test_a_window_is_what_came_between_two_reports() -> None:
    before = status(3, (30, 10), {"a": (50, 10), "b": (40, 20), "gone": (9, 9)})
    verifier = {"state": "live", "step": 1, "num_groups": 2, "busy_s": 10.0, "waited_s": 5.0}
    before["policies"]["verifier"] = verifier
    after = status(5, (60, 20), {"a": (80, 10), "new": (7, 3), "b": (1, 2), "gone": (9, 9)})
    after["policies"]["verifier"] = {**verifier, "step": 2, "busy_s": 20.0, "waited_s": 15.0}
    after["policies"]["late"] = verifier
    after["nodes"]["gone"]["seen_s_ago"] = 1000.0
    assert window_between(before, after) == Window(3, 37.0, 3.0, 0.5, 2 * 4 + 2)
    after["policies"]["verifier"]["state"] = "silent"
    found = window_between(before, after)
    assert found == Window(3, 37.0, 3.0, 0.25, 8), "a trainer that is away waits for nothing"


# ---- a plant


@dataclass
class Plant:
    """Nodes that fill a bounded buffer, a filter, and a trainer that takes batches."""

    node_rate: float
    """Groups per second of a node."""
    step_s: float
    """Seconds of training on a batch of 8."""
    kept: float = 1.0
    noise: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    buffered: float = 0.0

    @property
    def enough(self) -> float:
        return 8 / self.step_s / (self.node_rate * self.kept)

    def window(self, num: int, seconds: float = 120.0) -> Window:
        """In ticks of a second."""
        node_busy = node_waited = busy = waited = trained = left = 0.0
        for _ in range(int(seconds)):
            rate = num * self.node_rate * self.kept * (1 + self.noise * self.rng.uniform(-1, 1))
            room = 32 - self.buffered
            made = min(rate, max(room, 0.0))
            self.buffered += made
            share = made / rate if rate else 0.0
            node_busy, node_waited = node_busy + num * share, node_waited + num * (1 - share)
            if left <= 0 and self.buffered >= 8:
                self.buffered, left, trained = (
                    self.buffered - 8,
                    left + self.step_s * (1 + self.noise * self.rng.uniform(-1, 1)),
                    trained + 8,
                )
            spent = min(max(left, 0.0), 1.0)
            left, busy, waited = left - 1.0 if left > 0 else 0.0, busy + spent, waited + 1 - spent
        return Window(num, node_busy, node_waited, waited / seconds, int(trained))


def sizes(plant: Plant, start: int, num_windows: int, largest: int = 200) -> list[int]:
    found = [start]
    for _ in range(num_windows):
        found.append(target_size(plant.window(found[-1]), 1, largest))
    return found


@pytest.mark.parametrize("start", [1, 5, 12, 30, 120])
@pytest.mark.parametrize("kept", [1.0, 0.4])
def test_from_anywhere_it_comes_to_one_size_and_stays(start: int, kept: float) -> None:
    plant = Plant(node_rate=0.1, step_s=8.0, kept=kept)
    found = sizes(plant, start, 30)
    last = found[-1]
    assert set(found[-18:]) == {last}, f"no oscillation: {found}"
    assert plant.enough * 0.9 <= last <= plant.enough * 1.25 + 1
    assert plant.window(last).trainer_wait <= 0.12
    changes = [b - a for a, b in itertools.pairwise(found) if a != b]
    seen = sum((a > 0) != (b > 0) for a, b in itertools.pairwise(changes))
    assert seen <= 1, f"turns back once at most: {found}"


def test_noise_moves_it_little() -> None:
    found = sizes(Plant(node_rate=0.1, step_s=8.0, noise=0.4), 3, 60)
    settled = found[-45:]
    assert max(settled) - min(settled) <= 2
    assert sum(a != b for a, b in itertools.pairwise(settled)) <= 3


def test_it_follows_a_load_that_changes() -> None:
    plant = Plant(node_rate=0.1, step_s=8.0)
    first = sizes(plant, 1, 20)[-1]
    plant.step_s = 4.0
    second = sizes(plant, first, 20)[-1]
    plant.step_s = 16.0
    third = sizes(plant, second, 20)[-1]
    assert 9 <= first <= 13 and 18 <= second <= 26 and 5 <= third <= 8


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


def test_the_controller_waits_for_new_nodes_and_for_something_to_go_by() -> None:
    processes = Sizes()
    controller = Controller(processes, 2, 8)

    def look(*args: Any) -> int:
        assert controller.look(status(*args))
        return processes.num

    assert look(0, (0, 0), {}) == 2
    assert look(0, (0, 0), {}) == 2, "they have not joined yet"
    two = {"a": (0.0, 0.0), "b": (0.0, 0.0)}
    assert look(0, (0, 0), two) == 2, "a step has to end first"
    assert look(1, (1, 90), two) == 2, "from here on it counts"
    busy = {"a": (30.0, 0.0), "b": (30.0, 0.0)}
    assert look(1, (1, 90), busy) == 2, "no step yet"
    found = look(2, (31, 120), {"a": (60.0, 0.0), "b": (60.0, 0.0)})
    assert found == 4, "half of the time since then a trainer waited"
    four = dict.fromkeys("abcd", (60.0, 0.0))
    found = look(3, (32, 150), {"a": (70.0, 0.0), "b": (70.0, 0.0)})
    assert found == 4, "two of them are still starting"
    assert look(4, (33, 180), four) == 4
    assert look(5, (34, 210), four) == 4
    found = look(6, (94, 211), dict.fromkeys("abcd", (75.0, 45.0)))
    assert found == 2, "they wait most of their time"
    assert not controller.look(
        {**status(9, (0, 0), two), "policies": {"planner": {"state": "done"}}}
    )


def test_a_window_begins_once_new_nodes_have_made_something() -> None:
    processes = Sizes()
    controller = Controller(processes, 2, 8)
    before = status(0, (0, 0), dict.fromkeys("ab", (0.0, 0.0)))
    assert controller.look(before) and processes.num == 2
    before["nodes"]["b"]["num_groups"] = 0
    for steps in range(1, 4):
        controller.look({**status(steps, (steps, 90 * steps), {}), "nodes": before["nodes"]})
        assert processes.num == 2, "one of them has made nothing yet"
    before["nodes"]["b"]["num_groups"] = 1
    for steps in (4, 5):
        controller.look(status(steps, (steps, 90 * steps), dict.fromkeys("ab", (steps, 0.0))))
        assert processes.num == 2, "the step under way then began before"
    controller.look(status(6, (35, 480), dict.fromkeys("ab", (30.0, 0.0))))
    assert processes.num == 4, "half of the time since then a trainer waited"


def test_nodes_elsewhere_count_and_are_left_alone() -> None:
    processes = Sizes()
    controller = Controller(processes, 1, 3)
    far = [f"far{i}" for i in range(4)]

    def look(step: int, trainer: tuple[float, float], own: list[str], *node: float) -> int:
        controller.look(status(step, trainer, dict.fromkeys([*far, *own], (node[0], node[1]))))
        return processes.num

    for step in range(3):
        look(step, (step, 0), ["own"], 0.0, 0.0)
    assert look(3, (62, 20), ["own"], 60.0, 0.0) == 3, "7 of 5 / 0.75 are wanted, 4 are there"
    own = ["own", "own2", "own3"]
    for step in (4, 5):
        look(step, (59 + step, 20), own, 60.0, 0.0)
    assert look(6, (124, 20), own, 60.0, 60.0) == 1, "at least that; the others are not ours"


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
