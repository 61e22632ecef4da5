"""Show a hacked reward beside the truth.  python examples/reward_hacking/hacking.py [--dir D]

A tiny planner is warmed up until it is mostly right, and then trained twice, by the parts of one
reward (likes_length.py) with other weights: once long rollouts earn most, once right answers alone.
curves.png in each folder shows the reward and its parts in training. The table has held-out
questions, of which training sees nothing, before training and after the last step: the reward, and
the share that is right. Runs that are there already are taken as they are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from statistics import fmean
from typing import Any

from flowtrain.config import Config
from flowtrain.config.command import run_command
from flowtrain.rft.loop import rft
from flowtrain.train import train

FOLDER = Path(__file__).resolve().parent
ARMS = {
    "likes length": "{ right = 0.2, thorough = 0.8 }",
    "exact match": "{ right = 1.0, thorough = 0.0 }",
}
"""Names of runs, and what the parts of the reward are worth in them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("runs/hacking"), help="of all three runs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    seed = ("--run.seed", str(args.seed))
    warm = run(args.dir / "warm", "model/rft.json", "flowtrain.rft", rft, seed)
    line = "{:<14}{:>16}{:>16}{:>7}{:>9}"
    print(line.format("reward trained", "reward", "right", "steps", "seconds"))
    function = ("--reward.function", f"{FOLDER / 'likes_length.py'}:score")
    for name, weights in ARMS.items():
        reward = (*function, "--reward.weights", weights)
        words = (*seed, *reward, "--model.path", str(warm / "model"))
        place = args.dir / name.replace(" ", "_")
        folder = run(place, "summary.json", "flowtrain.train", train, words)
        print(line.format(name, *facts(folder)), flush=True)


def run(
    folder: Path, mark: str, name: str, command: Callable[[Config], int], words: Sequence[str]
) -> Path:
    """Make a run, unless its last file is there; in this process, whose imports take a while."""
    if not (folder / mark).exists():
        place = ("--config", str(FOLDER / "hacking.toml"), "--run.dir", str(folder))
        folder.parent.mkdir(parents=True, exist_ok=True)
        output = folder.with_name(f"{folder.name}.log")
        with output.open("w") as log, redirect_stdout(log), redirect_stderr(log):
            code = run_command(name, command, [*place, *words])
        if code:
            raise SystemExit(f"{folder}: {output.read_text()[-2000:]}")
    return folder


def facts(folder: Path) -> list[object]:
    """What a run came to: reward and right answers before and after, steps, seconds of a step."""
    summary = json.loads((folder / "summary.json").read_text())
    held_out = read(folder / "held_out.jsonl")
    ends = [[x for x in held_out if x["step"] == 0], read(folder / "trained.jsonl")]
    reward = (f"{summary[end]['eval_reward']:.2f}" for end in ("warm", "trained"))
    right = (f"{fmean(x['reward_parts']['right'] for x in found):.2f}" for found in ends)
    num_steps = len(read(folder / "metrics.jsonl")) - 1
    scores = (" -> ".join(reward), " -> ".join(right))
    return [*scores, num_steps, round(summary["seconds"]["step"])]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
