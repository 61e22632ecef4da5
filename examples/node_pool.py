r"""Keep as many rollout nodes on this machine as the trainers of a dataflow need.

    python examples/node_pool.py --url http://127.0.0.1:8400 --max 8 -- \
        env CUDA_VISIBLE_DEVICES={slot} python -m flowtrain.rollouts.node --dataflow http://127.0.0.1:8400

The pool starts and ends processes of the command after --, where {slot} is the number of the node
here, from 0. It looks at the service every 30 s, and ends its nodes when training is done, and on
SIGTERM or Ctrl-C. FLOWTRAIN_TOKEN is the token of the service.

How many nodes are enough the service tells (`pool` of `python -m flowtrain.rollouts status --json`;
flowtrain/rollouts/pool_size.py has the rule). Nodes elsewhere count, and are left alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flowtrain.records import UserError
from flowtrain.rollouts.client import Client
from flowtrain.rollouts.contract import Refused, Unavailable
from flowtrain.utils.net import serving

_GRACE_S = 30.0
"""Seconds that a node has to give its leases back after SIGTERM."""
_SOON_S = 20.0
"""A command that fails within so many seconds is wrong, not unlucky."""
_MAX_EARLY = 3
_SLOT = "{slot}"


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
    """Resizes the pool as the service says."""

    def __init__(self, processes: Processes, smallest: int, largest: int) -> None:
        """The bounds are for the processes here; nodes elsewhere come on top."""
        self._processes = processes
        self._smallest, self._largest = smallest, largest
        self._wanted, self._decided_s = smallest, 0.0

    def look(self, status: Mapping[str, Any]) -> bool:
        """Act on a report; return False once training is done."""
        policies = status["policies"].values()
        if policies and all(policy["state"] == "done" for policy in policies):
            return False
        self._processes.reap()
        num, pool = len(self._processes), status["pool"]
        if pool["decided_s"] != self._decided_s:
            # It was decided when all nodes were at work, those of this pool among them.
            self._decided_s = pool["decided_s"]
            num_others = max(0, pool["num_nodes"] - num)
            wanted = pool["target"] - num_others
            self._wanted = min(max(wanted, self._smallest), self._largest)
        if num != self._wanted:
            print(f"{num} -> {self._wanted} nodes", file=sys.stderr, flush=True)
            self._processes.resize(self._wanted)
        return True


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
