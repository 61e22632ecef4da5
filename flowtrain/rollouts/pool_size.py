"""How many rollout nodes the trainers of a dataflow need: `Ledger.status` tells, and pools of nodes
follow (`examples/node_pool.py`, `deploy/`).

The estimate uses a window between two observations, which begins once every node has finished a
group or had to wait and trainers have finished a step: rollouts take minutes, a new node has
produced nothing, and a trainer reports its waits at the end of a step. With G nodes that were busy
a share u of it, and trainers that waited a share w,

    demand = G u / (1 - w)      nodes, if none of them were ever idle and no trainer waited

because a trainer that did not wait would consume 1 / (1 - w) times as much. The target grows to the
demand when w is above a band, shrinks to the demand and a tenth when w is below it, and stays as it
is within the band. The rule does not oscillate: after growing w is about 0 and u about 1, so that a
tenth above the demand exceeds G; after shrinking u is at most 1 / 1.1, and no trainer waits. A node
is busy while any of its slots is, so that a pool which begins far too large may need a few looks.

(AstraFlow's rule shrinks by consumed / produced groups. Groups that a filter drops would look like
surplus to it, and where leases are refused because buffers are full, both rates are the same
however many nodes idle.)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LOW, _HIGH = 0.05, 0.10
"""The band of w."""
_MAX_WAIT = 0.95
_SPARE = 0.10
_ROUNDING = 1e-6
_SILENT_S = 120.0
"""Seconds after which a silent node counts as gone."""
_LOOK_S = 30.0
"""Seconds between two looks."""
_NUM_SETTLING = 3
"""Looks that new nodes have to join; after them the pool goes by those that have."""
_NUM_WARMING = 20
"""Looks that they have to make a group each."""


@dataclass(frozen=True, slots=True)
class Window:
    """The time between two looks."""

    num_nodes: int
    node_busy_s: float
    """Seconds that nodes had rollouts under way, summed over nodes."""
    node_waited_s: float
    """Seconds that nodes had none for want of a lease, summed over nodes."""
    trainer_wait: float
    """Share of its time that a trainer waited for batches; the largest of several trainers."""
    num_trained: int
    """Groups that trainers got."""


class PoolSize:
    """Follows the reports of one ledger; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._target = 0
        self._decided_s = self._looked_s = 0.0
        self._before: Mapping[str, Any] | None = None
        self._warm: Mapping[str, Any] | None = None
        """The first look at nodes that are all warm."""
        self._num_looks = 0

    def of(self, status: Mapping[str, Any]) -> dict[str, float]:
        """Return num_nodes, those at work; target, how many there should be, of 0 where training is
        done; and decided_s, when that was decided, 0 for never: then it is as many as there are.
        """
        with self._lock:
            num_nodes = len(nodes_at_work(status))
            if status["time_s"] - self._looked_s >= _LOOK_S:
                self._looked_s = status["time_s"]
                self._look(status, num_nodes)
            policies = status["policies"].values()
            is_done = bool(policies) and all(policy["state"] == "done" for policy in policies)
            target = 0 if is_done else self._target if self._decided_s else num_nodes
            return {"num_nodes": num_nodes, "target": target, "decided_s": self._decided_s}

    def _look(self, status: Mapping[str, Any], num_nodes: int) -> None:
        if self._before is None:
            self._num_looks += 1
            have_joined = num_nodes >= self._target or self._num_looks > _NUM_SETTLING
            are_warm = all(map(_is_warm, nodes_at_work(status).values()))
            if have_joined and (are_warm or self._num_looks > _NUM_WARMING):
                self._warm = self._warm or status
                if _has_stepped(self._warm, status):
                    self._before = status
        elif (window := window_between(self._before, status)).num_trained:
            self._before = status
            self._target, self._decided_s = target_size(window), status["time_s"]
            if self._target != num_nodes:  # a new window, once all nodes are at work
                self._before = self._warm = None
                self._num_looks = 0


def target_size(window: Window) -> int:
    """Return the number of nodes that there should be in all: 1 or more, at most twice as many as
    there are, and at least half.
    """
    num = window.num_nodes
    node_s = window.node_busy_s + window.node_waited_s
    if node_s <= 0 or not window.num_trained:  # nothing to go by yet
        return max(num, 1)
    demand = num * window.node_busy_s / node_s / (1 - min(window.trainer_wait, _MAX_WAIT))
    if window.trainer_wait > _HIGH:
        return min(max(_ceil(demand), num), 2 * num)
    if window.trainer_wait < _LOW:
        return max(min(_ceil(demand * (1 + _SPARE)), num), math.ceil(num / 2), 1)
    return num


def window_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Window:
    """Return the window between two reports of `Dataflow.status`."""
    nodes = nodes_at_work(after)
    waits, num_trained = [0.0], 0
    for name, policy in after["policies"].items():
        if policy["state"] != "live" or name not in before["policies"]:
            continue
        previous = before["policies"][name]
        busy, waited = (_gain(previous, policy, key) for key in ("busy_s", "waited_s"))
        waits.append(waited / (busy + waited) if busy + waited > 0 else 0.0)
        num_trained += int(_gain(previous, policy, "step")) * policy["num_groups"]
    busy_s, waited_s = (
        sum(_gain(before["nodes"].get(name, {}), node, key) for name, node in nodes.items())
        for key in ("busy_s", "waited_s")
    )
    return Window(len(nodes), busy_s, waited_s, max(waits), num_trained)


def nodes_at_work(status: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: node
        for name, node in status["nodes"].items()
        if node["state"] != "ended" and node["seen_s_ago"] < _SILENT_S
    }


def _is_warm(node: Mapping[str, Any]) -> bool:
    """Return whether it has made a group, or has found nothing to do."""
    return bool(node["num_groups"] or node["waited_s"])


def _has_stepped(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether each trainer at work has ended a step in between: it tells then how long it
    waited, for that step too, before the nodes were warm.
    """
    return all(
        _gain(before["policies"].get(name, {}), policy, "busy_s") > 0
        for name, policy in after["policies"].items()
        if policy["state"] == "live"
    )


def _gain(previous: Mapping[str, Any], current: Mapping[str, Any], key: str) -> float:
    """Return the growth of a counter, which restarts when a process does."""
    return max(0.0, float(current[key]) - float(previous.get(key, 0.0)))


def _ceil(x: float) -> int:
    return math.ceil(x - _ROUNDING)
