"""Benchmarks: the ten of AgentFlow's paper, those that InfoFlow's has besides, and files of the
user's own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from flowtrain import config as cfg
from flowtrain.records import Task, UserError
from flowtrain.tasks import published
from flowtrain.tasks.files import load_source
from flowtrain.tasks.layouts import PRESETS, Layout, read_task, rules_of
from flowtrain.tasks.rows import SUFFIXES, read_rows

_PLAIN = Layout("query", ("answer",))
_GOLDEN = "golden_answers"
"""The column of FlashRAG's files, which Search-R1 and those after it evaluate on."""
_SCORERS = tuple(filter(None, get_args(cfg.Tasks.model_fields["scorer"].annotation)))
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_AGENTFLOW = "https://github.com/lupantech/AgentFlow"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The rows, the layout and the scorer of a benchmark."""

    scorer: str
    num_rows: int | None = None
    """Rows from the start of the file that the paper ran; None: all."""
    layout: Layout = _PLAIN
    origin: str = ""
    """Where its file comes from; "": from AgentFlow's test folder."""


_TEN = {
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
AGENTFLOW = tuple(_TEN)
"""The benchmarks of AgentFlow's paper, in the order of its tables."""
BENCHMARKS = _TEN | {
    "nq": Benchmark(
        "qa",
        layout=Layout("question", ("answer", _GOLDEN)),
        origin="NQ-open.dev.jsonl of https://github.com/google-research-datasets/natural-questions",
    ),
    "triviaqa": Benchmark(
        "qa",
        layout=replace(PRESETS["triviaqa"], answers=(published.ALIASES, _GOLDEN)),
        origin="rc.nocontext/validation of https://huggingface.co/datasets/mandarjoshi/trivia_qa",
    ),
    "popqa": Benchmark(
        "qa",
        layout=replace(PRESETS["popqa"], answers=(published.POSSIBLE, _GOLDEN)),
        origin="test.tsv of https://huggingface.co/datasets/akariasai/PopQA",
    ),
    "browsecomp-plus": Benchmark(
        "qa",
        layout=PRESETS["browsecomp-plus"],
        origin="browsecomp_plus_decrypted.jsonl, which the script of "
        "https://github.com/texttron/BrowseComp-Plus writes",
    ),
}


@dataclass(frozen=True, slots=True)
class BenchmarkFile:
    """A benchmark as a user names it: nq, nq=FILE for its file elsewhere, or mine=FILE:SCORER."""

    name: str
    path: str = ""
    """A file instead of the one in the folder of benchmarks."""
    scorer: str = ""
    """The rule for rows of an own file that name none; "": that of the file's layout."""

    @classmethod
    def parse(cls, text: str) -> BenchmarkFile:
        """Read NAME, NAME=FILE or NAME=FILE:SCORER.

        Raises UserError for what is none of these, an unknown name without a file, and a scorer of
        a benchmark that has its own.
        """
        name, has_path, path = (part.strip() for part in text.partition("="))
        if not has_path:
            _known(name)
            return cls(name)
        head, _, scorer = path.rpartition(":")
        path, scorer = (head, scorer) if scorer in _SCORERS else (path, "")
        if not _NAME.fullmatch(name) or not path:
            raise UserError(
                f"benchmark {text!r} must be NAME, NAME=FILE or NAME=FILE:SCORER, with a name of "
                "up to 40 letters, digits, '.', '_' and '-'"
            )
        if scorer and name in BENCHMARKS:
            raise UserError(
                f"benchmark {text!r}: {name} is scored by {BENCHMARKS[name].scorer!r}; choose "
                "another name for a file with another scorer"
            )
        return cls(name, path, scorer)

    @property
    def num_rows(self) -> int | None:
        """Return how many rows the paper ran; None: all."""
        return BENCHMARKS[self.name].num_rows if self.name in BENCHMARKS else None

    def file(self, folder: str | Path) -> Path:
        """Find its file; raises UserError, which says where to get it, without one."""
        if not self.path:
            return benchmark_file(self.name, folder)
        if not Path(self.path).is_file():
            ends = f"; after a ':' a scorer may follow, one of {', '.join(_SCORERS)}"
            raise UserError(
                f"benchmark {self.name}={self.path!r}: there is no such file"
                f"{ends if ':' in self.path else ''}"
            )
        return Path(self.path)

    def load(self, folder: str | Path) -> list[Task]:
        """Load all its tasks, with ids "medqa-0" by row, or "mine-ID" by the ids of an own file.

        Raises UserError for a missing file and a mistake in it.
        """
        path = self.file(folder)
        if self.name in BENCHMARKS:
            return _read(self.name, path)
        return [
            replace(task, id=f"{self.name}-{task.id}", kind=task.kind or self.name)
            for task in load_source(path, scorer=self.scorer).tasks
        ]


def parse_benchmarks(texts: Sequence[str]) -> tuple[BenchmarkFile, ...]:
    """Read several; raises UserError as `BenchmarkFile.parse` does, and for a name given twice."""
    benchmarks: dict[str, BenchmarkFile] = {}
    for benchmark in map(BenchmarkFile.parse, texts):
        if benchmarks.setdefault(benchmark.name, benchmark) != benchmark:
            raise UserError(f"benchmark {benchmark.name!r} is named twice, with different files")
    return tuple(benchmarks.values())


def load_benchmark(name: str, folder: str | Path) -> list[Task]:
    """Load all tasks of a benchmark, with ids "medqa-0", "medqa-1" by row.

    The file is `folder`/NAME.json, or with another suffix of `SUFFIXES`, or, as in AgentFlow's test
    folder, `folder`/NAME/data/data.json. Raises UserError for an unknown name, a missing file and a
    mistake in it.
    """
    return BenchmarkFile.parse(name).load(folder)


def available(folder: str | Path) -> list[str]:
    """Return the benchmarks whose files are in a folder, in the order of `BENCHMARKS`."""
    return [
        name for name in BENCHMARKS if any(path.is_file() for path in _paths(name, Path(folder)))
    ]


def benchmark_file(name: str, folder: str | Path) -> Path:
    """Find the file of a benchmark; raises UserError, which says where to get it, without one, and
    where there are several.
    """
    paths = _paths(name, Path(folder))
    files = [path for path in paths if path.is_file()]
    if not files:
        origin = _known(name).origin or f"test/{name}/data/data.json of {_AGENTFLOW}"
        raise UserError(
            f"benchmark {name!r}: there is neither {paths[0]} nor {paths[-1]}; copy {origin} to "
            f"{_target(name, Path(folder))}"
        )
    if len(files) > 1:
        raise UserError(f"benchmark {name!r} has several files: {', '.join(map(str, files))}")
    return files[0]


def _read(name: str, path: Path) -> list[Task]:
    benchmark = BENCHMARKS[name]
    tasks = [
        replace(
            read_task(row, benchmark.layout, where, f"{name}-{number - 1}"),
            kind=name,
            scorer=benchmark.scorer,
            rules=rules_of(benchmark.scorer),
        )
        for number, where, row in read_rows(path, benchmark.layout.columns)
    ]
    if not tasks:
        raise UserError(f"{path}: holds no tasks; at least one is needed")
    return tasks


def _known(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise UserError(
            f"benchmark {name!r} is unknown; known: {', '.join(BENCHMARKS)}; use NAME=FILE for a "
            "custom file"
        )
    return BENCHMARKS[name]


def _paths(name: str, folder: Path) -> Sequence[Path]:
    suffixes = sorted(SUFFIXES, key=".json".__ne__)
    return *(folder / f"{name}{suffix}" for suffix in suffixes), folder / name / "data/data.json"


def _target(name: str, folder: Path) -> Path:
    """Return where a copy of the benchmark's file belongs."""
    suffix = {"popqa": ".tsv", "triviaqa": ".parquet"}.get(name, ".jsonl")
    return folder / f"{name}{'.json' if name in AGENTFLOW else suffix}"
