"""What benchmarks share: timing rivals in turn, printing rows, keeping them as JSON with the versions they were measured under."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def time_in_turn(rivals: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of each run, rivals one after another within a repeat, so that a machine whose speed drifts treats all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for repeat in range(-warmup, repeats):
        for name, run in rivals.items():
            started = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def median_ratio(slower: Sequence[float], faster: Sequence[float]) -> float:
    """Median over repeats of slower / faster, pair by pair."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Columns as wide as their widest cell, numbers to four digits."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name, "")) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    for line in [names, ["-" * width for width in widths], *cells]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def write_json(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    facts = {**{name: _version(name) for name in ("torch", "triton", "transformers")}, "driver": _driver(), "device": device, "threads": torch.get_num_threads()}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"facts": facts, "rows": list(rows)}, indent=1) + "\n")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().splitlines()[0] if path.exists() else None


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
