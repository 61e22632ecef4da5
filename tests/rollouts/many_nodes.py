"""A fast scripted flow: nodes whose rollouts are made up, and a trainer that only notes what it was
served. All of them die and come back.

`main` is for tests that need processes to kill: its words are
node URL SEED NAME, or
trainer URL SEED NOTES NUM_STEPS
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_groups import group, planner

from flowtrain.records import Group
from flowtrain.records.token_account import TRAINED
from flowtrain.rollouts.client import Client
from flowtrain.rollouts.codec import pack_group, unpack_group
from flowtrain.rollouts.contract import (
    BatchRequest,
    Dataflow,
    Join,
    LeaseRequest,
    Progress,
    Push,
    Release,
    Renewal,
)

NUM_GROUPS, MAX_STALENESS = 3, 1
_PAUSE_S = 0.005
TOKEN = "a-token-of-the-tests"


def fake_rollouts(task: Any, version: int, rng: random.Random) -> Group:
    """A group that no model has sampled."""
    rewards = (rng.random(), rng.random())
    return group(task, version=version, rewards=rewards, num_tokens=rng.randint(1, 9))


def run_node(
    flow: Dataflow,
    name: str,
    rng: random.Random,
    is_over: Callable[[], bool] = lambda: False,
    death: float = 0.1,
) -> None:
    """Run a node, restarted whenever it dies, until the dataflow says "done" or `is_over`. At a
    share `death` of the work items it forgets everything.
    """
    while not is_over() and not _live(flow, name, rng, is_over, death):
        pass


def _live(
    flow: Dataflow, name: str, rng: random.Random, is_over: Callable[[], bool], death: float
) -> bool:
    """Whether all is done."""
    life = f"{rng.getrandbits(64):x}"
    sampled = {"planner": 0}
    held: dict[int, int] = {}
    flow.join(Join(name, life))
    with _renewing(flow, name, life, held, sampled):
        while not is_over():
            num, key = rng.randint(1, 3), f"{rng.getrandbits(64):x}"
            answer = flow.lease(LeaseRequest(name, life, num, {}, 0.1, 0.1, key, dict(sampled)))
            version = answer.policies["planner"].version if answer.policies else 0
            held |= {lease.work_item: lease.attempt for lease in answer.leases}
            for lease in answer.leases:
                choice = rng.random()
                if choice < death:
                    return False
                if choice < death + 0.1:
                    flow.release(Release(name, ((lease.work_item, lease.attempt),), "tired"))
                else:
                    made = fake_rollouts(lease.task, version, rng)
                    sampled["planner"] += sum(t.num_tokens("planner") for t in made.trajectories)
                    own = (name, lease.work_item, lease.attempt)
                    push = Push(*own, pack_group(made), sampled=dict(sampled))
                    for _ in range(1 + (rng.random() < 0.1)):
                        flow.push(push)
                held.pop(lease.work_item, None)
            if answer.reason == "done":
                return True
            if not answer.leases:
                time.sleep(min(answer.retry_after_s, _PAUSE_S))
    return False


@contextmanager
def _renewing(
    flow: Dataflow, name: str, life: str, held: dict[int, int], sampled: dict[str, int]
) -> Iterator[None]:
    """Renew what a node holds and forget what it has lost, on a thread as nodes do."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(_PAUSE_S):
            if leases := tuple(held.copy().items()):
                for work_item in flow.renew(Renewal(name, life, leases, dict(sampled))).lost:
                    held.pop(work_item, None)

    with ThreadPoolExecutor(1) as threads:
        renewed = threads.submit(renew)
        try:
            yield
        finally:
            ended.set()
        renewed.result()


