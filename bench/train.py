"""Split the wall time of a step of `flowtrain.train` by stage:  python -m bench.train [--json F]

The planner that comes with flowtrain, so that its turns are real, takes some of the quickstart's.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from bench.measure import new_parser, report
from flowtrain.config.options import parse
from flowtrain.train import train
from flowtrain.utils.step_timer import STAGES


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="to take apart")
    parser.add_argument("--model", default="quickstart", help="the planner that takes them")
    args = parser.parse_args()
    report(args.json, stage_rows(args.model, args.steps))


def stage_rows(model: str, num_steps: int) -> list[dict[str, Any]]:
    """Shares of a step's wall time, from the log of a short run."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "config": "configs/quickstart.toml",
            "run.dir": f"{folder}/run",
            "model.path": model,
            "train.num_steps": num_steps,
            "algorithm.equal_groups": "keep",
            "eval.every": 0,
            "eval.num_tasks": 20,
            "checkpoint.every": 0,
        }
        config = parse(
            [word for key, value in options.items() for word in (f"--{key}", str(value))]
        )
        assert config is not None
        train(config)
        text = Path(folder, "run", "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [line for line in lines if line["step"] > 1]  # the first step warms up
    total = sum(line["step_s"] for line in steps)
    stages = [*(stage for stage in STAGES if stage != "eval"), "other"]
    seconds = {stage: sum(line[f"{stage}_s"] for line in steps) for stage in stages}
    return [
        {"stage": stage, "ms_per_step": 1e3 * spent / len(steps), "share": spent / total}
        for stage, spent in seconds.items()
    ]


if __name__ == "__main__":
    main()
