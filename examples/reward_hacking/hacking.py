"""Show a hacked reward beside the truth.  python examples/reward_hacking/hacking.py [--dir D]

A tiny planner is warmed up until it is mostly right, and then trained twice: by a reward that likes
long rollouts (likes_length.py), and by exact match. Both runs are scored by exact match on held-out
questions, of which training sees nothing; curves.png in each folder shows the two scores. "reward"
and "true score" are the held-out ones before training and after the last step. Runs that are there
already are taken as they are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from flowtrain.config import Config
from flowtrain.config.command import run_command
from flowtrain.rft.loop import rft
from flowtrain.train import train

FOLDER = Path(__file__).resolve().parent
ARMS = {
    "likes length": ("--reward.function", f"{FOLDER / 'likes_length.py'}:score"),
    "exact match": (),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("runs/hacking"), help="of all three runs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    seed = ("--run.seed", str(args.seed))
    warm = run(args.dir / "warm", "model/rft.json", "flowtrain.rft", rft, seed)
    line = "{:<14}{:>16}{:>16}{:>7}{:>9}"
    print(line.format("reward trained", "reward", "true score", "steps", "seconds"))
    for name, options in ARMS.items():
        words = (*seed, *options, "--model.path", str(warm / "model"))
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
    """What a run came to: both scores before and after, steps, and seconds of a step."""
    summary = json.loads((folder / "summary.json").read_text())
    scores = (
        " -> ".join(f"{summary[end][score]:.2f}" for end in ("warm", "trained"))
        for score in ("eval_reward", "eval_true_score")
    )
    num_steps = len((folder / "metrics.jsonl").read_text().splitlines()) - 1
    return [*scores, num_steps, round(summary["seconds"]["step"])]


if __name__ == "__main__":
    main()
