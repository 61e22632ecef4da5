"""Nodes and a trainer in processes of their own, which are killed at random places, also within
transactions, and begin anew.

`python node_processes.py DATABASE...` forks them for one database after the other, prints a line
for each process that was killed, and a JSON line when the trainer has trained all steps.
"""

from __future__ import annotations

import json
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

from fake_groups import group, ledger, planner

from flowtrain.dataflow.codec import pack_group
from flowtrain.dataflow.contract import (
    BatchRequest,
    Join,
    LeaseRequest,
    Progress,
    Push,
    Release,
    Renewal,
    Unavailable,
)
from flowtrain.dataflow.ledger import Ledger
from flowtrain.dataflow.ledger.sql import Transaction
from flowtrain.dataflow.rules import Rules
from flowtrain.dataflow.rules.builtin import AllGroups, AllPrompts, EarliestDeadline

NUM_STEPS, NUM_GROUPS, CHECKPOINT_EVERY = 8, 3, 3
NUM_LIVES = 6
"""Lifetime of each process; the last one is not killed."""
LIMIT_S = 90.0
PARENT = os.getpid()


def die_somewhere(rng: random.Random) -> None:
    """This process kills itself after some statement, mostly with a transaction open, or after some
    time.
    """
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

    Transaction.run, Transaction.many = counted(Transaction.run), counted(Transaction.many)  # type: ignore[method-assign]


def node(database: str, name: str, life: str, rng: random.Random) -> None:
    """Lease, renew, push some groups twice, release some work items, until the trainer is done."""
    flow = opened(database)
    persistent(lambda: flow.join(Join(name, life)))
    for number in range(10**6):
        request = LeaseRequest(name, life, 3, key=f"{life}-{number}")
        answer = persistent(lambda request=request: flow.lease(request))  # type: ignore[misc]
        if answer.reason == "done":
            return
        held = tuple((lease.work_item, lease.attempt) for lease in answer.leases)
        if held and rng.random() < 0.3:
            persistent(lambda held=held: flow.renew(Renewal(name, life, held)))  # type: ignore[misc]
        for lease in answer.leases:
            versions = {policy: state.version for policy, state in answer.policies.items()}
            payload = pack_group(group(lease.task, version=versions["planner"]))
            for _ in range(rng.choice([1, 1, 2])):
                if rng.random() < 0.1:
                    persistent(lambda held=held: flow.release(Release(name, held)))  # type: ignore[misc]
                persistent(partial(flow.push, Push(name, lease.work_item, lease.attempt, payload)))
        time.sleep(0.002 if answer.leases else 0.02)


def trainer(database: str, folder: Path) -> None:
    """Appends each batch to a log; its checkpoint is a file."""
    flow = opened(database)
    saved = folder / "checkpoint"
    step = int(saved.read_text()) if saved.exists() else 0
    persistent(lambda: flow.register(planner(NUM_GROUPS, 2, step)))
    while step < NUM_STEPS:
        answer = persistent(partial(flow.batch, BatchRequest("planner", step + 1)))
        if answer.num_missing:
            time.sleep(0.01)
            continue
        step += 1
        with (folder / "log").open("a") as log:
            log.write(json.dumps([step, [served.work_item for served in answer.groups]]) + "\n")
        if step % CHECKPOINT_EVERY == 0:
            saved.with_suffix(".new").write_text(str(step))
            saved.with_suffix(".new").replace(saved)
        checkpoint = step // CHECKPOINT_EVERY * CHECKPOINT_EVERY
        persistent(
            partial(flow.progress, Progress("planner", step, checkpoint, is_done=step == NUM_STEPS))
        )
    persistent(
        partial(
            flow.progress,
            Progress(
                "planner", step, NUM_STEPS // CHECKPOINT_EVERY * CHECKPOINT_EVERY, is_done=True
            ),
        )
    )


def opened(database: str) -> Ledger:
    return persistent(lambda: ledger(database, make_rules=_rules, lease_s=0.5, max_attempts=1000))


def _rules() -> Rules:
    """Without a search for entry points, which would take longer than all else."""
    return Rules(AllPrompts(), AllGroups(), EarliestDeadline())


def persistent(request: Callable[[], Any]) -> Any:
    """Asks again where there was no answer: the database is down for a moment. Nobody outlives the
    process that forked it.
    """
    while os.getppid() == PARENT:
        try:
            return request()
        except Unavailable:
            time.sleep(0.01)
    os._exit(1)


def start(name: str, life: int, database: str, folder: Path, seed: str) -> int:
    """Process id of a fork."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        rng = random.Random(f"{seed}/{name}/{life}")
        if life < NUM_LIVES:
            die_somewhere(rng)
        if name == "trainer":
            trainer(database, folder)
        else:
            node(database, name, f"life-{life}", rng)
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(status)


def run(database: str, seed: str) -> None:
    """Prints the trainer's log and the number of deaths in the end."""
    lives = dict.fromkeys(("trainer", "n1", "n2", "n3"), 1)
    end = time.monotonic() + LIMIT_S
    with tempfile.TemporaryDirectory() as folder:
        running = {start(name, 1, database, Path(folder), seed): name for name in lives}
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
                running[start(name, lives[name], database, Path(folder), seed)] = name
            elif os.WEXITSTATUS(status):
                sys.exit(f"{name} failed")
        log = (Path(folder) / "log").read_text().splitlines()
    print(
        json.dumps(
            {
                "log": [json.loads(line) for line in log],
                "num_deaths": sum(lives.values()) - len(lives),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    for number, each in enumerate(sys.argv[1:]):
        run(each, str(number))
