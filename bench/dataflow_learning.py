"""Does training through the dataflow learn as much from a sampled token as the synchronous loop
does? The quickstart, with several seeds.

Every seed starts from the same warm model in both loops. Through the dataflow it is service,
trainer and one node that run at the same time, each with one thread. Tokens of groups that were
dropped count as sampled. Compared as in `bench.learning`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import learning
from bench.dataflow_service import service
from flowtrain.dataflow.client import Client

CONFIG = ["--config", "configs/quickstart.toml"]
_LEVEL = 0.8
"""Held-out reward whose tokens are counted."""
ARMS: dict[str, list[str]] = {"synchronous": [], "dataflow": ["--dataflow.max_staleness", "2"]}


def rows(
    warm: Sequence[str], num_seeds: int, folder: Path, options: Sequence[str]
) -> list[dict[str, Any]]:
    """One per arm; seed i starts from warm model i modulo their number. Runs that are there already
    are taken as they are.
    """
    curves: dict[str, list[learning.Curve]] = {arm: [] for arm in ARMS}
    for seed, arm in tqdm([(seed, arm) for seed in range(num_seeds) for arm in ARMS], desc="runs"):
        place = folder / arm.replace(", ", "-").replace(" ", "_") / str(seed)
        run = _synchronous if arm == "synchronous" else _through_dataflow
        run(place, [*ARMS[arm], *options], seed, warm[seed % len(warm)])
        tokens, rewards = learning.curve(place)
        factor = sampled_per_trained(place)
        curves[arm].append(([factor * number for number in tokens], rewards))
    budget = min(tokens[-1] for runs in curves.values() for tokens, _ in runs)
    grid = learning.coarsest([run for runs in curves.values() for run in runs], budget)
    return [
        learning.row(arm, runs, curves["synchronous"], grid, _LEVEL) for arm, runs in curves.items()
    ]


def _synchronous(folder: Path, options: Sequence[str], seed: int, model: str) -> None:
    learning.run(folder, options, seed, model)


def _through_dataflow(folder: Path, options: Sequence[str], seed: int, model: str) -> None:
    """Leaves beside the run's folder that of the service, with the ledger's last report."""
    if (folder / "summary.json").exists():
        return
    beside = _beside(folder)
    beside.mkdir(parents=True, exist_ok=True)
    common = [
        *CONFIG,
        *options,
        "--run.seed",
        str(seed),
        "--model.path",
        model,
        "--run.threads",
        "1",
    ]
    with service(str(beside / "ledger.db"), common) as (url, token):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLOWTRAIN_TOKEN": token}
        node = [sys.executable, "-m", "flowtrain.node", "--dataflow", url, "--name", "node"]
        trainer = [
            sys.executable,
            "-m",
            "flowtrain.train",
            *common,
            *learning.SHORT,
            "--run.dir",
            str(folder),
            "--dataflow.url",
            url,
        ]
        with (
            (beside / "node.log").open("w") as log,
            subprocess.Popen(node, env=environment, stdout=log, stderr=log) as working,
        ):
            done = subprocess.run(
                [*trainer, "--run.resume", "auto"], env=environment, capture_output=True, text=True
            )
            if done.returncode:
                working.terminate()
                raise SystemExit(f"{folder}: {done.stderr[-2000:]}")
            with Client(url, token, wait_s=60.0) as client:
                (beside / "status.json").write_text(json.dumps(client.status()))
            working.terminate()


def _beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-service")


def sampled_per_trained(folder: Path) -> float:
    """Tokens of all groups that came in, as a multiple of those that were trained."""
    path = _beside(folder) / "status.json"
    return of_trained(json.loads(path.read_text()), "planner") if path.exists() else 1.0


def of_trained(status: Mapping[str, Any], policy: str) -> float:
    """Tokens of a policy in all groups that came in, as a multiple of those that it trained."""
    groups = status["policies"][policy]["groups"]
    tokens = {state: each["num"] * each["tokens_mean"] for state, each in groups.items()}
    return float(sum(tokens.values()) / tokens["assigned"])
