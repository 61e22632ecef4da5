r"""Keep as many rollout nodes on this machine as the trainers of a dataflow need.

    python examples/node_pool.py --url http://127.0.0.1:8400 --max 8 -- \
        env CUDA_VISIBLE_DEVICES={slot} python -m flowtrain.node --dataflow http://127.0.0.1:8400

The pool starts and ends processes of the command after --, where {slot} is the number of the node
here, from 0. It looks at the service every 30 s, and ends its nodes when training is done, and on
SIGTERM or Ctrl-C. FLOWTRAIN_TOKEN is the token of the service.

How many nodes are enough follows from a window between two looks, which begins once every node has
made a group or had to wait, and trainers have ended a step since: rollouts take minutes, a node
that has just begun makes nothing, and a trainer tells at the end of a step how long it waited.
With G nodes that were busy a share u of it, and trainers that waited a share w,

    demand = G u / (1 - w)      nodes, if none of them were ever idle and no trainer waited

because a trainer that did not wait would consume 1 / (1 - w) times as much. The pool grows to the
demand when w is above a band, shrinks to the demand and a tenth when w is below it, and stays as it
is within the band. It does not oscillate: after growing w is about 0 and u about 1, so that a tenth
above the demand is above G; after shrinking u is at most 1 / 1.1, and no trainer waits. A node is
busy while any of its slots is, so that a pool which begins far too large may need a few looks.

(AstraFlow's rule shrinks by consumed / produced groups. Groups that a filter drops would look like
surplus to it, and where leases are refused because buffers are full, both rates are the same
however many nodes idle.)
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowtrain.dataflow.client import Client
from flowtrain.dataflow.contract import Refused, Unavailable
from flowtrain.net import serving
from flowtrain.types import UserError

_LOW, _HIGH = 0.05, 0.10
"""The band of w."""
_MAX_WAIT = 0.95
_SPARE = 0.10
_ROUNDING = 1e-6
_SILENT_S = 120.0
"""Seconds after which a silent node counts as gone."""

_GRACE_S = 30.0
"""Seconds that a node has to give its leases back after SIGTERM."""
_SOON_S = 20.0
"""A command that fails within so many seconds is wrong, not unlucky."""
_MAX_EARLY = 3
_NUM_SETTLING = 3
"""Looks that new nodes have to join; after them the pool goes by those that have."""
_NUM_WARMING = 20
"""Looks that they have to make a group each."""
_SLOT = "{slot}"


# ---- how many


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


def target_size(window: Window, smallest: int, largest: int) -> int:
    """The number of nodes that there should be in all; at most twice as many as there are, and at
    least half.
    """
    num = window.num_nodes
    node_s = window.node_busy_s + window.node_waited_s
    if not num:
        return max(smallest, 1)
    if node_s <= 0 or not window.num_trained:  # nothing to go by yet
        return min(max(num, smallest), largest)
    demand = num * window.node_busy_s / node_s / (1 - min(window.trainer_wait, _MAX_WAIT))
    wanted = num
    if window.trainer_wait > _HIGH:
        wanted = min(max(_ceil(demand), num), 2 * num)
    elif window.trainer_wait < _LOW:
        wanted = max(min(_ceil(demand * (1 + _SPARE)), num), math.ceil(num / 2))
    return min(max(wanted, smallest), largest)


def window_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Window:
    """The window between two reports of `Dataflow.status`."""
    nodes = nodes_at_work(after)
    waits, num_trained = [0.0], 0
    for name, policy in after["policies"].items():
        if policy["state"] != "live" or name not in before["policies"]:
            continue
        old = before["policies"][name]
        busy, waited = (_gain(old, policy, key) for key in ("busy_s", "waited_s"))
        waits.append(waited / (busy + waited) if busy + waited > 0 else 0.0)
        num_trained += int(_gain(old, policy, "step")) * policy["num_groups"]
    busy_s, waited_s = (
        sum(_gain(before["nodes"].get(name, {}), node, key) for name, node in nodes.items())
        for key in ("busy_s", "waited_s")
    )
    return Window(len(nodes), busy_s, waited_s, max(waits), num_trained)


def nodes_at_work(status: Mapping[str, Any]) -> dict[str, Any]:
    return {name: node for name, node in status["nodes"].items() if node["seen_s_ago"] < _SILENT_S}


def _is_warm(node: Mapping[str, Any]) -> bool:
    """Whether it has made a group, or has found nothing to do."""
    return bool(node["num_groups"] or node["waited_s"])


def _has_stepped(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether each trainer at work has ended a step in between: it tells then how long it waited,
    for that step too, before the nodes were warm.
    """
    return all(
        _gain(before["policies"].get(name, {}), policy, "busy_s") > 0
        for name, policy in after["policies"].items()
        if policy["state"] == "live"
    )


def _gain(old: Mapping[str, Any], new: Mapping[str, Any], key: str) -> float:
    """The growth of a counter, which restarts when a process does."""
    return max(0.0, float(new[key]) - float(old.get(key, 0.0)))


def _ceil(x: float) -> int:
    return math.ceil(x - _ROUNDING)


# ---- processes


