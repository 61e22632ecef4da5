"""Draw the curves of a run as a picture.

Import it only where a picture is drawn, because matplotlib is slow to load. Figures are made
without pyplot, so nothing global remains open and the Agg canvas needs no display.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from flowtrain.logging.page.panels import PANELS, Curve, Panel
from flowtrain.logging.run_dir import atomic_write_bytes
from flowtrain.logging.series import Series, read_series

# Okabe and Ito's palette: told apart with any kind of colour vision.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
GREY = "#8A8A8A"
_NUM_COLUMNS = 3
_STYLE = {
    "font.size": 11,
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#9A9A9A",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "figure.dpi": 120,
}


def run_figure(series: Mapping[str, Series], title: str) -> Figure:
    """Draw the panels of one run for which something was logged."""
    panels = [(panel, curves) for panel in PANELS if (curves := panel.curves(series))]
    num_rows = max(math.ceil(len(panels) / _NUM_COLUMNS), 1)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(16, 4.5 * num_rows), layout=layout)
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=15, fontweight="bold", x=0.012, ha="left")
    for place, (panel, curves) in enumerate(panels, 1):
        _draw(figure.add_subplot(num_rows, _NUM_COLUMNS, place), panel, curves)
    return figure


def _draw(axes: Any, panel: Panel, curves: Sequence[Curve]) -> None:
    axes.set_title(panel.title)
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    if panel.form == "share":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if panel.is_stack:
        _stack(axes, curves)
    else:
        for place, curve in enumerate(curves):
            linestyle = "-" if place < len(PALETTE) else "--"
            _plot(axes, curve, color=PALETTE[place % len(PALETTE)], linestyle=linestyle)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, handlelength=1.6)


def _plot(axes: Any, curve: Curve, **look: str) -> None:
    """Draw points where they are few; else a thin line as measured and a thick trailing mean."""
    steps, values = curve.series
    window = 1 if curve.is_sparse else _window(len(values))
    if window == 1:
        axes.plot(steps, values, label=curve.label, marker="o", markersize=5, **look)
        return
    axes.plot(steps, values, linewidth=0.8, alpha=0.3, **look)
    label = f"{curve.label}, mean of {window}"
    axes.plot(steps, trailing_mean(values, window), label=label, **look)


def _stack(axes: Any, curves: Sequence[Curve]) -> None:
    """Stack trailing means; a curve that has no value at a step counts as 0 there."""
    steps = sorted({step for curve in curves for step in curve.series[0]})
    values_by_step = [dict(zip(*curve.series, strict=True)) for curve in curves]
    window = _window(len(steps))
    columns = [
        trailing_mean([value_by_step.get(step, 0.0) for step in steps], window)
        for value_by_step in values_by_step
    ]
    edges: list[float] = list(steps)
    if len(steps) == 1:
        edges, columns = [steps[0] - 0.4, steps[0] + 0.4], [column * 2 for column in columns]
    labels = [curve.label for curve in curves]
    axes.stackplot(edges, columns, labels=labels, colors=[*PALETTE, GREY], alpha=0.85)


def _window(num_values: int) -> int:
    """Count the values of a trailing mean: 1, so none, where there are few enough to show each
    with a marker.
    """
    return 1 if num_values <= 20 else max(10, num_values // 25)


def trailing_mean(values: list[float], window: int) -> list[float]:
    """Compute the mean of each value and up to `window - 1` before it."""
    parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def plot_curves(run_dir: Path) -> Path:
    """Draw the panels of a run into curves.png in its folder, whole or not at all."""
    series, out, picture = read_series(run_dir), run_dir / "curves.png", io.BytesIO()
    last_step = max(steps[-1] for steps, _ in series.values())
    with matplotlib.rc_context(_STYLE):
        figure = run_figure(series, title=f"{run_dir.resolve().name}, up to step {last_step}")
        figure.savefig(picture, format="png")
    atomic_write_bytes(out, picture.getvalue())
    return out
