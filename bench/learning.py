"""Do algorithms learn more from as many sampled tokens?  python -m bench.learning --warm MODEL

Every arm of a study trains the tiny planner of the quickstart, from the same warm models, with
several seeds; runs that are there already are taken as they are. Compared is the held-out reward at
the same number of sampled response tokens, the most that every run has reached: at the end
("final"), and on average on the way there ("mean"), each as mean and 95 % interval (Student's t)
over seeds. "gain" is how much the mean is above that of the first arm, seed by seed; "to level" are
the tokens, in thousands, until the reward is at --level for the first time, of the runs that get
there ("reached").
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib
import numpy as np
from tqdm import tqdm

from bench.measure import new_parser, report
from flowtrain.config.command import run_command
from flowtrain.train import train

CONFIG = ("--config", "configs/quickstart.toml")
SHORT = [
    *("--run.threads", "1", "--eval.every", "10", "--eval.num_tasks", "100"),
    *("--checkpoint.every", "0", "--log.tensorboard", "false"),
]
_SCORE = [
    *("--algorithm.name", "appo", "--appo.num_roots", "4", "--appo.spacing", "4"),
    *("--train.num_steps", "75", "--appo.rule"),
]
_STEPS = ("--train.num_steps", "60")
STUDIES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "appo": {
        "flow_grpo": _STEPS,
        "appo": [*_SCORE, "score"],
        "appo, no future": [*_SCORE, "score", "--appo.future_coef", "0"],
        "appo, single group": [*_SCORE, "score", "--appo.advantage_groups", "single"],
        "entropy": [*_SCORE, "entropy"],
    },
    "relatives": {
        "flow_grpo": _STEPS,
        **{
            name: (*_STEPS, "--algorithm.name", name)
            for name in ("dr_grpo", "dapo", "rloo", "reinforce_plus_plus")
        },
    },
}
"""Options of each arm beside the quickstart's; the first is what the others are compared with.
appo: APPO and its rivals; steps differ because the tokens of a step do. relatives: GRPO's."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t, two-sided, by number of seeds."""

Curve = tuple[list[float], list[float]]
"""Tokens sampled so far, and held-out reward, at every evaluation."""


def main() -> None:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--warm", nargs="+", required=True, help="models; seed i begins from number i mod those")
    add("--study", choices=STUDIES, default="appo", help="what is compared")
    add("--arms", nargs="+", help="of the study; none: all")
    add("--seeds", type=int, default=5, choices=list(T_95), metavar="N", help="2 to 10")
    add("--level", type=float, default=0.8, help="reward to reach")
    add("--dir", type=Path, default=Path("runs/learning"), help="folder of the runs")
    add("--plot", metavar="PNG", help="draw the curves into this file")
    args = parser.parse_args()
    study = STUDIES[args.study]
    if unknown := set(args.arms or study) - set(study):
        parser.error(
            f"--arms {' '.join(sorted(unknown))}: the study {args.study!r} has "
            f"{', '.join(map(repr, study))}"
        )
    arms = {arm: study[arm] for arm in args.arms or study}
    folders: dict[str, list[Path]] = {arm: [] for arm in arms}
    for seed, arm in tqdm([(seed, arm) for seed in range(args.seeds) for arm in arms], desc="runs"):
        folder = args.dir / args.study / arm.replace(", ", "-").replace(" ", "_") / str(seed)
        folders[arm].append(run(folder, arms[arm], seed, args.warm[seed % len(args.warm)]))
    curves = {arm: [curve(folder) for folder in runs] for arm, runs in folders.items()}
    budget = min(tokens[-1] for runs in curves.values() for tokens, _ in runs)
    first = next(iter(curves.values()))
    grid = coarsest([run for runs in curves.values() for run in runs], budget)
    rows = [
        row(arm, runs, first, grid, args.level) | {"mismatch": fmean(map(mismatch, folders[arm]))}
        for arm, runs in curves.items()
    ]
    report(args.json, rows)
    if args.plot:
        plot(curves, budget, args.plot)


