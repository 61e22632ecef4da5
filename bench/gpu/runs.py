"""Stages of whole programs: runs of `flowtrain.train`, and a load of weights."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu.cases import Cases, Needs, Row

QUICKSTART = ("--config", "quickstart", "--log.tensorboard", "false")
SHORT = ("--eval.num_tasks", "10", "--eval.at_ends", "false")
TINY = ("--agent.max_turns", "1", "--rollout.max_new_tokens", "16")
HALF = ("--tiny.hidden_size", "1280", "--tiny.num_layers", "24", "--tiny.num_heads", "20")
"""A random model of half a billion parameters."""
SPARSE = ("--model.dtype", "bfloat16", "--train.lr", "1e-6")
"""A step changes few words, as one of a large model does, so that engines load deltas."""
ANY_REWARD = ("--reward.function", "bench.gpu.runs:any_reward")
"""Random models answer nothing, and what has one reward is not trained."""
PROGRAM = ("-m", "flowtrain.train")
_PACKAGES = ("transformers", "peft", "pydantic", "bm25s", "httpx2", "msgspec", "tomli_w")
_KEPT = (
    "step", "step_s", "reward_mean", "num_tokens", "tokens_per_s", "mfu", "logprob_mismatch",
    "collect_s", "train_s", "publish_s", "load_s", "weights_density", "weights_loaded_bytes",
    "weights_loaded_by_delta", "weights_damaged",
)  # fmt: skip


def quickstart(cases: Cases) -> None:
    """The planner of the quickstart on the torch engine, until its time is up."""
    size = ("2", "--eval.num_tasks", "10") if cases.is_small else ("50", "--eval.num_tasks", "100")
    options = (*QUICKSTART, "--model.path", "quickstart", "--train.num_steps", *size)
    cases.run("quickstart", partial(train, cases, "quickstart", *options), limit_s=600)


def resume(cases: Cases) -> None:
    """A random model: two steps, a checkpoint, and a third step of a run that goes on from it; all
    weights that an engine loads are compared with their digests.
    """
    size = TINY if cases.is_small else HALF
    options = (*QUICKSTART, *SHORT, *ANY_REWARD, *size, *SPARSE, "--weights.verify_every", "1")

    def both() -> list[Row]:
        rows = train(cases, "resume", *options, "--train.num_steps", "2")
        again = ("--run.resume", "auto", "--train.num_steps", "3")
        if not any("error" in row or row.get("is_cut") for row in rows):
            rows = train(cases, "resume", *options, *again, is_new=False)
        if [row["step"] for row in rows if row.get("step")] != [1, 2, 3]:
            why = "its time was up" if rows[-1].get("is_cut") else "it did not go on"
            rows.append({"error": f"{why} before step 3"})
        return rows

    cases.run("two steps and one", both, limit_s=600)


def load(cases: Cases) -> None:
    """New weights through a GPU's path, without vLLM: the pause by changed words."""
    for density in (0.01,) if cases.is_small else (0.01, 0.003):

        def measure(density: float = density) -> Sequence[Row]:
            from bench import loads

            shape, repeats = ("tiny", 1) if cases.is_small else ("1.5b", 3)
            return loads.measure(shape, density, repeats, cases.device)

        cases.run(f"{density:.1%} of the words", measure)


def train(cases: Cases, name: str, *options: str, is_new: bool = True) -> list[Row]:
    """The log of a run of `flowtrain.train`: what each step took, and the evaluations. A run that
    the case's end cuts off counts with the steps that it has made.

    Args:
        name: of the run's folder; what an earlier try has left there goes, if the run `is_new`.
    """
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise Needs(package)
    folder = cases.folder / name
    if is_new:
        shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, *PROGRAM, *options, "--run.dir", str(folder)]
    try:
        code, is_cut = subprocess.run(command, timeout=cases.left_s).returncode, False
    except subprocess.TimeoutExpired:
        code, is_cut = 0, True
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [_row(json.loads(line)) for line in lines if line.endswith("}")]
    if is_cut:
        rows.append({"is_cut": True, "seconds": cases.limit_s})
    elif code:
        rows.append({"error": f"flowtrain.train ended with status {code}, see the log"})
    elif not any(row.get("weights_loaded_bytes") for row in rows):
        rows.append({"error": "no engine has loaded new weights"})
    return rows


def any_reward(_task: object, _answer: str, trajectory: Any) -> float:
    """A reward that has nothing to do with the answer, and differs within a group."""
    return float(trajectory.seed % 2)


def _row(line: dict[str, Any]) -> Row:
    return {key: x for key, x in line.items() if key in _KEPT or key.startswith("eval")}


def program_rows(path: Path, *arguments: str) -> list[Row]:
    """The rows of a benchmark that writes them to a file."""
    subprocess.run([sys.executable, *arguments, "--json", str(path)], check=True)
    rows: list[Row] = json.loads(path.read_text())["rows"]
    return rows
