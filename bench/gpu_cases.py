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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.measure import write_json

Row = dict[str, Any]
AGAIN = 75
"""The exit status of a stage whose device is lost to this process: begin it again."""
_OURS = ("bench", "flowkernels", "flowtrain", "tests")
_COMPILED = "flowtrain._delta"


class Cases:
    """The file of a stage's rows, each with the name of its case."""

    def __init__(self, path: Path, is_small: bool, limit_s: int = 120) -> None:
        self._path, self.is_small, self._limit_s = path, is_small, limit_s
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.rows = read_rows(path)

    @property
    def folder(self) -> Path:
        """Where a case may leave files; it goes into the stage's archive."""
        return self._path.with_suffix("")

    def run(self, name: str, measure: Callable[[], Row | Sequence[Row]], limit_s: int = 0) -> None:
        """Measure a case that the file does not have yet, within its limit."""
        if any(row["case"] == name for row in self.rows):
            return
        limit_s = limit_s or self._limit_s
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
    good = [row for row in rows if not (row.keys() & {"error", "needs"})]
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
