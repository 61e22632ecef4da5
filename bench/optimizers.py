"""What smaller optimizers do to the result: the quickstart's fine-tuning with each, from the
same weights on the same batches:  python -m bench.optimizers [--json F]

Compared is the loss over the last fifth of the steps, seed by seed, because each seed has the same
batches in every arm; and with --reward N the held-out reward of N questions, which takes thousands
of steps to rise. Passes in bfloat16 are an arm of their own, as two of the optimizers ask for them.
Runs that are there already are taken as they are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from bench.measure import print_table, write_json

HALF = ("--model.dtype", "bfloat16")
ARMS: dict[str, tuple[str, ...]] = {
    "adamw": (),
    "adamw_8bit": ("--train.optimizer", "adamw_8bit"),
    "adamw, passes in bf16": HALF,
    "adamw_bf16_sr": (*HALF, "--train.optimizer", "adamw_bf16_sr"),
    "adamw_8bit_bf16_sr": (*HALF, "--train.optimizer", "adamw_8bit_bf16_sr"),
}
COMMON = ("--config", "configs/quickstart.toml", "--run.threads", "1", "--log.tensorboard", "false")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of fine-tuning (default: 200)")
    parser.add_argument("--rollouts", type=int, default=1000, help="to imitate (default: 1000)")
    parser.add_argument("--reward", type=int, default=0, metavar="N", help="held-out questions")
    parser.add_argument("--dir", type=Path, default=Path("runs/optimizers"))
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    args = parser.parse_args()
    size = ("--rft.num_steps", str(args.steps), "--rft.num_rollouts", str(args.rollouts))
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    places = [(seed, arm) for seed in range(1, args.seeds + 1) for arm in ARMS]
    for seed, arm in tqdm(places, unit="run"):
        options = (*COMMON, *ARMS[arm], *size, "--run.seed", str(seed))
        folder = args.dir / f"{arm.replace(', ', '-').replace(' ', '-')}-{args.steps}-{seed}"
        found[arm].append(measure(folder, options, args.reward))
    rows = [row(arm, runs, found["adamw"], args.steps) for arm, runs in found.items()]
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def measure(folder: Path, options: Sequence[str], num_questions: int) -> dict[str, float]:
    """Fine-tune, and ask the model where `num_questions` is above 0."""
    if not (folder / "model").exists():
        _run("flowtrain.rft", options, folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    found = {"loss": fmean(losses[-max(1, len(losses) // 5) :])}
    if num_questions:
        asked = folder.with_name(f"{folder.name}-asked")
        if not (asked / "summary.json").exists():
            only = ("--train.num_steps", "0", "--eval.num_tasks", str(num_questions))
            own = tuple(x for x in options[:-6] if x)  # without the size of the fine-tuning
            _run("flowtrain.train", (*own, *only, "--model.path", str(folder / "model")), asked)
        summary = json.loads((asked / "summary.json").read_text())
        found["reward"] = summary["warm"]["eval_reward"]
    return found


def _run(module: str, options: Sequence[str], folder: Path) -> None:
    command = [sys.executable, "-m", module, *options, "--run.dir", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}")


def row(
    arm: str, runs: Sequence[dict[str, float]], base: Sequence[dict[str, float]], num_steps: int
) -> dict[str, Any]:
    apart = [own["loss"] - other["loss"] for own, other in zip(runs, base, strict=True)]
    made = {
        "optimizer": arm,
        "seeds": len(runs),
        "steps": num_steps,
        "loss": fmean(run["loss"] for run in runs),
        "above_adamw": fmean(apart),
        "least": min(apart),
        "most": max(apart),
    }
    if "reward" in runs[0]:
        made["reward"] = fmean(run["reward"] for run in runs)
    return made


if __name__ == "__main__":
    main()
