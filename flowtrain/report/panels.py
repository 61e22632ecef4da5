"""How the curves look: one function per panel. Imported only when a picture is drawn, because
matplotlib is slow to load.

Figures are made without pyplot, so nothing global remains open and the Agg canvas needs no display.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

Series = tuple[list[int], list[float]]

# Okabe and Ito's palette: told apart with any kind of colour vision.
BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8A8A8A",
)  # fmt: skip
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW)
MARKERS = "osD^vPX"
TEXT = "#262626"

_PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.3g}%")

_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "text.color": TEXT,
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelsize": 11,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": "#9A9A9A",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "xtick.color": "#5A5A5A",
    "ytick.color": "#5A5A5A",
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "lines.solid_capstyle": "round",
    "figure.dpi": 120,
    "savefig.dpi": 120,
}


def style() -> AbstractContextManager[None]:
    """The look of all pictures, for the time of a with block."""
    context: AbstractContextManager[None] = matplotlib.rc_context(_STYLE)
    return context


def run_figure(series: Mapping[str, Series], title: str) -> Figure:
    """The six panels of one run."""
    figure = Figure(figsize=(16, 9), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=15, fontweight="bold", x=0.012, ha="left")
    limits = _step_limits(series)
    for axes, panel in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        axes.set_xlim(*limits)
        panel(axes, series)
    return figure


def comparison_figure(rewards: Mapping[str, Series]) -> Figure:
    """Held-out sampled reward against step, one line per run."""
    figure = Figure(figsize=(9.5, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    for place, (label, (steps, values)) in enumerate(rewards.items()):
        look = {
            "color": PALETTE[place % 7],
            "marker": MARKERS[place % 7],
            "linestyle": "-" if place < 7 else "--",
        }
        text = f"{label} ({values[-1]:.3f} at step {steps[-1]})"
        axes.plot(steps, values, markersize=6, markeredgecolor="white", label=text, **look)
    _frame(axes, "Held-out reward (sampled)", "mean reward [0 to 1]")
    _reward_limits(axes)
    _legend(axes, num_columns=2)
    return figure


def draw_reward(axes: Any, series: Mapping[str, Series]) -> None:
    """Held-out reward where it was measured, and the reward of the training batches behind it."""
    if "reward_mean" in series:
        _noisy(axes, series["reward_mean"], GREY, "training batch")
    held_out = {
        "eval_reward": "held-out texts",
        "eval_reward_entities": "held-out entities",
        "eval_reward_forms": "held-out forms",
    }
    for (key, label), color, marker in zip(
        held_out.items(), (BLUE, ORANGE, GREEN), MARKERS, strict=False
    ):
        if key in series:
            text = f"{label} ({series[key][1][-1]:.2f})"
            axes.plot(
                *series[key],
                color=color,
                marker=marker,
                markersize=5.5,
                markeredgecolor="white",
                label=text,
                zorder=3,
            )
    _frame(axes, "Reward (sampled)", "mean reward [0 to 1]")
    if _finish(axes, num_columns=2):
        _reward_limits(axes)


def draw_tools(axes: Any, series: Mapping[str, Series]) -> None:
    """Which tools the planner chose, as stacked shares."""
    _frame(axes, "Tool use", "share of turns")
    shares = _tool_shares(series)
    if shares:
        steps = sorted({step for tool_steps, _ in shares.values() for step in tool_steps})
        window = _window(len(steps))
        columns = [trailing_mean(_aligned(item, steps), window) for item in shares.values()]
        if window > 1:
            axes.set_title(f"Tool use, mean of {window} steps")
        _stack(axes, steps, columns, list(shares))
    _finish(axes, num_columns=3)


def draw_turns(axes: Any, series: Mapping[str, Series]) -> None:
    """How long rollouts are, and on the right how many actions could not be read."""
    _frame(axes, "Turns and malformed actions", "turns per rollout")
    if "turns_mean" in series:
        _noisy(axes, series["turns_mean"], BLUE, "turns")
        _colour_axis(axes, BLUE)
    right = None
    if "malformed_share" in series:
        right = _right_axis(axes, "share of malformed actions")
        _colour_axis(right, RED)
        _noisy(right, series["malformed_share"], RED, "malformed (right)", dashed=True)
        right.yaxis.set_major_formatter(_PERCENT)
        right.set_ylim(bottom=0)
    _finish(axes, num_columns=2, right=right)


def draw_entropy(axes: Any, series: Mapping[str, Series]) -> None:
    """Entropy of the policy over the trained tokens."""
    _frame(axes, "Token entropy", "nats per token")
    if "entropy" in series:
        _noisy(axes, series["entropy"], GREEN, "entropy")
        axes.set_ylim(bottom=0)
    _finish(axes, num_columns=2)


def draw_ratio(axes: Any, series: Mapping[str, Series]) -> None:
    """Extremes of the importance ratio, and on the right how much was clipped and how far the
    policy is from its reference.
    """
    _frame(axes, "Importance ratio, clipping, KL", "ratio new / old")
    for key, color, label in (
        ("ratio_max", BLUE, "largest ratio"),
        ("ratio_min", SKY, "smallest ratio"),
    ):
        if key in series:
            axes.axhline(1.0, color="#9A9A9A", linewidth=0.8, zorder=1)
            _noisy(axes, series[key], color, label)
    right = None
    if "clip_fraction" in series or "kl" in series:
        right = _right_axis(axes, "clipped share; KL [nats per token]")
        right.set_yscale("symlog", linthresh=1e-4)
    for key, color, label in (
        ("clip_fraction", ORANGE, "clipped (right)"),
        ("kl", RED, "KL (right)"),
    ):
        if key in series:
            _noisy(right, series[key], color, label, dashed=True)
    _finish(axes, num_columns=2, right=right)


def draw_mismatch(axes: Any, series: Mapping[str, Series]) -> None:
    """How far the sampler's log-probabilities are from the trainer's for the same tokens and
    weights.
    """
    _frame(axes, "Log-prob mismatch, sampler and trainer", "|difference| [nats per token]")
    if "logprob_mismatch" in series:
        _noisy(axes, series["logprob_mismatch"], PINK, "mismatch")
        if min(series["logprob_mismatch"][1]) > 0:
            axes.set_yscale("log")
    _finish(axes, num_columns=2)


PANELS: tuple[Callable[[Any, Mapping[str, Series]], None], ...] = (
    draw_reward, draw_tools, draw_turns, draw_entropy, draw_ratio, draw_mismatch,
)  # fmt: skip


def _noisy(axes: Any, series: Series, color: str, label: str, dashed: bool = False) -> None:
    """A metric that jumps from step to step: thin as measured, thick as a trailing mean."""
    steps, values = series
    window = _window(len(values))
    linestyle, marker = ("--", "s") if dashed else ("-", "o")
    if window == 1:
        axes.plot(
            steps,
            values,
            color=color,
            label=label,
            linestyle=linestyle,
            marker=marker,
            markersize=5,
            markeredgecolor="white",
        )
        return
    axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
    axes.plot(
        steps,
        trailing_mean(values, window),
        color=color,
        label=f"{label}, mean of {window}",
        linestyle=linestyle,
    )


def _window(num_values: int) -> int:
    """How many values a trailing mean takes: 1, so none, where there are few enough to show each
    with a marker.
    """
    return 1 if num_values <= 20 else max(10, num_values // 25)


def trailing_mean(values: list[float], window: int) -> list[float]:
    """Mean of each value and up to `window - 1` before it."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def _tool_shares(series: Mapping[str, Series]) -> dict[str, Series]:
    """Shares by tool name, the most used first; beyond seven they are summed up as "other"."""
    prefix = "tool_share/"
    shares = {
        key.removeprefix(prefix): value for key, value in series.items() if key.startswith(prefix)
    }
    names = sorted(shares, key=lambda name: -sum(shares[name][1]))
    kept = {name: shares[name] for name in names[: len(PALETTE)]}
    rest = [dict(zip(*shares[name], strict=True)) for name in names[len(PALETTE) :]]
    if rest:
        steps = sorted(set().union(*rest))
        kept["other"] = (steps, [sum(item.get(step, 0.0) for item in rest) for step in steps])
    return kept


