"""A picture of a ledger over time: rates by node, rewards, versions and staleness.

python -m flowtrain.dataflow picture --database runs/a/flow.sqlite --out flow.png
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from flowtrain.dataflow.ledger.sql import Transaction
from flowtrain.report.curves import save_figure
from flowtrain.types import UserError

_MAX_NODES = 12
"""Nodes with a band of their own; the others share the last."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times are seconds since the first lease."""

    pushes: tuple[tuple[float, str, float], ...]
    """(time, node, mean reward) of each committed group with a rollout that finished, in the order
    of time."""
    batches: dict[str, tuple[tuple[float, int, float, float], ...]]
    """By policy and step, a batch: (time, version that it trains, mean and maximum of the staleness
    of its groups)."""
    leases: tuple[tuple[float, str, int], ...]
    """(time, node, +1 or -1) when a node came or went; it is there from its first lease to its last
    push."""

    @property
    def end_s(self) -> float:
        return max(
            [time for time, *_ in self.pushes]
            + [time for rows in self.batches.values() for time, *_ in rows]
        )


def read_timeline(transaction: Transaction) -> Timeline:
    """Read the timeline of a ledger. UserError while nothing has been pushed."""
    groups = transaction.all(
        "SELECT pushed_s, node, rewards FROM groups ORDER BY pushed_s, work_item"
    )
    if not groups:
        raise UserError("there is nothing to draw: no node has pushed a group yet")
    leases = transaction.all(
        "SELECT node, min(start_s) AS start_s FROM leases GROUP BY node ORDER BY node"
    )
    start_s = min(row.start_s for row in leases)
    rewarded = [(row.pushed_s - start_s, row.node, json.loads(row.rewards)) for row in groups]
    last_push = {node: time for time, node, _ in rewarded}
    presence = [(row.start_s - start_s, row.node, 1) for row in leases] + [
        (time, node, -1) for node, time in last_push.items()
    ]
    batches: dict[str, list[tuple[float, int, float, float]]] = {}
    for row in transaction.all(
        "SELECT policy, step, made_s, stats FROM batches ORDER BY policy, step"
    ):
        stats = json.loads(row.stats)
        batches.setdefault(row.policy, []).append(
            (row.made_s - start_s, row.step - 1, stats["staleness_mean"], stats["staleness_max"])
        )
    return Timeline(
        tuple((time, node, fmean(rewards)) for time, node, rewards in rewarded if rewards),
        {policy: tuple(rows) for policy, rows in batches.items()},
        tuple(sorted(presence)),
    )


def draw_timeline(timeline: Timeline, out: Path, title: str) -> Path:
    """Draw four panels with one time axis as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from flowtrain.report import panels

    with panels.style():
        figure = Figure(figsize=(13, 11), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, fontsize=15, fontweight="bold", x=0.012, ha="left")
        every: Any = figure.subplots(4, 1, sharex=True, height_ratios=(3, 3, 2, 2))
        for axes, draw in zip(
            every, (_draw_rates, _draw_rewards, _draw_versions, _draw_staleness), strict=True
        ):
            draw(axes, timeline)
            axes.set_ylim(0, 1.25 * axes.get_ylim()[1])  # room for the legend
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="upper left", ncols=6)
        every[-1].set_xlabel("seconds since the first lease")
        every[-1].set_xlim(0, max(timeline.end_s, 1e-9))
        return save_figure(figure, out)


def rates(times: Sequence[float], end_s: float, num_bins: int) -> list[float]:
    """Rates per second, in bins of equal length from 0 to `end_s`."""
    width = max(end_s, 1e-9) / num_bins
    counts = [0] * num_bins
    for time in times:
        counts[min(int(time / width), num_bins - 1)] += 1
    return [count / width for count in counts]


def trailing(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to `window` - 1 values before it."""
    sums = [0.0, *accumulate(values)]
    return [
        (sums[end] - sums[max(end - window, 0)]) / min(end, window) for end in range(1, len(sums))
    ]


def _draw_rates(axes: Any, timeline: Timeline) -> None:
    from flowtrain.report.panels import PALETTE

    num_bins, end_s = 60, timeline.end_s
    names = sorted(
        {node for _, node, _ in timeline.pushes},
        key=lambda name: next(t for t, node, _ in timeline.pushes if node == name),
    )
    bands = {
        name: [time for time, node, _ in timeline.pushes if node == name]
        for name in names[: _MAX_NODES - 1]
    }
    if rest := [time for time, node, _ in timeline.pushes if node not in bands]:
        bands[f"{len(names) - len(bands)} more"] = rest
    edges = [(index + 0.5) * end_s / num_bins for index in range(num_bins)]
    stacked = [rates(times, end_s, num_bins) for times in bands.values()]
    axes.stackplot(edges, stacked, labels=list(bands), colors=[*PALETTE, *PALETTE], alpha=0.85)
    axes.set(title="Groups committed per second, by node", ylabel="groups / s")


def _draw_rewards(axes: Any, timeline: Timeline) -> None:
    from flowtrain.report.panels import BLUE, GREY

    times = [time for time, *_ in timeline.pushes]
    rewards = [reward for *_, reward in timeline.pushes]
    window = max(len(rewards) // 20, 1)
    axes.plot(times, rewards, ".", color=GREY, markersize=2, alpha=0.4)
    axes.plot(
        times, trailing(rewards, window), color=BLUE, label=f"mean of the last {window} groups"
    )
    axes.set(title="Reward of committed groups", ylabel="mean reward", ylim=(0, 1))


def _draw_versions(axes: Any, timeline: Timeline) -> None:
    from flowtrain.report.panels import ORANGE, PALETTE

    for colour, (policy, rows) in zip(PALETTE, timeline.batches.items(), strict=False):
        axes.step(
            [time for time, *_ in rows],
            [version for _, version, *_ in rows],
            where="post",
            color=colour,
            label=f"{policy}: version",
        )
    counts = list(accumulate(change for *_, change in timeline.leases))
    right = axes.twinx()
    right.step(
        [time for time, *_ in timeline.leases],
        counts,
        where="post",
        color=ORANGE,
        linestyle=":",
        label="nodes",
    )
    right.set(ylabel="nodes at work", ylim=(0, max(counts) + 1), yticks=range(max(counts) + 1))
    right.grid(visible=False)
    right.legend(loc="lower right")
    axes.set(title="Versions, and nodes that come and go", ylabel="version")


def _draw_staleness(axes: Any, timeline: Timeline) -> None:
    from flowtrain.report.panels import PALETTE

    for colour, (policy, rows) in zip(PALETTE, timeline.batches.items(), strict=False):
        times = [time for time, *_ in rows]
        axes.plot(times, [mean for *_, mean, _ in rows], color=colour, label=f"{policy}: mean")
        axes.plot(
            times,
            [oldest for *_, oldest in rows],
            color=colour,
            linestyle="--",
            linewidth=1,
            label=f"{policy}: oldest",
        )
    axes.set(title="Staleness of trained groups", ylabel="versions")
