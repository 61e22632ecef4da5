"""How many rollout nodes are enough: so many that trainers hardly wait, and hardly more.

From what nodes and trainers did in a window of time. With G nodes that were busy a share u of it,
and trainers that waited a share w,

    demand = G u / (1 - w)                  nodes, if none of them were ever idle and no trainer
    waited

because a trainer that did not wait would consume 1 / (1 - w) times as much. The pool grows to the
demand when w is above a band, shrinks to the demand and a tenth when w is below it, and stays as it
is within. At the size that it comes to, neither applies: after growing w is about 0 and u about 1,
so that a tenth above the demand is above G; after shrinking u is at most 1 / 1.1, and no trainer
waits.

(AstraFlow's rule shrinks by consumed / produced groups. What a filter drops would look like surplus
to it, and where leases are refused while buffers are full, the two are the same however many nodes
idle.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LOW, _HIGH = 0.05, 0.10
"""The band of w."""
_MOST_WAIT = 0.95
_SPARE = 0.10
_ROUNDING = 1e-6
_SILENT_S = 120.0
"""A node that has not been heard of for so long is none."""


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two looks."""

    num_nodes: int
    node_busy_s: float
    """All nodes together had rollouts under way; node_waited_s: had none, for want of a lease."""
    node_waited_s: float
    trainer_wait: float
    """Share of its time that a trainer waited for batches; of several, that of the one which waited
    most."""
    num_trained: int
    """Groups that trainers got."""


def target_size(window: Window, smallest: int, largest: int) -> int:
    """Nodes that there should be, all of them together; at most twice as many as there are, and at
    least half.
    """
    num, node_s = window.num_nodes, window.node_busy_s + window.node_waited_s
    if not num:
        return max(smallest, 1)
    if node_s <= 0 or not window.num_trained:  # nothing to go by yet
        return min(max(num, smallest), largest)
    wait = min(window.trainer_wait, _MOST_WAIT)
    demand = num * window.node_busy_s / node_s / (1 - wait)
    wanted = num
    if wait > _HIGH:
        wanted = min(max(_ceil(demand), num), 2 * num)
    elif wait < _LOW:
        wanted = max(min(_ceil(demand * (1 + _SPARE)), num), math.ceil(num / 2))
    return min(max(wanted, smallest), largest)


def window_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Window:
    """Of two reports of `Dataflow.status`."""
    nodes, old_nodes = nodes_at_work(after), before["nodes"]
    policies = {
        name: policy
        for name, policy in after["policies"].items()
        if policy["state"] == "live" and name in before["policies"]
    }
    waits, num_trained = [0.0], 0
    for name, policy in policies.items():
        old = before["policies"][name]
        busy, waited = _gain(old, policy, "busy_s"), _gain(old, policy, "waited_s")
        waits.append(waited / (busy + waited) if busy + waited > 0 else 0.0)
        num_trained += int(_gain(old, policy, "step")) * policy["num_groups"]
    times = {
        key: sum(_gain(old_nodes.get(name, {}), node, key) for name, node in nodes.items())
        for key in ("busy_s", "waited_s")
    }
    return Window(len(nodes), times["busy_s"], times["waited_s"], max(waits), num_trained)


def nodes_at_work(status: Mapping[str, Any]) -> dict[str, Any]:
    return {name: node for name, node in status["nodes"].items() if node["seen_s_ago"] < _SILENT_S}


def _gain(old: Mapping[str, Any], new: Mapping[str, Any], key: str) -> float:
    """Of a number that only grows; it begins anew where somebody does."""
    return max(0.0, float(new[key]) - float(old.get(key, 0.0)))


def _ceil(x: float) -> int:
    return math.ceil(x - _ROUNDING)
