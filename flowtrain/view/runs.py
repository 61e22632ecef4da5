"""A folder of runs as a table: how each began, how far it is, what it reached, and in what their
configs differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowtrain.report.curves import STAGES
from flowtrain.report.jsonl import json_value
from flowtrain.report.pins import flat
from flowtrain.types import UserError
from flowtrain.view.run import is_run, read_config, read_json
from flowtrain.view.series import Metrics
from flowtrain.view.state import run_state
from flowtrain.view.tail import Tail

_EVERY_S = 1.0
_SEARCH_S = 5.0
"""Least times between two looks at the files of the runs, and for new runs."""
_DEPTH = 3
"""Folders below the one that is named in which runs are looked for."""
_INSIDE = ("checkpoints", "weights", "replay", "profile", "tensorboard", "model", "logs")
"""Folders that belong to a run."""
_MOST_RUNS = 500
_MOST_POINTS = 200
_LONGEST = 80
"""Characters of a config's value."""
_STAGE_KEYS = frozenset(f"{stage}_s" for stage in (*STAGES, "checkpoint"))
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
    for name in ("manifest.json", "metrics.jsonl", "trajectories.jsonl"):
        if (path / name).exists():
            return (path / name).stat().st_mtime
    return 0.0


class RunTable:
    """The runs of a folder and what was read of them. Threads may share it."""

    def __init__(self, root: Path) -> None:
        """Read nothing yet; the folder may come later."""
        self.root = root
        self._lock = threading.Lock()
        self._rows: dict[str, _Row] = {}
        self._searched_s = self._read_s = float("-inf")
        self._answer: dict[str, Any] = {}

    def names(self) -> Sequence[str]:
        """The runs that were found, the newest first."""
        with self._lock:
            self._search()
            return list(self._rows)

    def answer(self) -> dict[str, Any]:
        """Return the table as JSON values; "id" changes with what it says."""
        with self._lock:
            self._search()
            if time.monotonic() - self._read_s > _EVERY_S:
                self._answer = self._read()
                self._read_s = time.monotonic()
            return self._answer

    def _search(self) -> None:
        if time.monotonic() - self._searched_s < _SEARCH_S:
            return
        names = find_runs(self.root)
        self._rows = {name: self._rows.get(name) or _Row(self.root, name) for name in names}
        self._searched_s = time.monotonic()

    def _read(self) -> dict[str, Any]:
        for row in self._rows.values():
            row.read()
        told = differences({name: row.config for name, row in self._rows.items()})
        records = [row.record() | {"differs": told[name]} for name, row in self._rows.items()]
        panels = [
            {"title": title, "form": "number", "is_stack": False, "lines": lines}
            for title, key in (("Reward, training", "reward_mean"), ("Held-out", "eval_reward"))
            if (lines := [line for row in self._rows.values() if (line := row.line(key))])
        ]
        table = json_value({"name": self.root.resolve().name, "runs": records, "panels": panels})
        checksum = hashlib.blake2b(json.dumps(table).encode(), digest_size=9).hexdigest()
        return {"id": checksum, **table}


class _Row:
    """One run of the table."""

    def __init__(self, root: Path, name: str) -> None:
        self.name, self.path = name, root / name
        self.config: Mapping[str, Any] = {}
        self._manifest: Mapping[str, Any] = {}
        self._begin()

    def _begin(self) -> None:
        self._tail, self._metrics = Tail(self.path / "metrics.jsonl"), Metrics()
        self._best: float | None = None
        self._sign: object = None

    def read(self) -> None:
        """Take in what has changed."""
        while True:
            news = self._tail.read()
            if news.is_restart:
                self._begin()
                continue
            for line in news.lines:
                self._metrics.add(line.record)
                reward = line.record.get("reward_mean")
                if isinstance(reward, int | float):
                    self._best = reward if self._best is None else max(self._best, reward)
            if not news.has_more:
                break
        sign = [path.stat().st_mtime_ns for path in self._about() if path.exists()]
        if sign != self._sign:
            self._sign = sign
            try:
                self.config, self._manifest = read_config(self.path), read_json(self._about()[1])
            except UserError:
                self.config = {}

    def _about(self) -> tuple[Path, Path]:
        return self.path / "config.toml", self.path / "manifest.json"

    def record(self) -> dict[str, Any]:
        """Return the cells of the row."""
        metrics, totals = self._metrics, self._metrics.totals()
        rewards, held_out = metrics.ends("reward_mean"), metrics.ends("eval_reward")
        is_warm_up = metrics.num_records and not metrics.ends("version")
        config = flat(self.config)
        seconds = sum(value for key, value in totals.items() if key in _STAGE_KEYS)
        return {
            "name": self.name,
            "began": self._manifest.get("time"),
            "state": run_state(self.path).record(),
            "step": metrics.step,
            "num_steps": config.get("rft.num_steps" if is_warm_up else "train.num_steps"),
            "reward": [*rewards, self._best] if rewards else [],
            "held_out": held_out,
            "seconds": round(seconds, 1) or None,
            "model": config.get("model.path") or "",
            "algorithm": "rft" if is_warm_up else config.get("algorithm.name") or "",
            "has_page": (self.path / "view.html").is_file(),
        }

    def line(self, key: str) -> dict[str, Any] | None:
        """Return the curve of a metric; None where it was not logged."""
        points = self._metrics.points(key, _MOST_POINTS)
        is_sparse = key.startswith("eval_")
        return {"label": self.name, "is_sparse": is_sparse, "points": points} if points else None


def differences(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[tuple[str, str]]]:
    """Return the options in which the runs are not all the same: (key, value) by run, the values
    that fewest runs have first. A config that does not name an option, as one of another version,
    makes no difference.
    """
    options = {name: flat(config) for name, config in configs.items()}
    texts = {
        name: {key: _short(value) for key, value in found.items() if key not in _UNTOLD}
        for name, found in options.items()
        if found
    }
    counts = Counter(pair for found in texts.values() for pair in found.items())
    num_values = Counter(key for key, _ in counts)
    return {
        name: sorted(
            (pair for pair in texts.get(name, {}).items() if num_values[pair[0]] > 1),
            key=lambda pair: (counts[pair], pair),
        )
        for name in options
    }


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
