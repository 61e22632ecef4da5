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
    """How a benchmark's file is read and scored."""

    scorer: str
    num_rows: int | None = None
    """The paper ran so many from the start of the file; None: all."""
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
    "gpqa": Benchmark("choice", 100, Layout("query", ("answer",), choices="choices")),
    "medqa": Benchmark("choice", 100, Layout("query", ("answer",), choices="options")),
}


def load_benchmark(name: str, folder: str | Path, *, whole: bool = False) -> list[Task]:
    """The tasks that the paper ran (`whole`: all in the file), with ids "medqa-0", "medqa-1" by
    their place in the file.

    The file is `folder`/NAME.json or, as in AgentFlow's test folder, `folder`/NAME/data/data.json.
    UserError for a name that is unknown, a file that is not there, and what is wrong in it.
    """
    if name not in BENCHMARKS:
        raise UserError(f"benchmark {name!r} is unknown; known: {', '.join(BENCHMARKS)}")
    benchmark, path = BENCHMARKS[name], benchmark_file(name, folder)
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
    return tasks if whole else tasks[: benchmark.num_rows]


def available(folder: str | Path) -> list[str]:
    """The benchmarks whose files are in a folder, in the order of the paper's tables."""
    return [
        name for name in BENCHMARKS if any(path.is_file() for path in _places(name, Path(folder)))
    ]


def benchmark_file(name: str, folder: str | Path) -> Path:
    """Where the benchmark lies; UserError, which says where to get it, when it is not there."""
    places = _places(name, Path(folder))
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise UserError(
            f"benchmark {name!r}: there is neither {places[0]} nor {places[1]}; copy "
            f"test/{name}/data/data.json of "
            f"https://github.com/lupantech/AgentFlow to {places[0]}"
        )
    return found


def _places(name: str, folder: Path) -> Sequence[Path]:
    return folder / f"{name}.json", folder / name / "data" / "data.json"
