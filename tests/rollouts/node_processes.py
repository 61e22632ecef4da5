"""The nodes and the trainer of many_nodes.py in processes that are killed, also in transactions.

`python node_processes.py DATABASE...` forks them for one database after the other, and prints a
line for each process that was killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fake_groups import ledger
from many_nodes import Notes, run_node, run_trainer

from flowtrain.rollouts.contract import Unavailable
from flowtrain.rollouts.ledger import Ledger
from flowtrain.rollouts.ledger.sql import Transaction
from flowtrain.rollouts.rules import Rules
from flowtrain.rollouts.rules.builtin import AllGroups, AllPrompts, EarliestDeadline, Latest

NUM_STEPS = 8
NUM_LIVES = 6
"""Lifetime of each process; the last one is not killed."""
LIMIT_S = 90.0
PARENT = os.getpid()


def die_somewhere(rng: random.Random) -> None:
    """Kill this process after some statement, mostly within a transaction, or some time."""
    if rng.random() < 0.3:
        signal.setitimer(
            signal.ITIMER_REAL, rng.uniform(0.005, 0.1)
        )  # SIGALRM ends a process that does not handle it, wherever it is
        return
    left = iter(range(rng.randrange(1, 100)))

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            found = method(*arguments)
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return run

    Transaction.run, Transaction.many = counted(Transaction.run), counted(Transaction.many)


class Persistent:
    """A ledger that is asked again where the database is down for a moment."""

    def __init__(self, database: str) -> None:
        self._ledger: Ledger = self._ask(lambda: _opened(database))

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        return lambda request: self._ask(partial(getattr(self._ledger, name), request))

    def _ask(self, request: Callable[[], Any]) -> Any:
        while os.getppid() == PARENT:
            try:
                answer = request()
            except Unavailable:
                time.sleep(0.01)
                continue
            if getattr(answer, "num_missing", 0):
                time.sleep(0.01)
            return answer
        os._exit(1)  # nobody outlives the process that forked it


def _opened(database: str) -> Ledger:
    """Without a search for entry points of rules, which would take longer than all else."""
    rules = Rules(AllPrompts(), AllGroups(), EarliestDeadline(), Latest())
    return ledger(database, make_rules=lambda: rules, lease_s=0.5, max_attempts=1000)


def start(name: str, life: int, database: str, notes: Path, seed: str) -> int:
    """Process id of a fork."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        rng = random.Random(f"{seed}/{name}/{life}")
        if life < NUM_LIVES:
            die_somewhere(rng)
        if name == "trainer":
            run_trainer(Persistent(database), Notes(notes), rng, NUM_STEPS, death=0.0)
        else:
            run_node(Persistent(database), name, rng, death=0.0)
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(status)


def run(database: str, seed: str) -> None:
    """Until every step was trained, each time with the same groups, and no group by two steps."""
    lives = dict.fromkeys(("trainer", "n1", "n2", "n3"), 1)
    end = time.monotonic() + LIMIT_S
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        running = {start(name, 1, database, notes, seed): name for name in lives}
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                if time.monotonic() > end:
                    for left in running:
                        os.kill(left, signal.SIGKILL)
                    sys.exit(f"{sorted(running.values())} did not end in {LIMIT_S} s")
                time.sleep(0.002)
                continue
            name = running.pop(pid)
            if os.WIFSIGNALED(status):
                lives[name] += 1
                print("died", flush=True)
                running[start(name, lives[name], database, notes, seed)] = name
            elif os.WEXITSTATUS(status):
                sys.exit(f"{name} failed")
        Notes(notes).check(NUM_STEPS)


if __name__ == "__main__":
    for number, each in enumerate(sys.argv[1:]):
        run(each, str(number))
