"""How much a tree spares, by turns T and group size G:  python -m bench.step --curve [--png F]

AgentFlow's shape: a rollout of T turns is T samples, whose prompts hold what all G rollouts of the
question share and the rollout's memory of its turns so far. Tokens and FLOPs are counted on the
rows and padded batches that each path would compute, for the model of --shape; times are measured
where a step of all paths takes at most --most-gflops, with --repeats 0 nowhere. The second table
has the fewest turns, of those that were tried, from which a path needs 10 and 40 times the FLOPs of
the tree. Lengths are --scale times AgentFlow's and rows have --token-budget tokens: at the defaults
a tenth of the lengths, in rows that hold as much as ones of 163,840 tokens would at full length.
From some hundred turns on a rollout's tree fills several rows, which share nothing.

What sharing spares depends on how much of a batch is shared, so figures of others are no rivals to
these: TRL's tree packing (pull request 7328) and prime-rl's tree training (pull request 2405) have
shapes of their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from typing import Any

from bench.step_batches import agentflow
from bench.step_paths import Work, measure, work
from flowtrain.metrics import ProgressLine
from flowtrain.training.world import World

GOALS = (10, 40)
_LONGER = (20, 30, 40, 60, 80, 100, 120, 160, 200)
"""Turns that are counted beyond those of the table, until the last goal is reached."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--curve", action="store_true", help="count by turns and group size instead"
    )
    parser.add_argument("--turns", default="1,3,5,10", help="of --curve (default: %(default)s)")
    parser.add_argument("--groups", default="4,8,16,32", help="of --curve (default: %(default)s)")
    parser.add_argument(
        "--most-gflops",
        type=float,
        default=700.0,
        help="of a step of all paths that --curve measures (default: 700)",
    )
    parser.add_argument("--png", metavar="F", help="plot --curve into this file")


def curve(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The table by turns and group size, and that of the goals."""
    turns, groups = ([int(x) for x in text.split(",")] for text in (args.turns, args.groups))
    shapes = list(product(turns, groups))
    line = ProgressLine(len(shapes) + len(groups), 0, True, unit="shape")
    rows: list[dict[str, Any]] = []
    for num_turns, group_size in shapes:
        rows.append(_row(num_turns, group_size, args))
        line.show(len(rows), "counting")
    goals = []
    for number, size in enumerate(groups, 1):
        goals += _goals(size, [row for row in rows if row["group size"] == size], args)
        line.show(len(rows) + number, "counting longer ones")
    line.close()
    _add_times(rows, args)
    if args.png:
        plot(rows, args.png)
    return rows, goals


def _row(num_turns: int, group_size: int, args: argparse.Namespace) -> dict[str, Any]:
    counted = _count(num_turns, group_size, args)
    return {
        "turns": num_turns,
        "group size": group_size,
        "samples": num_turns * group_size,
        **{f"{path} tokens": each.num_tokens for path, each in counted.items()},
        **{f"{path} FLOPs": ratio for path, ratio in _ratios(counted).items()},
        "all GFLOP": sum(each.flops for each in counted.values()) / 1e9,
    }


def _add_times(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """Measure the shapes that are small enough."""
    timed = [row for row in rows if args.repeats and row["all GFLOP"] <= args.most_gflops]
    if not timed:
        return
    batches = [agentflow(row["turns"], args.shape, args.scale, row["group size"]) for row in timed]
    world = World.join(args.device)
    found = measure(batches, world, args)
    world.leave()
    num_paths = len(found) // len(timed)
    for index, row in enumerate(timed):
        tree, *others = found[index * num_paths : (index + 1) * num_paths]
        row["tree ms"] = tree["ms"]
        row |= {f"{each['path']} time": each["time_of_tree"] for each in others}


def _count(num_turns: int, group_size: int, args: argparse.Namespace) -> dict[str, Work]:
    return work(agentflow(num_turns, args.shape, args.scale, group_size, "meta"), args)


def _ratios(counted: dict[str, Work]) -> dict[str, float]:
    tree = counted["tree"].flops
    return {path: each.flops / tree for path, each in counted.items() if path != "tree"}


def _goals(
    group_size: int, rows: Sequence[dict[str, Any]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The fewest turns at which each path needs a goal's multiple of the tree's FLOPs."""
    found = {
        row["turns"]: {key[:-6]: row[key] for key in row if key.endswith(" FLOPs")} for row in rows
    }
    for num_turns in _LONGER:
        if min(found[max(found)].values()) >= max(GOALS):
            break
        found.setdefault(num_turns, _ratios(_count(num_turns, group_size, args)))
    most = max(found)
    return [
        {"group size": group_size, "path": path}
        | {
            f"{goal}x at turns": min(
                (t for t, ratios in found.items() if ratios[path] >= goal), default=f"> {most}"
            )
            for goal in GOALS
        }
        | {"turns at most": most, "FLOPs there": found[most][path]}
        for path in found[most]
    ]


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    """FLOPs as lines, measured times as circles: over packed samples, and over padded ones."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"packed": "packed without sharing", "transformers": "padded, transformers"}
    for axes, (rival, title) in zip(panels, titles.items(), strict=True):
        for size in sorted({row["group size"] for row in rows}):
            of_size = [row for row in rows if row["group size"] == size]
            turns = [row["turns"] for row in of_size]
            (line,) = axes.plot(
                turns, [row[f"{rival} FLOPs"] for row in of_size], label=f"G={size}"
            )
            timed = [row for row in of_size if f"{rival} time" in row]
            axes.plot(
                [row["turns"] for row in timed],
                [row[f"{rival} time"] for row in timed],
                "o",
                markerfacecolor="none",
                color=line.get_color(),
            )
        axes.set_title(f"{title}, against the tree")
        axes.set_xlabel("turns of a rollout")
        axes.set_xticks(sorted({row["turns"] for row in rows}))
    panels[0].set_ylabel("times the tree (lines: FLOPs, circles: time)")
    panels[0].legend()
    figure.savefig(path, dpi=150)
