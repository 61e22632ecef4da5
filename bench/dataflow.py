"""The dataflow:  python -m bench.dataflow [--json F] [--plot F] [--postgres URL]

In virtual time, with SIMULATED latencies of models and tools and a simulated trainer around a real
ledger: training steps per hour in the synchronous loop and through the dataflow, over how long the
trainer takes; the trainer's idle share by size of the pool, and once it has the advised size; pools
of unequal speed on slow links. Then, in real time, what the service costs over HTTP on loopback.

What is assumed. Rollouts are those of `bench.flow`: 150 s on average and 500 s at most, as
AgentFlow's trainer expects, with a long tail; latencies do not depend on the load. 32 questions
with 8 rollouts make a step and 256 slots roll out, in both loops: all of a synchronous step's
rollouts are under way at once. Both have the same trainer, which takes the same time for every
step; the share that it has of a synchronous step is what counts, and no pool makes the loop faster
than 1 / share, so there is a row for each of several. (verl reports 270 of 790 s for its update, 34
%: Qwen2.5-Math-7B, 32 H20.) A version takes 2 s from publishing to being loaded (AstraFlow: 1.1 to
2.4 s for 1.7B). The first steps are left out, until the pipeline is full.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

from bench import dataflow_service
from bench.measure import print_table, write_json
from bench.simulated_pool import (
    Node,
    Nodes,
    Site,
    World,
    collect_s,
    course,
    rollout_seeds,
)
from bench.simulated_trainer import Trainer, staleness
from examples.node_pool import Controller
from flowtrain.config import Config
from flowtrain.dataflow.ledger import Ledger
from flowtrain.tasks.cursor import TaskCursor
from flowtrain.types import Task
from flowtrain.utils.seeds import derive_seed

NUM_GROUPS, GROUP_SIZE, MAX_STALENESS = 32, 8, 4
SITES = [Site(f"node-{number}") for number in range(8)]
"""Nodes of 32 slots each: as many slots as a step has rollouts."""
PUBLISH_S = 2.0
"""In the synchronous loop, until the new version is loaded."""
SHARES, SHARE = (0.1, 0.2, 0.34, 0.5), 0.34
"""The trainer's share of a synchronous step."""
FAR = [
    Site(f"speed-{speed:g}", slots=96, speed=speed, round_trip_s=0.3, load_s=5.0)
    for speed in (1.0, 0.6, 0.3)
]
"""Pools in other regions, as AstraFlow's experiment has them: 300 ms, and 1.5 GB of a delta at 4
Gbit/s take 3 s more."""
LOOK_S = 300.0
"""Between two looks at the pool."""
NUM_STEPS, NUM_FIRST = 40, 8
"""Steps of a simulation, and how many of the first are left out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument("--plot", metavar="F", help="draw the rates into this PNG file")
    parser.add_argument(
        "--postgres",
        metavar="URL",
        default="",
        help="of a server where a database may be made, for the last part too",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=NUM_STEPS,
        help=f"training steps of a simulation (default: {NUM_STEPS})",
    )
    parser.add_argument(
        "--groups",
        type=int,
        default=2048,
        help="groups that the service gets at once (default: 2048)",
    )
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for part in _parts(args.steps, args.groups, args.postgres):
        rows = list(part)
        print_table(rows)
        print(flush=True)
        found += rows
    if args.json:
        write_json(args.json, found)
    if args.plot:
        plot([row for row in found if "trainer_share" in row], args.plot)


def _parts(num_steps: int, num_groups: int, postgres: str) -> Iterator[Iterable[dict[str, Any]]]:
    """The tables, made when their turn comes."""
    collected_s = fmean(synchronous_s(num_steps))
    train_s = {share: (collected_s + PUBLISH_S) * share / (1 - share) for share in SHARES}
    yield chain.from_iterable(
        rate_rows(share, train_s[share], collected_s, num_steps) for share in SHARES
    )
    fixed = (size_row(number, train_s[SHARE], num_steps) for number in range(4, len(SITES) + 1))
    yield chain(fixed, (advised_row(first, train_s[SHARE], 2 * num_steps) for first in (2, 16)))
    yield far_rows(train_s[SHARE], num_steps)
    yield dataflow_service.rows(num_groups, 160, postgres)


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a simulation."""

    step_s: float
    idle_share: float
    """Share of the trainer's time, without the first steps."""
    trainer: Trainer
    nodes: tuple[Node, ...]


def run(sites: Sequence[Site], train_s: float, num_steps: int, max_waiting: int = 0) -> Run:
    world = World()
    with ledger(world, max_waiting) as opened:
        trainer = Trainer(world, opened, NUM_GROUPS, MAX_STALENESS, train_s, num_steps)
        nodes = tuple(Node(world, opened, site, MAX_STALENESS, trainer.look) for site in sites)
        world.run(lambda: trainer.is_done)
    steps = trainer.steps[NUM_FIRST:]
    seconds = steps[-1].trained - steps[0].asked
    idle_s = sum(step.served - step.asked for step in steps)
    return Run(seconds / len(steps), idle_s / seconds, trainer, nodes)


@contextmanager
def ledger(world: World, max_waiting: int) -> Iterator[Ledger]:
    """A new one, whose clock is the world's."""
    dataflow = {"max_staleness": MAX_STALENESS, "max_waiting": max_waiting}
    config = Config.model_validate(
        {"rollout": {"num_questions": NUM_GROUPS, "group_size": GROUP_SIZE}, "dataflow": dataflow}
    )
    tasks = [Task(f"task-{number}", "?", ("answer",)) for number in range(1000)]
    memory = Path(
        "/dev/shm"
    )  # a disk's commits would only make it slower, and virtual time does not see that
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        opened = Ledger(Path(folder) / "ledger.db", config, TaskCursor(tasks, 0), clock=world.clock)
        yield opened
        opened.close()


