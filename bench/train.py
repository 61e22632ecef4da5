"""Split the wall time of a step of `flowtrain.train` by stage:  python -m bench.train [--json F]"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.measure import report
from flowtrain.config import Config
from flowtrain.config.options import parse
from flowtrain.rft.loop import rft
from flowtrain.train import train
from flowtrain.utils.step_timer import STAGES

QUICKSTART = ["--config", "configs/quickstart.toml"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument(
        "--steps", type=int, default=20, help="steps of flowtrain.train to take apart (default: 20)"
    )
    args = parser.parse_args()
    rows = stage_rows(args.steps)
    print()
    report(args.json, rows)


def stage_rows(num_steps: int) -> list[dict[str, Any]]:
    """Shares of a step's wall time, from the log of a short run on a planner that was warmed up
    briefly, so that its turns are real.
    """
    with tempfile.TemporaryDirectory() as folder:
        rft(
            _config(
                [
                    *QUICKSTART,
                    "--run.dir",
                    f"{folder}/warm",
                    "--rft.num_rollouts",
                    "4000",
                    "--rft.num_steps",
                    "500",
                ]
            )
        )
        off = [
            "--eval.every",
            "0",
            "--eval.num_tasks",
            "20",
            "--checkpoint.every",
            "0",
        ]
        short = [
            "--train.num_steps",
            str(num_steps),
            "--algorithm.mode",
            "released",
        ]  # the mode that drops no group
        train(
            _config(
                [
                    *QUICKSTART,
                    "--run.dir",
                    f"{folder}/run",
                    "--model.path",
                    f"{folder}/warm/model",
                    *short,
                    *off,
                ]
            )
        )
        lines = [
            json.loads(line)
            for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        ]
    steps = [line for line in lines if line["step"] > 1]  # the first step warms up
    total = sum(line["step_s"] for line in steps)
    stages = [stage for stage in STAGES if stage != "eval"]
    return [
        {
            "stage": stage,
            "threads": torch.get_num_threads(),
            "ms_per_step": 1e3 * seconds / len(steps),
            "share": seconds / total,
        }
        for stage, seconds in [
            (stage, sum(line[f"{stage}_s"] for line in steps)) for stage in (*stages, "other")
        ]
    ]


def _config(argv: Sequence[str]) -> Config:
    config = parse(argv)
    assert config is not None
    return config


if __name__ == "__main__":
    main()
