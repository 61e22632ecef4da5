"""How many nodes are enough: the rule by hand, on a simulated plant, and over reports."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from flowtrain.rollouts.pool_size import PoolSize, Window, target_size, window_between

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
    found = target_size(Window(num, busy * 60 * num, (1 - busy) * 60 * num, wait, 8))
    assert found == target


def test_no_data_changes_nothing() -> None:
    assert target_size(Window(4, 240, 0, 0.9, 0)) == 4, "no batch was trained"
    assert target_size(Window(4, 0, 0, 0.9, 8)) == 4, "no node has said anything"
    assert target_size(Window(0, 0, 0, 0.0, 0)) == 1


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
        name: {
            "state": "live",
            "seen_s_ago": 1.0,
            "busy_s": busy,
            "waited_s": waited,
            "num_groups": 1 + int(busy),
        }
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


def sizes(plant: Plant, start: int, num_windows: int) -> list[int]:
    found = [start]
    for _ in range(num_windows):
        found.append(target_size(plant.window(found[-1])))
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


# ---- over reports


class Looks:
    """Reports of a ledger, half a minute apart."""

    def __init__(self) -> None:
        self.size, self.time_s = PoolSize(), 1000.0

    def __call__(self, *args: Any, **nodes: dict[str, Any]) -> dict[str, float]:
        self.time_s += 30
        told = status(*args)
        for name, changes in nodes.items():
            told["nodes"][name] |= changes
        return self.size.of({**told, "time_s": self.time_s})


def test_a_window_waits_for_new_nodes_and_for_something_to_go_by() -> None:
    look = Looks()
    none = {"num_nodes": 0, "target": 0, "decided_s": 0.0}
    assert look(0, (0, 0), {}) == none
    two = {"a": (0.0, 0.0), "b": (0.0, 0.0)}
    undecided = {"num_nodes": 2, "target": 2, "decided_s": 0.0}
    assert look(0, (0, 0), two) == undecided, "a step has to end first"
    assert look(1, (1, 90), two) == undecided, "from here on it counts"
    busy = {"a": (30.0, 0.0), "b": (30.0, 0.0)}
    assert look(1, (1, 90), busy) == undecided, "no step yet"
    found = look(2, (31, 120), {"a": (60.0, 0.0), "b": (60.0, 0.0)})
    assert (found["num_nodes"], found["target"]) == (2, 4), "a trainer waited half of the time"
    decided_s = found["decided_s"]
    assert decided_s == look.time_s
    found = look(3, (32, 150), {"a": (70.0, 0.0), "b": (70.0, 0.0)})
    expected = {"num_nodes": 2, "target": 4, "decided_s": decided_s}
    assert found == expected, "two of them are still starting"
    four = dict.fromkeys("abcd", (60.0, 0.0))
    for step in (4, 5):
        assert look(step, (29 + step, 90 + 30 * step), four)["decided_s"] == decided_s
    found = look(6, (94, 241), dict.fromkeys("abcd", (75.0, 45.0)))
    assert found == {"num_nodes": 4, "target": 2, "decided_s": look.time_s}, "they mostly wait"


def test_a_window_begins_once_new_nodes_have_made_something() -> None:
    look = Looks()
    for steps in range(4):
        found = look(
            steps, (steps, 90 * steps), dict.fromkeys("ab", (0.0, 0.0)), b={"num_groups": 0}
        )
        assert not found["decided_s"], "one of them has made nothing yet"
    for steps in (4, 5):
        found = look(steps, (steps, 90 * steps), dict.fromkeys("ab", (steps, 0.0)))
        assert not found["decided_s"], "the step under way then began before"
    found = look(6, (35, 480), dict.fromkeys("ab", (30.0, 0.0)))
    assert found["target"] == 4, "half of the time since then a trainer waited"


def test_looks_are_half_a_minute_apart_however_many_ask() -> None:
    look = Looks()
    for step in range(2):
        look(step, (step, 0), {"a": (0.0, 0.0)})
    look.time_s -= 29
    assert not look(2, (31, 30), {"a": (60.0, 0.0)})["decided_s"]
    look.time_s -= 1
    assert look(2, (31, 30), {"a": (60.0, 0.0)})["target"] == 2


def test_nodes_that_have_ended_and_silent_ones_are_not_at_work() -> None:
    nodes = dict.fromkeys("abc", (0.0, 0.0))
    found = Looks()(0, (0, 0), nodes, b={"state": "ended"}, c={"seen_s_ago": 200.0})
    assert found["num_nodes"] == 1


def test_when_training_is_done_none_is_needed() -> None:
    done = {"planner": {"state": "done"}}
    told = {**status(9, (0, 0), {"a": (0.0, 0.0)}), "policies": done, "time_s": 1.0}
    assert PoolSize().of(told) == {"num_nodes": 1, "target": 0, "decided_s": 0.0}