# ---- steps per hour


def synchronous_s(num_steps: int, share: float = 1.0, patience_s: float = 0.0) -> list[float]:
    """Simulate each step until its rollouts are done; they are the same rollouts as in the
    dataflow.
    """
    seeds = [
        rollout_seeds(derive_seed(0, "unit", work_item + 1), GROUP_SIZE)
        for work_item in range(num_steps * NUM_GROUPS)
    ]
    steps = [
        seeds[step * NUM_GROUPS : (step + 1) * NUM_GROUPS] for step in range(NUM_FIRST, num_steps)
    ]
    return [collect_s(list(chain.from_iterable(step)), SITES, share, patience_s) for step in steps]


def rate_rows(
    share: float, train_s: float, collected_s: float, num_steps: int
) -> list[dict[str, Any]]:
    cut_s = fmean(synchronous_s(num_steps, 0.9, 60.0))
    paths = {
        "synchronous": _waited(collected_s, train_s),
        "synchronous, rest cut at 90 % + 60 s": _waited(cut_s, train_s),
    }
    for path, max_waiting in (
        ("dataflow", 0),
        (f"dataflow, max_waiting {2 * NUM_GROUPS}", 2 * NUM_GROUPS),
    ):
        through = run(SITES, train_s, num_steps, max_waiting)
        late = staleness(through.trainer.trained)
        paths[path] = {
            "step_s": through.step_s,
            "idle_share": through.idle_share,
            **{key: late[key] for key in list(late)[:2]},
        }
    first_s = paths["synchronous"]["step_s"]
    common = {"trainer_share": share, "train_s": train_s}
    return [
        {
            **common,
            "path": path,
            **row,
            "steps_per_h": 3600 / row["step_s"],
            "times_sync": first_s / row["step_s"],
        }
        for path, row in paths.items()
    ]


def _waited(collected_s: float, train_s: float) -> dict[str, float]:
    """The synchronous loop: one thing after another."""
    step_s = collected_s + PUBLISH_S + train_s
    return {"step_s": step_s, "idle_share": 1 - train_s / step_s}


# ---- pools


def size_row(num_nodes: int, train_s: float, num_steps: int) -> dict[str, Any]:
    found = run(SITES[:num_nodes], train_s, num_steps)
    return {
        "pool": f"{num_nodes} nodes",
        "train_s": train_s,
        "step_s": found.step_s,
        "idle_share": found.idle_share,
    }


def advised_row(first: int, train_s: float, num_steps: int) -> dict[str, Any]:
    """A pool that begins with `first` nodes and follows the advice that it gets every `LOOK_S`; the
    second half of the run.
    """
    world = World()
    with ledger(world, 0) as opened:
        trainer = Trainer(world, opened, NUM_GROUPS, MAX_STALENESS, train_s, num_steps)
        nodes = Nodes(
            world, lambda name: Node(world, opened, Site(name), MAX_STALENESS, trainer.look)
        )
        nodes.resize(first)
        processes: Any = nodes  # it wants them to be real ones
        controller = Controller(processes, smallest=1, largest=4 * len(SITES))

        def look() -> None:
            controller.look(opened.status())
            world.after(LOOK_S, look)

        world.after(LOOK_S, look)
        world.run(lambda: trainer.is_done)
    steps = trainer.steps[num_steps // 2 :]
    late = [num for when, num in nodes.sizes if when > steps[0].asked] or [len(nodes)]
    seconds = steps[-1].trained - steps[0].asked
    return {
        "pool": f"advised, from {first}",
        "train_s": train_s,
        "step_s": seconds / len(steps),
        "idle_share": sum(step.served - step.asked for step in steps) / seconds,
        "sizes": " ".join(str(num) for _, num in nodes.sizes),
        "late_sizes": " ".join(map(str, late)),
    }


def far_rows(train_s: float, num_steps: int) -> list[dict[str, Any]]:
    """Each pool's part in what was trained, beside that in the rollouts which its speed allows."""
    found = run(FAR, train_s, num_steps)
    speeds = [fmean(1 / course(seed, site.speed).end_s for seed in range(500)) for site in FAR]
    rows = []
    for node, speed in zip(found.nodes, speeds, strict=True):
        own = [
            (work_item, ages)
            for work_item, ages in found.trainer.trained
            if work_item in node.work_items
        ]
        part = len(own) / len(found.trainer.trained)
        pool: dict[str, Any] = {
            "far pool": node.site.name,
            "round_trip_s": node.site.round_trip_s,
            "load_s": node.site.load_s,
        }
        rows.append(
            pool
            | {"of_speed": speed / sum(speeds), "of_trained": part, "idle_share": found.idle_share}
            | staleness(own)
        )
    return rows


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Steps per hour over the trainer's share of a synchronous step."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name in dict.fromkeys(row["path"] for row in rows):
        own = [row for row in rows if row["path"] == name]
        axes.plot(
            [row["trainer_share"] for row in own],
            [row["steps_per_h"] for row in own],
            marker="o",
            label=name,
        )
    axes.set(
        xlabel="trainer's share of a synchronous step",
        ylabel="steps per hour (simulated latencies)",
        ylim=(0, None),
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