def run(folder: Path, options: Sequence[str], seed: int, model: str) -> Path:
    """Train one, unless it is there; in this process, whose imports take longer than a few steps.

    One thread, because runs are compared by tokens and not by time.
    """
    if not (folder / "summary.json").exists():
        place = ["--run.dir", str(folder), "--run.seed", str(seed), "--model.path", model]
        words = [*CONFIG, *SHORT, *options, *place, "--run.resume", "auto"]
        folder.parent.mkdir(parents=True, exist_ok=True)
        output = folder.with_name(f"{folder.name}.log")
        with output.open("w") as log, redirect_stdout(log), redirect_stderr(log):
            code = run_command("flowtrain.train", train, words)
        if code:
            raise SystemExit(f"{folder}: {output.read_text()[-2000:]}")
    return folder


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return sorted(lines, key=lambda line: int(line["step"]))  # nodes answer late


def mismatch(folder: Path) -> float:
    """`logprob_mismatch`, in nats, on average over the steps that trained."""
    return fmean(line["logprob_mismatch"] for line in metrics(folder) if "logprob_mismatch" in line)


def curve(folder: Path) -> Curve:
    lines = metrics(folder)
    tokens = accumulate(line.get("num_sampled_tokens", 0) for line in lines)
    points = [
        (float(total), line["eval_reward"])
        for total, line in zip(tokens, lines, strict=True)
        if "eval_reward" in line
    ]
    return [total for total, _ in points], [reward for _, reward in points]


def coarsest(runs: Sequence[Curve], budget: float) -> list[float]:
    """The numbers of tokens at which all are compared: where the run with the fewest evaluations
    was evaluated, and the budget.

    Between evaluations curves are straight lines, which lie below what is concave; on a grid of its
    own a run with more of them would gain.
    """
    return [*min(([t for t in tokens if t < budget] for tokens, _ in runs), key=len), budget]


def row(
    arm: str, runs: Sequence[Curve], first: Sequence[Curve], grid: Sequence[float], level: float
) -> dict[str, Any]:
    """`first`: the runs of the first arm, in the same order of seeds."""
    budget = grid[-1]
    final, mean = [reward_at(budget, run) for run in runs], [mean_reward(grid, run) for run in runs]
    gain = [a - mean_reward(grid, run) for a, run in zip(mean, first, strict=True)]
    reached = [tokens for run in runs if (tokens := tokens_to(level, run)) is not None]
    return {
        "arm": arm,
        "seeds": len(runs),
        "tokens": int(budget),
        "final": fmean(final),
        "final +-": half_width(final),
        "mean": fmean(mean),
        "mean +-": half_width(mean),
        "gain": fmean(gain),
        "gain +-": half_width(gain),
        "to level": fmean(reached) / 1000 if reached else None,
        "reached": len(reached),
    }


def reward_at(tokens: float, run: Curve) -> float:
    return float(np.interp(tokens, *run))


def mean_reward(grid: Sequence[float], run: Curve) -> float:
    """Area under the curve, by its width."""
    area: Any = np.trapezoid(np.interp(grid, *run), grid)  # numpy's releases differ in its type
    return float(area) / (grid[-1] - grid[0])


def tokens_to(level: float, run: Curve) -> float | None:
    """Between the two evaluations of which the second is the first at that level."""
    tokens, rewards = run
    index = next((n for n, reward in enumerate(rewards) if reward >= level), None)
    if not index:
        return None if index is None else tokens[0]
    return float(np.interp(level, rewards[index - 1 : index + 1], tokens[index - 1 : index + 1]))


def half_width(values: Sequence[float]) -> float:
    """Half-width of the 95 % interval of the mean."""
    return T_95[len(values)] * stdev(values) / len(values) ** 0.5


def plot(curves: dict[str, list[Curve]], budget: float, path: str) -> None:
    """Mean over seeds with its interval, against sampled tokens, from the first at
    which every run has been evaluated.
    """
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    begin = max(tokens[0] for runs in curves.values() for tokens, _ in runs)
    grid = np.linspace(begin, budget, 101)
    for arm, runs in curves.items():
        rewards = np.stack([np.interp(grid, tokens, reward) for tokens, reward in runs])
        width = np.array([half_width(column.tolist()) for column in rewards.T])
        (line,) = axes.plot(grid / 1000, rewards.mean(0), label=arm)
        axes.fill_between(
            grid / 1000,
            rewards.mean(0) - width,
            rewards.mean(0) + width,
            color=line.get_color(),
            alpha=0.15,
            lw=0,
        )
    axes.set(xlabel="sampled tokens, thousands", ylabel="held-out reward")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
