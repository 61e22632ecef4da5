"""Choose the rows of each benchmark that an evaluation asks, and hash the files they come from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowtrain.tasks.benchmarks import benchmark_file, load_benchmark
from flowtrain.types import Task


@dataclass(frozen=True, slots=True)
class Asked:
    """A benchmark and its questions."""

    name: str
    tasks: tuple[Task, ...]
    """The chosen questions; their ids are unique among all benchmarks."""
    pins: Mapping[str, Any]
    """Hash of the file, rows in it, rows that are asked."""


def load(name: str, folder: Path, rows: int | str) -> Asked:
    """Load benchmarks; `rows` is the number of first rows, "all", or "" for as many as the paper
    ran. Raises UserError for a benchmark that is unknown or not on disk.
    """
    every = load_benchmark(name, folder, whole=True)
    asked = (
        load_benchmark(name, folder)
        if rows == ""
        else every
        if rows == "all"
        else every[: int(rows)]
    )
    digest = hashlib.sha256(benchmark_file(name, folder).read_bytes()).hexdigest()
    return Asked(
        name, tuple(asked), {"sha256": digest, "rows_in_file": len(every), "rows": len(asked)}
    )
