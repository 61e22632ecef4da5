"""Nodes on this machine: as many processes of a command as the pool should have, started and ended
one by one.

python -m flowtrain.dataflow pool --url URL --max 8 -- env CUDA_VISIBLE_DEVICES={slot} python -m
flowtrain.node --dataflow URL
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

from flowtrain.dataflow.client import Client
from flowtrain.dataflow.contract import Unavailable
from flowtrain.dataflow.pool import nodes_at_work, target_size, window_between
from flowtrain.types import UserError
from flowtrain.utils import serving

_GRACE_S = 30.0
"""For a node to give its leases back after SIGTERM."""
_SOON_S = 20.0
"""A command that fails within so many seconds is wrong, not unlucky."""
_MAX_EARLY = 3
_NUM_SETTLING = 3
"""Looks that new nodes have to join; then what is there counts."""
_SLOT = "{slot}"


class Processes:
    """Close it: whatever happens, all of them are ended."""

    def __init__(self, command: Sequence[str], grace_s: float = _GRACE_S) -> None:
        """`{slot}` in a word of the command is the lowest number that none of the others has."""
        self._command, self._grace_s = command, grace_s
        self._running: dict[int, tuple[subprocess.Popen[bytes], float]] = {}
        """By slot: the process, and when it began."""
        self._num_early = 0

    def __len__(self) -> int:
        return len(self._running)

    def reap(self) -> None:
        """Notice those that have ended. Raises UserError when the command fails again and again."""
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
        """Start what is missing; end what is too much, the newest first."""
        while len(self._running) < num:
            slot = next(slot for slot in range(num) if slot not in self._running)
            words = [word.replace(_SLOT, str(slot)) for word in self._command]
            try:
                process = subprocess.Popen(
                    words, start_new_session=True
                )  # Ctrl-C is for us, who pass it on once
            except OSError as error:
                raise UserError(f"{words[0]}: {error.strerror}") from error
            self._running[slot] = process, time.monotonic()
        self._end(sorted(self._running, key=lambda slot: self._running[slot][1])[num:])

    def close(self) -> None:
        self._end(list(self._running))

    def _end(self, slots: Sequence[int]) -> None:
        """All of them at the same time; who takes too long is killed, with his children."""
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
    """Looks at the dataflow now and then, and has as many processes as it takes."""

    def __init__(self, processes: Processes, smallest: int, largest: int) -> None:
        """`smallest`, `largest`: processes here; nodes elsewhere come on top."""
        self._processes, self._smallest, self._largest = processes, smallest, largest
        self._before: Mapping[str, Any] | None = None
        self._num_looks = 0

    def look(self, status: Mapping[str, Any]) -> bool:
        """Act on a report; False once training is done."""
        policies = status["policies"].values()
        if policies and all(policy["state"] == "done" for policy in policies):
            return False
        self._processes.reap()
        num_own, num_all = len(self._processes), len(nodes_at_work(status))
        if num_own < self._smallest:
            self._resize(self._smallest)
        elif self._before is None:
            self._num_looks += 1
            if num_all >= num_own or self._num_looks > _NUM_SETTLING:
                self._before = status
        elif (
            window := window_between(self._before, status)
        ).num_trained:  # else it goes on until there is something to go by
            self._before = status
            num_others = max(0, num_all - num_own)
            num = (
                target_size(window, self._smallest + num_others, self._largest + num_others)
                - num_others
            )
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
        """What happens until they are all at work is not looked at."""
        self._processes.resize(num)
        self._before, self._num_looks = None, 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", required=True, help=f"of the service; {serving.TOKEN_VARIABLE} is the token for it"
    )
    parser.add_argument(
        "--min", type=int, default=1, metavar="N", help="nodes at least (default: 1)"
    )
    parser.add_argument("--max", type=int, required=True, metavar="N", help="nodes at most")
    parser.add_argument(
        "--every",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds between two looks (default: 30)",
    )
    parser.add_argument(
        "command",
        nargs="+",
        metavar="COMMAND",
        help=f"of a node, after --; {_SLOT} becomes its number here, from 0",
    )


def run(options: argparse.Namespace) -> int:
    """Until training is done, SIGTERM or Ctrl-C; every node that it started has ended then."""
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
                except Unavailable as error:  # nodes hold out for longer; so does their number
                    print(f"{error}; the pool stays as it is", file=sys.stderr, flush=True)
                ended.wait(options.every)
        finally:
            processes.close()
    return 0
