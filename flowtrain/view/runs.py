"""A folder of runs as a table: how each began, how far it is, what it reached, and in what their
configs differ.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowtrain.metrics.jsonl import json_value
from flowtrain.metrics.pins import flat
from flowtrain.metrics.series import Series, read_series, total_seconds
from flowtrain.types import UserError
from flowtrain.utils.lock import Lock
from flowtrain.view.panels import STAGES, Panel
from flowtrain.view.run import MARKS, Config, is_run, read_config, read_json, signature

_DEPTH = 3
"""Folders below the one that is named in which runs are looked for."""
_INSIDE = ("checkpoints", "weights", "replay", "profile", "tensorboard", "model", "logs")
"""Folders that belong to a run."""
_MOST_RUNS = 500
_MOST_POINTS = 200
_LONGEST = 80
"""Characters of a config's value."""
_CURVES = {"reward_mean": "Reward, training", "eval_reward": "Held-out"}
_UNTOLD = ("run.dir", "dataflow.url", "dataflow.store")
"""Options that differ between any two runs."""


def find_runs(root: Path) -> list[str]:
    """Return the runs within a folder by their paths from there; the newest 500."""
    found = sorted(_walk(root, _DEPTH), key=_began, reverse=True)
    return [path.relative_to(root).as_posix() for path in found[:_MOST_RUNS]]


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    try:
        inside = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except (OSError, ValueError):  # not there, not ours, or no name that a file can have
        return
    for name in inside:
        path = folder / name
        if is_run(path):
            yield path
        if depth > 1 and name not in _INSIDE and not name.startswith("."):
            yield from _walk(path, depth - 1)


def _began(path: Path) -> float:
    return next((file.stat().st_mtime for mark in MARKS if (file := path / mark).exists()), 0.0)


def table_signature(root: Path) -> object:
    """Return what changes with the files of the runs of a folder."""
    return {name: (run_state(root / name), signature(root / name)) for name in find_runs(root)}


def table_data(root: Path) -> dict[str, Any]:
    """Return the table of the runs of a folder as JSON values."""
    rows = {name: _read(root / name) for name in find_runs(root)}
    told = differences({name: config for name, (config, _, _) in rows.items()})
    records = [
        {**_record(root / name, *row), "name": name, "differs": told[name]}
        for name, row in rows.items()
    ]
    found = {
        title: [c for name, row in rows.items() for c in Panel(title, {key: name}).curves(row[2])]
        for key, title in _CURVES.items()
    }
    panels = [
        Panel(title, {}).record(curves, _MOST_POINTS) for title, curves in found.items() if curves
    ]
    return dict(json_value({"name": root.resolve().name, "runs": records, "panels": panels}))


def run_state(run_dir: Path) -> str:
    """Tell whether a run is under way, has ended, or was broken off."""
    if Lock.holder(run_dir) is not None:
        return "running"
    is_complete = (run_dir / "summary.json").exists() or (run_dir / "model" / "rft.json").exists()
    return "ended" if is_complete else "stopped"


def _read(path: Path) -> tuple[Config, Mapping[str, Any], Mapping[str, Series]]:
    """Read config, manifest and metrics of a run, which are empty where it has logged nothing, or
    where a file is damaged, as its own page says.
    """
    config: Config = {}
    manifest: Mapping[str, Any] = {}
    series: Mapping[str, Series] = {}
    with suppress(UserError):
        config, manifest = read_config(path), read_json(path / "manifest.json")
        series = read_series(path)
    return config, manifest, series


def _record(
    path: Path, tables: Config, manifest: Mapping[str, Any], series: Mapping[str, Series]
) -> dict[str, Any]:
    """Return the cells of a run."""
    config, seconds = flat(tables), total_seconds(series)
    is_warm_up = bool(series) and "version" not in series
    _, rewards = series.get("reward_mean", ([], []))
    _, held_out = series.get("eval_reward", ([], []))
    took = sum(seconds.get(stage, 0.0) for stage in (*STAGES, "checkpoint"))
    return {
        "state": run_state(path),
        "began": manifest.get("time"),
        "step": max((steps[-1] for steps, _ in series.values()), default=None),
        "num_steps": config.get("rft.num_steps" if is_warm_up else "train.num_steps"),
        "reward": [rewards[0], rewards[-1], max(rewards)] if rewards else [],
        "held_out": [held_out[0], held_out[-1]] if held_out else [],
        "seconds": round(took, 1) or None,
        "model": config.get("model.path") or "",
        "algorithm": "rft" if is_warm_up else config.get("algorithm.name") or "",
        "has_page": (path / "view.html").is_file(),
    }


def differences(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[tuple[str, str]]]:
    """Return the options in which the runs are not all the same: (key, value) by run. A config that
    does not name an option, as one of another version, makes no difference.
    """
    texts = {
        name: {key: _short(value) for key, value in flat(config).items() if key not in _UNTOLD}
        for name, config in configs.items()
    }
    values = Counter(key for key, _ in {pair for found in texts.values() for pair in found.items()})
    return {
        name: [pair for pair in sorted(found.items()) if values[pair[0]] > 1]
        for name, found in texts.items()
    }


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
