"""Shared parts of the benchmarks: timing rivals in turn, printing rows, keeping them as JSON with
the versions they were measured under.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_BUSY_CYCLES = 4_000_000
"""About 2 ms of a GPU: longer than Python takes to queue what is timed."""


def time_in_turn(
    rivals: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of each run, rivals one after another within a repeat, so that a machine whose speed
    drifts treats all alike.
    """
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


def seconds_of(run: Callable[[], Any]) -> float:
    """Seconds of one run. A GPU is kept busy meanwhile with something else, so that it has all of
    the run queued when it begins: small sizes would else time Python.
    """
    if not torch.cuda.is_available():
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_BUSY_CYCLES)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def runs_here(what: str, run: Callable[[], Any]) -> bool:
    """Whether it runs at all; says what a peer has against a case: no memory, another dtype or
    device than its kernels take, a package that it lacks.
    """
    try:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # foreign code may fail in any way
        reason = str(error).strip().partition("\n")[0]
        print(f"left out: {what}: {type(error).__name__}: {reason}")
        return False
    return True


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


def report(path: str | None, *tables: Sequence[Mapping[str, Any]]) -> None:
    """Print tables, and keep their rows as JSON if there is a path for it."""
    for index, rows in enumerate(tables):
        if index:
            print()
        print_table(rows)
    if path:
        write_json(path, [row for rows in tables for row in rows])


def extra_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Peak memory beyond what was there before, the result included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(
        0
    )  # or memory that was freed, but not given back, would hide what the run takes
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
    before = _status_bytes("VmRSS")
    run()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(key: str) -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{key}:")
    )
    return int(line.split()[1]) * 1024


def write_json(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, and what they were measured under, as one step."""
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine()
    )
    facts = {
        "commit": commit_of_checkout(),
        "date": time.strftime("%Y-%m-%d"),
        **{name: installed_version(name) for name in ("torch", "triton", "transformers")},
        "driver": _driver(),
        "device": device,
        "threads": torch.get_num_threads(),
    }
    write_rows(Path(path), facts, rows)


def write_rows(path: Path, facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows and facts as one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps({"facts": facts, "rows": list(rows)}, indent=1) + "\n")
    new.replace(path)


@functools.cache
def commit_of_checkout() -> str:
    """The commit that runs, with a mark where files differ from it; FLOWTRAIN_COMMIT tells it where
    there is no git.
    """
    if known := os.environ.get("FLOWTRAIN_COMMIT"):
        return known
    command = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    root = Path(__file__).parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().splitlines()[0] if path.exists() else None


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
