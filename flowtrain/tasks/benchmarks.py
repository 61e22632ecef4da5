"""The ten benchmarks of AgentFlow's paper, from the files of its repository."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowtrain.tasks.layouts import Layout, read_task
from flowtrain.tasks.rows import read_rows
from flowtrain.types import Task, UserError

_PLAIN = Layout("query", ("answer",))


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The rows, the layout and the scorer of a benchmark."""

    scorer: str
    num_rows: int | None = None
    """Rows from the start of the file that the paper ran; None: all."""
    layout: Layout = _PLAIN


BENCHMARKS = {
    "bamboogle": Benchmark("qa"),
    "2wiki": Benchmark("qa", 100),
    "hotpotqa": Benchmark("qa", 100),
    "musique": Benchmark("qa", 100),
    "gaia": Benchmark("qa"),
    "aime24": Benchmark("math"),
    "amc23": Benchmark("math"),
    # Any right expression is accepted, so that the answers are the numbers of the puzzle.
    "gameof24": Benchmark("gameof24", 100, Layout("query", ("question",))),
    "gpqa": Benchmark("choice", 100, Layout("query", ("answer",), {"choices": "choices"})),
    "medqa": Benchmark("choice", 100, Layout("query", ("answer",), {"choices": "options"})),
}


def load_benchmark(name: str, folder: str | Path) -> list[Task]:
    """Load all tasks of a benchmark, with ids "medqa-0", "medqa-1" by row.

    The file is `folder`/NAME.json or, as in AgentFlow's test folder, `folder`/NAME/data/data.json.
    Raises UserError for an unknown name, a missing file and a mistake in it.
    """
    if name not in BENCHMARKS:
        raise UserError(f"benchmark {name!r} is unknown; known: {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    path = benchmark_file(name, folder)
    tasks = [
        replace(
            read_task(row, benchmark.layout, where, f"{name}-{number - 1}"),
            kind=name,
            scorer=benchmark.scorer,
        )
        for number, where, row in read_rows(path)
    ]
    if not tasks:
        raise UserError(f"{path}: holds no tasks; at least one is needed")
    return tasks


def available(folder: str | Path) -> list[str]:
    """Return the benchmarks whose files are in a folder, in the order of the paper's tables."""
    return [
        name for name in BENCHMARKS if any(path.is_file() for path in _paths(name, Path(folder)))
    ]


def benchmark_file(name: str, folder: str | Path) -> Path:
    """Find the file of a benchmark; raises UserError, which says where to get it, without one."""
    paths = _paths(name, Path(folder))
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        raise UserError(
            f"benchmark {name!r}: there is neither {paths[0]} nor {paths[1]}; copy "
            f"test/{name}/data/data.json of https://github.com/lupantech/AgentFlow to {paths[0]}"
        )
    return found


def _paths(name: str, folder: Path) -> Sequence[Path]:
    return folder / f"{name}.json", folder / name / "data" / "data.json"
