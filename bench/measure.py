"""Shared parts of the benchmarks: timing rivals in turn, printing rows as they come, keeping them
as JSON with the command, the versions and the machine they were measured under.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch

Name = TypeVar("Name")
Row = Mapping[str, Any]
_BUSY_CYCLES = 4_000_000
"""About 2 ms of a GPU: longer than Python takes to queue what is timed."""
_LOAD = os.getloadavg()[0]
"""Of the machine in the minute before the bench began."""
_WIDTH, _SPARE = 9, 8
"""Of a column at least, and for names that are longer than that of the first row."""


def new_parser(doc: str | None, **full: object) -> argparse.ArgumentParser:
    """Make a parser that prints the docstring of a bench and the default of each option.

    Options have defaults that take about two minutes on two cores; `full` are those of the figures
    that the docs quote, for `--full`.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=_Help)
    parser.add_argument("--json", metavar="F", help="keep the rows in this file")
    if full:
        words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in full.items())
        text = f"the sizes that the docs quote: {words}"
        parser.add_argument("--full", action=_Full, nargs=0, const=full, help=text)
    return parser


class _Full(argparse.Action):
    """Sets all that it holds; what follows on the command line may set it anew."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option: object = None
    ) -> None:
        vars(namespace).update(self.const)


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Leave lines as they are, and add defaults."""


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


def seconds_in_turn(
    runs: Mapping[Name, Callable[[], Any]], repeats: int, warmup: int = 2
) -> dict[Name, list[float]]:
    """Seconds of each run by `seconds_of`, in turn and in an order that rotates."""
    names = list(runs)
    seconds: dict[Name, list[float]] = {name: [] for name in names}
    for repeat in range(-warmup, repeats):
        for index in range(len(names)):
            name = names[(index + repeat) % len(names)]
            taken = seconds_of(runs[name])
            if repeat >= 0:
                seconds[name].append(taken)
    return seconds


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


class Table:
    """Rows that are printed as they come and kept as JSON, so that a bench that is stopped leaves
    what it has measured.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        """`path`: where rows are kept; None: nowhere."""
        self.path = path
        self.rows: list[Row] = []
        self._columns: dict[str, int] = {}

    def add(self, row: Row) -> None:
        """Print a row, below a new header where its columns are others than before."""
        cells = {name: _cell(value) for name, value in row.items()}
        if self._columns.keys() != cells.keys():
            self._columns = {
                name: max(_WIDTH, len(name), len(cell) + _SPARE * isinstance(row[name], str))
                for name, cell in cells.items()
            }
            if self.rows:
                print()
            self._print({name: name for name in cells})
            self._print({name: "-" * width for name, width in self._columns.items()})
        self._print(cells)
        self.rows.append(row)
        if self.path:
            write_json(self.path, self.rows)

    def _print(self, cells: Mapping[str, str]) -> None:
        text = (cell.rjust(self._columns[name]) for name, cell in cells.items())
        print("  ".join(text), flush=True)


def report(path: str | None, *tables: Iterable[Row]) -> None:
    """Print the rows of tables as they are measured, and keep them if there is a path."""
    table = Table(path)
    for row in chain(*tables):
        table.add(row)


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


def write_json(path: str | Path, rows: Sequence[Row]) -> None:
    """Write rows, and what they were measured under, as one step."""
    facts = {
        "commit": commit_of_checkout(),
        "date": time.strftime("%Y-%m-%d"),
        "command": _command(),
        **{name: installed_version(name) for name in ("torch", "triton", "transformers")},
        "driver": _driver(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu(),
        "threads": torch.get_num_threads(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load": _LOAD,
    }
    write_rows(Path(path), facts, rows)


def write_rows(path: Path, facts: Mapping[str, Any], rows: Sequence[Row]) -> None:
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


@functools.cache
def _cpu() -> str:
    """The model of the CPU, as Linux names it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.machine()


def _command() -> str:
    """The command line that runs, as one would type it."""
    spec = sys.modules["__main__"].__spec__
    module = ["-m", spec.name.removesuffix(".__main__")] if spec else [Path(sys.argv[0]).name]
    return shlex.join(["python", *module, *sys.argv[1:]])


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
