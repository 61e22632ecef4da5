"""The dataflow:  python -m bench.dataflow [--json F] [--plot F]

In virtual time, with SIMULATED latencies of models and tools and a simulated trainer around a real ledger: training steps per hour in
the synchronous loop and through the dataflow, over how long the trainer takes; the trainer's idle share once the pool has the advised
size; pools of unequal speed on slow links. Then, in real time, what the service costs over HTTP on loopback.

What is assumed. Rollouts are those of `bench.flow`: 150 s on average and 500 s at most, as AgentFlow's trainer expects, with a long tail;
latencies do not depend on the load. 32 questions with 8 rollouts make a step and 256 slots roll out, in both loops: all of a synchronous
step's rollouts are under way at once. Both have the same trainer, which takes the same time for every step; the share that it has of a
synchronous step is what counts, so there is a row for each of several (verl reports 270 of 790 s for its update, 34 %: Qwen2.5-Math-7B on 32
H20). A version takes 2 s from publishing to being loaded (AstraFlow: 1.1 to 2.4 s for 1.7B).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.measure import print_table, write_json
from bench.simulated_pool import Node, Site, Trainer, World, collect_s, rollout_seeds
from flowtrain.config import Config
from flowtrain.dataflow.ledger.ledger import Ledger
from flowtrain.seeds import derive_seed
from flowtrain.tasks.cursor import TaskCursor
from flowtrain.types import Task

NUM_GROUPS, GROUP_SIZE, MAX_STALENESS = 32, 8, 4
SITES = [Site(f"node-{number}") for number in range(8)]
"""Of 32 slots each: as many as a step has rollouts."""
PUBLISH_S = 2.0
"""In the synchronous loop, until the new version is loaded."""
TRAINER_SHARES = (0.1, 0.2, 0.34, 0.5)
NUM_STEPS, NUM_FIRST = 40, 8
"""Steps of a simulation, and how many of them are left out of the rates: the pipeline fills."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help=f"training steps of a simulation (default: {NUM_STEPS})")
    args = parser.parse_args()
    parts = [rate_rows(args.steps)]
    for rows in parts:
        print_table(rows)
        print()
    if args.json:
        write_json(args.json, [row for rows in parts for row in rows])


@contextmanager
def ledger(world: World) -> Iterator[Ledger]:
    """A new one, whose clock is the world's."""
    options = {"rollout": {"num_questions": NUM_GROUPS, "group_size": GROUP_SIZE}, "dataflow": {"max_staleness": MAX_STALENESS}}
    tasks = [Task(f"task-{number}", "?", ("answer",)) for number in range(1000)]
    memory = Path("/dev/shm")  # a disk's commits would only make it slower, and virtual time does not see that
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        opened = Ledger(Path(folder) / "ledger.db", Config.model_validate(options), TaskCursor(tasks, 0), clock=world.clock)
        yield opened
        opened.close()


# ---- steps per hour


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a simulation."""

    step_s: float
    idle_share: float
    """Of the trainer's time, without the first steps."""
    trainer: Trainer
    status: dict[str, Any]
    nodes: tuple[Node, ...]


def run(sites: Sequence[Site], train_s: float, num_steps: int) -> Run:
    world = World()
    with ledger(world) as opened:
        trainer = Trainer(world, opened, NUM_GROUPS, MAX_STALENESS, train_s, num_steps)
        nodes = tuple(Node(world, opened, site, MAX_STALENESS, trainer.look) for site in sites)
        world.run(lambda: trainer.is_done)
        status = opened.status()
    steps = trainer.steps[NUM_FIRST:]
    seconds = steps[-1].trained - steps[0].asked
    idle_s = sum(step.served - step.asked for step in steps)
    return Run(seconds / len(steps), idle_s / seconds, trainer, status, nodes)


def synchronous_s(num_steps: int, share: float = 1.0, patience_s: float = 0.0) -> list[float]:
    """Of each step, until its rollouts are done: the same rollouts as in the dataflow."""
    seeds = [rollout_seeds(derive_seed(0, "unit", unit + 1), GROUP_SIZE) for unit in range(num_steps * NUM_GROUPS)]
    steps = [seeds[step * NUM_GROUPS : (step + 1) * NUM_GROUPS] for step in range(NUM_FIRST, num_steps)]
    return [collect_s(list(chain.from_iterable(step)), SITES, share, patience_s) for step in steps]


def rate_rows(num_steps: int) -> list[dict[str, Any]]:
    whole = fmean(synchronous_s(num_steps)) + PUBLISH_S
    cut = fmean(synchronous_s(num_steps, 0.9, 60.0)) + PUBLISH_S
    return [row for share in TRAINER_SHARES for row in _rates(share, whole, cut, num_steps)]


def _rates(share: float, whole_s: float, cut_s: float, num_steps: int) -> list[dict[str, Any]]:
    """The trainer has `share` of a synchronous step that waits for all rollouts."""
    train_s = whole_s * share / (1 - share)
    through = run(SITES, train_s, num_steps)
    stale = through.trainer.staleness
    num_tokens = stale.total()
    paths: dict[str, dict[str, Any]] = {
        "synchronous": {"step_s": whole_s + train_s, "idle_share": 1 - share},
        "synchronous, rest cut at 90 % + 60 s": {"step_s": cut_s + train_s, "idle_share": cut_s / (cut_s + train_s)},
        "dataflow": {
            "step_s": through.step_s,
            "idle_share": through.idle_share,
            "staleness_mean": sum(age * number for age, number in stale.items()) / num_tokens,
            "staleness_max": max(stale),
        },
    }
    first = paths["synchronous"]["step_s"]
    return [
        {
            "trainer_share": share,
            "train_s": train_s,
            "path": path,
            **row,
            "steps_per_hour": 3600 / row["step_s"],
            "times_sync": first / row["step_s"],
        }
        for path, row in paths.items()
    ]


if __name__ == "__main__":
    main()
