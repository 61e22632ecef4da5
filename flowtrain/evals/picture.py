"""An evaluation as a picture: accuracy per benchmark with its interval and trials, turns, and the
tools that were used.

Imported only when a picture is drawn, because matplotlib is slow to load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter

from flowtrain.evals.summary import Score
from flowtrain.report.curves import save_figure
from flowtrain.report.panels import BLUE, GREEN, GREY, PALETTE, RED, SKY, TEXT, style

Runs = Mapping[str, Sequence[Score]]
"""One or two evaluations by label, the one in question first."""

_WIDTH = 0.72
_COLORS = (BLUE, SKY)
_MARKS = (("D", RED), ("v", GREEN), ("^", GREY))


def plot(runs: Runs, references: Mapping[str, Mapping[str, float]], title: str, out: Path) -> Path:
    """Draws the three panels into `out`; `references`: accuracies of others by label and benchmark,
    which are marks.
    """
    with style():
        return save_figure(_figure(runs, references, title), out)


def _figure(runs: Runs, references: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    names = [score.benchmark for score in next(iter(runs.values()))]
    figure = Figure(
        figsize=(max(11.0, 4.0 + 1.1 * len(names)), 9),
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
    )
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=15, fontweight="bold", x=0.012, ha="left")
    halves: Any = figure.subfigures(2, 1, height_ratios=[1.1, 1])
    top, bottom = halves
    left, right = bottom.subplots(1, 2)
    _draw_accuracy(top.subplots(), names, runs, references)
    _draw_turns(left, names, runs)
    _draw_tools(right, names, next(iter(runs.values())))
    return figure


def _draw_accuracy(
    axes: Any, names: Sequence[str], runs: Runs, references: Mapping[str, Mapping[str, float]]
) -> None:
    """Draw bars with Wilson's interval, a dot per trial, and the marks of other systems."""
    width = _WIDTH / len(runs)
    for number, (label, place_of) in enumerate(_places(names, runs).items()):
        known = [(place, score) for place, score in place_of if score.accuracy is not None]
        axes.bar(
            [place for place, _ in known],
            [score.accuracy for _, score in known],
            width,
            color=_COLORS[number % 2],
            label=label,
        )
        for place, score in known:
            axes.vlines(place, score.low, score.high, color=TEXT, linewidth=1.3)
            axes.annotate(
                f"{score.accuracy:.1%}",
                (place, score.high),
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=9.5,
            )
            if len(score.by_trial) > 1:
                axes.plot(
                    [place] * len(score.by_trial),
                    score.by_trial,
                    "o",
                    color="white",
                    markeredgecolor=TEXT,
                    markersize=4.5,
                )
    for (marker, color), (label, named) in zip(_MARKS, references.items(), strict=False):
        marks = [(place, named[name]) for place, name in enumerate(names) if name in named]
        if marks:
            axes.plot(
                *zip(*marks, strict=True),
                marker,
                color=color,
                markeredgecolor="white",
                markersize=9,
                label=label,
            )
    _frame(axes, "Accuracy  (line: 95% interval over questions; dots: trials)", names)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, 1.08)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4)


def _draw_turns(axes: Any, names: Sequence[str], runs: Runs) -> None:
    for number, place_of in enumerate(_places(names, runs).values()):
        places, turns = (
            [place for place, _ in place_of],
            [score.stats.turns_mean for _, score in place_of],
        )
        bars = axes.bar(places, turns, _WIDTH / len(runs), color=_COLORS[number % 2])
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=9)
    axes.margins(y=0.15)
    _frame(axes, "Turns per rollout", names)


def _draw_tools(axes: Any, names: Sequence[str], scores: Sequence[Score]) -> None:
    """Draw the shares of turns by tool; the rest named no tool."""
    tools = list(scores[0].stats.tool_shares)
    shares = {name: [score.stats.tool_shares[name] for score in scores] for name in tools}
    shares["malformed"] = [score.stats.malformed_share for score in scores]
    base = [0.0] * len(scores)
    for number, (name, values) in enumerate(shares.items()):
        color = GREY if number == len(tools) else PALETTE[number % 7]
        axes.bar(
            range(len(scores)),
            values,
            _WIDTH,
            base,
            color=color,
            label=name,
            edgecolor="white",
            linewidth=0.6,
        )
        base = [low + value for low, value in zip(base, values, strict=True)]
    _frame(axes, "Tool use (share of turns)", names)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, handlelength=1.2)


def _places(names: Sequence[str], runs: Runs) -> dict[str, list[tuple[float, Score]]]:
    """Compute the positions of each run's bars, side by side at each benchmark."""
    width = _WIDTH / len(runs)
    shifts = {label: (number - (len(runs) - 1) / 2) * width for number, label in enumerate(runs)}
    return {
        label: [
            (names.index(score.benchmark) + shifts[label], score)
            for score in scores
            if score.benchmark in names
        ]
        for label, scores in runs.items()
    }


def _frame(axes: Any, title: str, names: Sequence[str]) -> None:
    axes.set_title(title)
    axes.set_xticks(range(len(names)), names, rotation=25 if len(names) > 4 else 0)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(False, axis="x")