class Processes:
    """Processes of one command. After `close` none of them runs."""

    def __init__(self, command: Sequence[str], grace_s: float = _GRACE_S) -> None:
        """`{slot}` in the command becomes the lowest number that no other process has."""
        self._command = command
        self._grace_s = grace_s
        self._running: dict[int, tuple[subprocess.Popen[bytes], float]] = {}
        """By slot: the process, and when it began."""
        self._num_early = 0

    def __len__(self) -> int:
        return len(self._running)

    def reap(self) -> None:
        """Forget the processes that have ended. Raises UserError when the command fails again and
        again.
        """
        for slot, (process, began) in list(self._running.items()):
            if (code := process.poll()) is None:
                continue
            del self._running[slot]
            is_early = code != 0 and time.monotonic() - began < _SOON_S
            self._num_early = self._num_early + 1 if is_early else 0
            if code:
                print(f"node {slot} has ended with code {code}", file=sys.stderr, flush=True)
            if self._num_early >= _MAX_EARLY:
                raise UserError(
                    f"{self._num_early} nodes in a row ended at once with code {code}: "
                    f"{' '.join(self._command)}"
                )

    def resize(self, num: int) -> None:
        """Start missing processes, or end the newest."""
        while len(self._running) < num:
            slot = next(slot for slot in range(num) if slot not in self._running)
            args = [arg.replace(_SLOT, str(slot)) for arg in self._command]
            try:
                # Ctrl-C reaches the pool alone, which then ends each node once.
                process = subprocess.Popen(args, start_new_session=True)
            except OSError as error:
                raise UserError(f"{args[0]}: {error.strerror}") from error
            self._running[slot] = process, time.monotonic()
        self._end(sorted(self._running, key=lambda slot: self._running[slot][1])[num:])

    def close(self) -> None:
        self._end(list(self._running))

    def _end(self, slots: Sequence[int]) -> None:
        """End processes side by side; one that takes too long is killed, with its children."""
        processes = [self._running[slot][0] for slot in slots]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + self._grace_s
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for slot in slots:
            del self._running[slot]


class Controller:
    """Resizes the pool by what it sees of the dataflow."""

    def __init__(self, processes: Processes, smallest: int, largest: int) -> None:
        """The bounds are for the processes here; nodes elsewhere come on top."""
        self._processes = processes
        self._smallest = smallest
        self._largest = largest
        self._before: Mapping[str, Any] | None = None
        self._warm: Mapping[str, Any] | None = None
        """The first look at nodes that are all warm."""
        self._num_looks = 0

    def look(self, status: Mapping[str, Any]) -> bool:
        """Act on a report; return False once training is done."""
        policies = status["policies"].values()
        if policies and all(policy["state"] == "done" for policy in policies):
            return False
        self._processes.reap()
        num_own = len(self._processes)
        nodes = nodes_at_work(status)
        num_all = len(nodes)
        if num_own < self._smallest:
            self._resize(self._smallest)
        elif self._before is None:
            self._num_looks += 1
            have_joined = num_all >= num_own or self._num_looks > _NUM_SETTLING
            are_warm = all(map(_is_warm, nodes.values())) or self._num_looks > _NUM_WARMING
            if have_joined and are_warm:
                self._warm = self._warm or status
                if _has_stepped(self._warm, status):
                    self._before = status
        elif (window := window_between(self._before, status)).num_trained:
            self._before = status
            num_others = max(0, num_all - num_own)
            smallest, largest = self._smallest + num_others, self._largest + num_others
            num = target_size(window, smallest, largest) - num_others
            if num != num_own:
                print(
                    f"{num_own} -> {num} nodes: trainers wait {window.trainer_wait:.0%} of their "
                    "time",
                    file=sys.stderr,
                    flush=True,
                )
                self._resize(num)
        return True

    def _resize(self, num: int) -> None:
        """Resize, and begin a new window once all nodes are at work."""
        self._processes.resize(num)
        self._before = self._warm = None
        self._num_looks = 0


def run(options: argparse.Namespace) -> None:
    if not 1 <= options.min <= options.max or options.every <= 0:
        raise UserError(
            f"--min {options.min}, --max {options.max} and --every {options.every:g}: 1 <= min <= "
            "max, and every above 0"
        )
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    processes = Processes(options.command)
    controller = Controller(processes, options.min, options.max)
    with Client(options.url, os.environ.get(serving.TOKEN_VARIABLE, ""), wait_s=10.0) as client:
        try:
            while not ended.is_set():
                try:
                    if not controller.look(client.status()):
                        break
                except Unavailable as error:  # the nodes wait for the service too
                    print(f"{error}; the pool stays as it is", file=sys.stderr, flush=True)
                ended.wait(options.every)
        finally:
            processes.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True, help="address of the service")
    parser.add_argument("--min", type=int, default=1, metavar="N", help="fewest nodes (default: 1)")
    parser.add_argument("--max", type=int, required=True, metavar="N", help="most nodes")
    parser.add_argument(
        "--every",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds between two looks (default: 30)",
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="command of a node, after --")
    try:
        run(parser.parse_args(arguments))
    except (Refused, UserError) as error:
        print(f"node_pool.py: {error}", file=sys.stderr)
        return 1 if isinstance(error, Refused) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
