"""Facts about a run as a whole, from its folder."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowtrain.records import UserError

_MARKS = ("manifest.json", "metrics.jsonl", "trajectories.jsonl")
_FACTS = {
    "Model": ("model.path",),
    "Algorithm": ("algorithm.name", "algorithm.mode", "algorithm.loss"),
    "Questions per step": ("rollout.num_questions",),
    "Rollouts per question": ("rollout.group_size",),
    "Optimizer steps per batch": ("train.num_minibatches",),
    "Learning rate": ("train.lr",),
    "KL coefficient": ("algorithm.kl_coef",),
    "Temperature": ("rollout.temperature",),
    "Turns at most": ("agent.max_turns",),
    "Engine": ("rollout.engine", "model.dtype"),
    "Tasks": ("tasks.name", "tasks.path"),
    "Seed": ("seed",),
    "Ranks": ("world_size",),
    "Began": ("time",),
    "flowtrain": ("flowtrain", "git_commit"),
    "Uncommitted changes": ("git_dirty",),
}
"""Label to keys of the config and of the manifest."""

Config = Mapping[str, Mapping[str, Any]]
"""config.toml as it was read: of any version, so the models of `flowtrain.config` may not fit it.
"""


def check_run_dir(run_dir: Path) -> None:
    """Raise UserError unless something of a run is there."""
    if not run_dir.exists():
        raise UserError(f"there is no folder {run_dir}")
    if not any((run_dir / mark).is_file() for mark in _MARKS):
        raise UserError(
            f"{run_dir} is not a run folder: it has none of {', '.join(_MARKS)}; give the folder "
            "of --run.dir"
        )


def read_text(path: Path) -> str:
    """Read a text file; "" where there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def read_config(run_dir: Path) -> Config:
    path = run_dir / "config.toml"
    try:
        return tomllib.loads(read_text(path))
    except ValueError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in the file; {} where there is none."""
    try:
        value = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def facts(config: Config, manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List (label, text) of what a person asks first; what the folder does not tell is left out."""
    values = {
        **{
            f"{name}.{key}": value for name, table in config.items() for key, value in table.items()
        },
        **manifest,
    }
    texts = {
        label: " · ".join(
            _readable(key, values[key]) for key in keys if values.get(key) not in (None, "")
        )
        for label, keys in _FACTS.items()
    }
    return [(label, text) for label, text in texts.items() if text]


def _readable(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "time":
        return f"{str(value)[:16].replace('T', ' ')} UTC"
    return str(value)[:10] if key == "git_commit" else str(value)


def results(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the held-out results before and after training; {} for those not there yet."""
    before, summary = read_json(run_dir / "warm.json"), read_json(run_dir / "summary.json")
    return summary.get("warm") or before, summary.get("trained") or {}