class Notes:
    """A trainer's checkpoint and what it was served; with a path they outlive its process."""

    def __init__(self, path: Path | None = None) -> None:
        self._path, self.checkpoint = path, 0
        self.batches: dict[int, list[tuple[int, bytes]]] = {}
        """By step, work item and payload of every place."""
        for line in (
            path.read_text().splitlines(keepends=True) if path is not None and path.exists() else []
        ):
            if line.endswith("\n"):  # else it was killed as it wrote
                self._take(*json.loads(line))

    def served(self, step: int, groups: list[tuple[int, bytes]]) -> None:
        """Batches that were served before must be served again."""
        if step in self.batches:
            assert self.batches[step] == groups, f"step {step} has other groups than before"
        else:
            self._write(step, [(work_item, payload.hex()) for work_item, payload in groups])

    def save(self, step: int) -> None:
        self._write(step, None)

    def _write(self, step: int, groups: list[tuple[int, str]] | None) -> None:
        self._take(step, groups)
        if self._path is not None:
            with self._path.open("a") as out:
                out.write(json.dumps([step, groups]) + "\n")

    def _take(self, step: int, groups: list[tuple[int, str]] | None) -> None:
        if groups is None:
            self.checkpoint = step
        else:
            self.batches[step] = [
                (work_item, bytes.fromhex(payload)) for work_item, payload in groups
            ]

    def num_tokens(self, step: int) -> int:
        """Count the tokens of a batch."""
        groups = [unpack_group(payload) for _, payload in self.batches[step]]
        return sum(t.num_tokens("planner") for group in groups for t in group.trajectories)

    def check(self, num_steps: int) -> None:
        """Every step was trained, with groups that were not too old, and none of them twice."""
        assert sorted(self.batches) == list(range(1, num_steps + 1))
        work_items = [work_item for groups in self.batches.values() for work_item, _ in groups]
        assert len(work_items) == len(set(work_items)) == num_steps * NUM_GROUPS
        for step, groups in self.batches.items():
            for _, payload in groups:
                versions = [
                    span.version
                    for rollout in unpack_group(payload).trajectories
                    for turn in rollout.turns
                    for span in turn.calls["planner"].spans
                ]
                assert versions
                assert all(step - 1 - MAX_STALENESS <= version <= step - 1 for version in versions)


def run_trainer(
    flow: Dataflow, notes: Notes, rng: random.Random, num_steps: int, death: float = 0.2
) -> None:
    """Lives of a trainer; at a share `death` of steps it forgets all but its notes."""
    while True:
        registered = planner(NUM_GROUPS, MAX_STALENESS, notes.checkpoint)
        # Without a life a registration that comes late would take this trainer's progress back.
        life = f"{rng.getrandbits(64):x}"
        flow.register(replace(registered, life=life))
        for step in range(notes.checkpoint + 1, num_steps + 1):
            notes.served(step, _batch(flow, step, life))
            if rng.random() < 0.5 or step == num_steps:
                notes.save(step)
            tokens = {TRAINED: notes.num_tokens(step)}
            told = Progress("planner", step, notes.checkpoint, 0.1, 0.1, tokens=tokens, life=life)
            flow.progress(told)
            if rng.random() < death:
                break
        else:
            flow.progress(Progress("planner", num_steps, num_steps, is_done=True, life=life))
            return


def _batch(flow: Dataflow, step: int, life: str) -> list[tuple[int, bytes]]:
    """Ask for a batch on two ranks, one after the other."""
    found = {}
    for rank in range(2):
        request = BatchRequest("planner", step, rank, 2, wait_s=1.0, life=life)
        while (answer := flow.batch(request)).num_missing:
            pass
        found |= {each.position: (each.work_item, each.payload) for each in answer.groups}
    assert sorted(found) == list(range(NUM_GROUPS))
    return [found[position] for position in sorted(found)]


def main(role: str, url: str, seed: str, *rest: str) -> None:
    rng = random.Random(f"{role}/{seed}/{os.getpid()}")  # no two lives are the same
    with Client(url, TOKEN, wait_s=60.0) as flow:
        if role == "node":
            run_node(flow, rest[0], rng)
        else:
            run_trainer(flow, Notes(Path(rest[0])), rng, int(rest[1]))
