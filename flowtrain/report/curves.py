"""Training curves: which metrics share a panel, and the panels as a picture; of several runs, their
held-out rewards side by side.

python -m flowtrain.report.curves runs/texts
python -m flowtrain.report.curves runs/texts runs/shuffled_rewards --out control.png
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flowtrain.report.jsonl import read_lines
from flowtrain.report.run_dir import atomic_write_bytes
from flowtrain.types import TokenAccount, UserError, account_of
from flowtrain.utils.terminal import protect_output

Series = tuple[list[int], list[float]]
"""(steps, values) of one metric."""


STAGES = ("collect", "branch", "train", "publish", "load", "eval", "other")


class Curve(NamedTuple):
    """A metric in a panel."""

    label: str
    series: Series
    is_sparse: bool = False
    """It is not measured at every step: its points are marked."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Metrics that one picture shows."""

    title: str
    lines: Mapping[str, str]
    """Key to label; a key that ends in "/" means every metric that begins so, labelled by the rest.
    """
    form: Literal["number", "share", "seconds"] = "number"
    """How values are written."""
    is_stack: bool = False
    """The values are parts of a whole."""

    def curves(self, series: Mapping[str, Series]) -> list[Curve]:
        """Return those of its metrics that were logged."""
        return [
            Curve(label or name.removeprefix(key), series[name], key.startswith("eval_"))
            for key, label in self.lines.items()
            for name in series
            if name == key or (key.endswith("/") and name.startswith(key))
        ]


PANELS = (
    Panel(
        "Reward",
        {
            "reward_mean": "training",
            "eval_reward": "held-out",
            "eval_true_score": "true score, held-out",
            "eval_reward_entities": "entities",
            "eval_reward_forms": "forms",
        },
    ),
    Panel("Accuracy on benchmarks", {"eval_accuracy/": ""}, "share"),
    Panel("Parts of the reward", {"reward/": ""}),
    Panel("KL", {"kl_ref": "to the reference", "kl_old": "to the old policy", "kl": "KL"}),
    Panel("Token entropy", {"entropy": "nats"}),
    Panel("Clipped tokens", {"clip_fraction_high": "above", "clip_fraction_low": "below"}, "share"),
    Panel(
        "Importance ratio", {"ratio_max": "largest", "ratio_mean": "mean", "ratio_min": "smallest"}
    ),
    Panel("Log-prob mismatch", {"logprob_mismatch": "|trainer - sampler|"}),
    Panel("KL of trainer and sampler", {"mismatch_kl": "nats per token"}),
    Panel("Tokens by mismatch in nats", {"mismatch_tokens/": ""}, is_stack=True),
    Panel("Turns per rollout", {"turns_mean": "turns"}),
    Panel("Tokens per response", {"response_len_mean": "tokens"}),
    Panel("Tokens per prompt", {"prompt_len_mean": "tokens"}),
    Panel("Where sampled tokens go", {"tokens/to/": ""}, is_stack=True),
    Panel("Tool use", {"tool_share/": ""}, "share", is_stack=True),
    Panel(
        "What goes wrong",
        {
            "malformed_share": "malformed",
            "tool_error_share": "tool errors",
            "out_of_turns_share": "out of turns",
            "out_of_time_share": "out of time",
        },
        "share",
    ),
    Panel("Replies read leniently", {"rescued_share/": ""}, "share"),
    Panel("Loss and gradient norm", {"loss": "loss", "grad_norm": "gradient"}),
    Panel(
        "Seconds per step",
        {f"{stage}_s": stage for stage in STAGES},
        "seconds",
        is_stack=True,
    ),
)


def plot_curves(run_dir: Path, out: Path | None = None) -> Path:
    """Draw the panels of a run into `out`, by default curves.png in its folder."""
    from flowtrain.report import panels

    run_dir = Path(run_dir)
    series = read_series(run_dir)
    last_step = max(steps[-1] for steps, _ in series.values())
    with panels.style():
        figure = panels.run_figure(
            series, title=f"{run_dir.resolve().name}, up to step {last_step}"
        )
        return save_figure(figure, run_dir / "curves.png" if out is None else Path(out))


def plot_comparison(runs: Mapping[str, Path], out: Path) -> Path:
    """Draw the held-out sampled reward of several runs, label -> run folder, into one panel."""
    from flowtrain.report import panels

    rewards = {label: _eval_reward(Path(run_dir)) for label, run_dir in runs.items()}
    with panels.style():
        return save_figure(panels.comparison_figure(rewards), Path(out))


def plot_turns(
    points: Mapping[str, Mapping[str, Sequence[tuple[int, float, float]]]], out: Path
) -> Path:
    """Draw accuracy against the budget of turns, a panel per benchmark and a line per planner.

    `points`: (turns, accuracy, spread or 0) by benchmark and planner.
    """
    from flowtrain.report import panels

    with panels.style():
        return save_figure(panels.turns_figure(points), Path(out))


def read_series(run_dir: Path) -> dict[str, Series]:
    """Read every numeric metric of a run by key, steps ascending. The later of two lines for a step
    counts.
    """
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"{path} does not exist: name the folder of a run that has logged a step")
    values: dict[str, dict[int, float]] = {}
    for record in read_lines(path):
        for key, value in record.items():
            if key != "step" and isinstance(value, int | float) and math.isfinite(value):
                values.setdefault(key, {})[record["step"]] = value
    if not values:
        raise UserError(f"{path} holds no metrics yet: wait for the first step of the run")
    return {
        key: (sorted(by_step), [by_step[step] for step in sorted(by_step)])
        for key, by_step in values.items()
    }


def total_seconds(series: Mapping[str, Series]) -> dict[str, float]:
    """Sum the seconds of all steps, by what took them."""
    return {
        key.removesuffix("_s"): round(sum(values), 3)
        for key, (_, values) in series.items()
        if key.endswith("_s") and key != "tokens_per_s"
    }


def total_tokens(series: Mapping[str, Series]) -> TokenAccount:
    """Add up what became of the tokens of all steps."""
    return account_of({key: sum(values) for key, (_, values) in series.items()})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    protect_output()
    parser = argparse.ArgumentParser(
        prog="python -m flowtrain.report.curves",
        description="Draw the curves of a training run as a PNG.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run folder; with several, their held-out rewards are compared",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="the picture (default: RUN/curves.png, comparison.png for several runs)",
    )
    arguments = parser.parse_args(argv)
    try:
        print(_draw(arguments.runs, arguments.out))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _draw(runs: list[Path], out: Path | None) -> Path:
    if len(runs) == 1:
        return plot_curves(runs[0], out)
    names = [run.resolve().name for run in runs]
    labels = names if len(set(names)) == len(names) else [str(run) for run in runs]
    return plot_comparison(dict(zip(labels, runs, strict=True)), out or Path("comparison.png"))


def _eval_reward(run_dir: Path) -> Series:
    series = read_series(run_dir)
    if "eval_reward" not in series:
        raise UserError(
            f"{run_dir / 'metrics.jsonl'} has no eval_reward: compare runs that were evaluated on "
            "the held-out tasks"
        )
    return series["eval_reward"]


def save_figure(figure: Any, out: Path) -> Path:
    """Save the figure as a PNG, whole or not at all."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    atomic_write_bytes(out, picture.getvalue())
    return out


if __name__ == "__main__":
    sys.exit(main())
