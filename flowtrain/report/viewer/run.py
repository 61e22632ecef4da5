"""Facts about a run as a whole, from its folder."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowtrain.report.curves import Series
from flowtrain.report.tables import comparison_rows
from flowtrain.types import UserError

STAGES = ("collect", "train", "publish", "load", "eval", "other", "checkpoint")
_MARKS = ("manifest.json", "metrics.jsonl", "trajectories.jsonl")

Config = Mapping[str, Mapping[str, Any]]
"""config.toml as it was read: of any version, so the models of `flowtrain.config` may not fit it.
"""


def check_run_dir(run_dir: Path) -> None:
    """UserError unless something of a run is there."""
    if not any((run_dir / mark).is_file() for mark in _MARKS):
        inside = sorted({path.parent for mark in _MARKS for path in run_dir.glob(f"*/{mark}")})
        cure = f"did you mean {inside[-1]}?" if inside else "name the folder that --run.dir named"
        raise UserError(f"{run_dir} is no run: it has none of {', '.join(_MARKS)}; {cure}")


def read_text(path: Path) -> str:
    """Read a text file; "" where there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def read_config(run_dir: Path) -> Config:
    path = run_dir / "config.toml"
    try:
        return tomllib.loads(read_text(path))
    except ValueError as error:
        raise UserError(f"{path} is no TOML: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; {} where there is none."""
    try:
        value = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def facts(config: Config, manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, text) of what a person asks first; what the folder does not tell is left out."""

    def option(section: str, key: str) -> Any:
        return config.get(section, {}).get(key)

    commit = (manifest.get("git_commit") or "")[:10] + (
        " with changes" if manifest.get("git_dirty") else ""
    )
    pairs = [
        ("Model", option("model", "path")),
        (
            "Algorithm",
            _joined(
                option("algorithm", "name"),
                option("algorithm", "mode"),
                option("algorithm", "loss"),
            ),
        ),
        (
            "Batch",
            _times(
                option("rollout", "num_questions"),
                "questions",
                option("rollout", "group_size"),
                "rollouts",
            ),
        ),
        ("Optimizer steps per batch", option("train", "num_minibatches")),
        ("Learning rate", option("train", "lr")),
        ("KL coefficient", option("algorithm", "kl_coef")),
        ("Temperature", option("rollout", "temperature")),
        ("Turns at most", option("agent", "max_turns")),
        ("Engine", _joined(option("rollout", "engine"), option("model", "dtype"))),
        ("Tasks", _joined(option("tasks", "name"), option("tasks", "path"))),
        ("Seed", manifest.get("seed")),
        ("Ranks", manifest.get("world_size")),
        ("Began", (manifest.get("time") or "")[:16].replace("T", " ")),
        ("flowtrain", _joined(manifest.get("flowtrain"), commit)),
    ]
    return [(label, str(value)) for label, value in pairs if value not in (None, "")]


def seconds_by_stage(series: Mapping[str, Series]) -> dict[str, float]:
    """Over all logged steps."""
    totals = {stage: sum(series[f"{stage}_s"][1]) for stage in STAGES if f"{stage}_s" in series}
    return {stage: total for stage, total in totals.items() if total > 0}


def result_rows(run_dir: Path) -> list[tuple[str, str, str, str]]:
    """The held-out results before and after training; those before alone while it goes on."""
    warm, summary = read_json(run_dir / "warm.json"), read_json(run_dir / "summary.json")
    warm, trained = summary.get("warm") or warm, summary.get("trained") or {}
    return comparison_rows(warm, trained) if warm or trained else []


def _joined(*parts: Any) -> str:
    return " · ".join(str(part) for part in parts if part not in (None, ""))


def _times(a: Any, what_a: str, b: Any, what_b: str) -> str:
    return "" if a is None or b is None else f"{a} {what_a} x {b} {what_b}"
