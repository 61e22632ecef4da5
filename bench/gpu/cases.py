"""The cases of a stage of `bench.gpu`: each fails alone, and is kept as soon as it is done.

Before a case begins it stands in the file as one that did not end. So what ends the process itself,
a fault of the device, a hang, the machine's last memory, costs that case alone: the stage is begun
again and goes on behind it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.measure import write_json

Row = dict[str, Any]
_LIMIT_S = 120
"""Of a case that has no limit of its own."""
_MARGIN_S = 3
"""A case ends this long before its stage does, so that its rows are kept."""
AGAIN, LATE = 75, 76
"""Exit statuses of a stage: its device is lost to this process, so begin it again; its time is up
before its cases are."""
_OURS = ("bench", "flowkernels", "flowtrain", "tests")
_COMPILED = "flowtrain._delta"


class Cases:
    """The file of a stage's rows, each with the name of its case."""

    def __init__(self, path: Path, is_small: bool, seconds: float = 600.0) -> None:
        """`seconds`: of the stage, from now on."""
        self._path, self.is_small = path, is_small
        self._ends = self._case_ends = time.monotonic() + seconds - _MARGIN_S
        self.limit_s = int(seconds)
        """Of the case that runs."""
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.rows = read_rows(path)

    @property
    def folder(self) -> Path:
        """Where a case may leave files; it goes into the stage's archive."""
        return self._path.with_suffix("")

    @property
    def left_s(self) -> float:
        """Seconds until a program that the case runs must end, for its rows to count."""
        return max(1.0, self._case_ends - time.monotonic() - _MARGIN_S)

    def run(self, name: str, measure: Callable[[], Row | Sequence[Row]], limit_s: int = 0) -> None:
        """Measure a case that the file does not have yet, within its limit and the stage's."""
        if any(row["case"] == name for row in self.rows):
            return
        limit_s = self.limit_s = min(limit_s or _LIMIT_S, int(self._ends - time.monotonic()))
        if limit_s < 1:
            sys.exit(LATE)
        self._case_ends = time.monotonic() + limit_s
        before = self.rows
        self._keep([*before, {"case": name, "error": f"did not end within {limit_s} s, or died"}])
        signal.alarm(limit_s)  # ends the process, even one that hangs in the driver
        try:
            found = measure()
            rows = [found] if isinstance(found, dict) else list(found)
            rows = rows or [{"error": "it measured nothing"}]
        except Exception as error:  # noqa: BLE001  # a case may fail in any way, and others go on
            rows = [_failure(error)]
        signal.alarm(0)
        self._keep([*before, *({"case": name, **row} for row in rows)])
        print(name, *rows, sep="\n  ", flush=True)
        self._free()

    def _keep(self, rows: list[Row]) -> None:
        self.rows = rows
        write_json(self._path, rows)

    def _free(self) -> None:
        gc.collect()
        if self.device == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:  # every later call would fail, too
                print(f"the device is lost to this process: {error}", flush=True)
                os._exit(AGAIN)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def read_rows(path: Path) -> list[Row]:
    """The rows of a stage, or none."""
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def keep_good_rows(path: Path) -> None:
    """Take failed cases, and those that lacked a package, out of the file: they are tried anew."""
    rows = read_rows(path)
    bad = {row["case"] for row in rows if row.keys() & {"error", "needs"}}
    good = [row for row in rows if row["case"] not in bad]
    if len(good) < len(rows):
        write_json(path, good)


class Needs(Exception):
    """The case lacks a package, or a device."""


def _failure(error: Exception) -> Row:
    if isinstance(error, Needs):
        return {"needs": str(error)}
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name and (name == _COMPILED or name.partition(".")[0] not in _OURS):
        return {"needs": name}
    text = str(error).strip().partition("\n")[0]
    if text == "Numpy is not available":  # torch finds out where it needs it
        return {"needs": "numpy"}
    return {"error": f"{type(error).__name__}: {text}"[:300]}