def _aligned(series: Series, steps: list[int]) -> list[float]:
    by_step = dict(zip(*series, strict=True))
    return [by_step.get(step, 0.0) for step in steps]


def _stack(axes: Any, steps: list[int], columns: list[list[float]], names: list[str]) -> None:
    edges: list[float] = list(steps)
    if len(steps) == 1:
        edges, columns = [steps[0] - 0.4, steps[0] + 0.4], [column * 2 for column in columns]
    axes.stackplot(
        edges,
        columns,
        labels=names,
        colors=[*PALETTE, GREY],
        alpha=0.85,
        edgecolor="white",
        linewidth=0.6,
    )
    axes.set_ylim(0, max(1.0, *(sum(column) for column in zip(*columns, strict=True))))
    axes.yaxis.set_major_formatter(_PERCENT)


def _step_limits(series: Mapping[str, Series]) -> tuple[float, float]:
    """The same steps in every panel, so that one can look across."""
    first = min(steps[0] for steps, _ in series.values())
    last = max(steps[-1] for steps, _ in series.values())
    margin = max(0.03 * (last - first), 0.5)
    return first - margin, last + margin


def _frame(axes: Any, title: str, label: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("training step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def _right_axis(axes: Any, label: str) -> Any:
    right = axes.twinx()
    right.set_ylabel(label)
    right.spines["right"].set_visible(True)
    right.grid(False)
    right.margins(y=0.12)
    return right


def _colour_axis(axes: Any, color: str) -> None:
    axes.yaxis.label.set_color(color)
    axes.tick_params(axis="y", colors=color)


def _finish(axes: Any, num_columns: int, right: Any = None) -> bool:
    """The legend below the panel, or "not logged" in an empty one; says whether something was
    drawn.
    """
    if not axes.has_data():
        axes.set_yticks([])
    if axes.has_data() or right is not None:
        _legend(axes, num_columns, right)
        return True
    axes.text(
        0.5,
        0.5,
        "not logged",
        transform=axes.transAxes,
        ha="center",
        va="center",
        color=GREY,
        fontsize=13,
    )
    axes.set_xticks([])
    return False


def _legend(axes: Any, num_columns: int, right: Any = None) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if right is not None:
        more_handles, more_labels = right.get_legend_handles_labels()
        handles, labels = handles + more_handles, labels + more_labels
    axes.legend(
        handles,
        labels,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=num_columns,
        handlelength=1.6,
        columnspacing=1.4,
    )


def _reward_limits(axes: Any) -> None:
    axes.set_ylim(-0.02, 1.02)
