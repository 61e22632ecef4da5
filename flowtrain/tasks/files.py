"""Tasks from files, folders and the Hub: the user's own, and published training sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from flowtrain.config import Tasks
from flowtrain.records import Task, UserError
from flowtrain.tasks import published
from flowtrain.tasks.hub import DEFAULT_SPLIT, folder_rows, hub_rows, is_hub_name
from flowtrain.tasks.layouts import PICTURES, PRESETS, Layout, read_task, recognise
from flowtrain.tasks.rows import SUFFIXES, Row, read_rows

NUM_SOLUTIONS = 50
"""Rows whose own solutions are kept, to check the scorer with."""
_NUM_PEEKED = 20
"""Rows by which a layout is recognised."""
_RECOGNISED_BY = tuple({name for layout in PRESETS.values() for name in layout.columns})

_Read = Callable[[Sequence[str] | None], Iterator[tuple[int, str, Row]]]
"""Yields number, place and row; of Parquet only the given columns."""


@dataclass(frozen=True, slots=True)
class TaskSource:
    """Tasks that were loaded from a file, a folder or the Hub."""

    path: str
    preset: str
    """The layout of its rows, a name in `PRESETS`."""
    tasks: tuple[Task, ...]
    solutions: Mapping[str, str]
    """Solutions in the first rows, by the task's id; "" for a row without one."""
    num_system: int = 0
    """Rows whose system message was left out, as an agent has its own."""
    unanswered: str = ""
    """How many rows have no answer where others have one, and what the first has instead."""

    def text(self) -> str:
        """Describe it in a line: where from, how many rows, how they are read, the first task."""
        first = self.tasks[0]
        left_out = f", {self.num_system:,} system messages left out" if self.num_system else ""
        left_out += f", {self.unanswered}" if self.unanswered else ""
        name = Path(self.path).name or self.path
        return (
            f"tasks: {name}, {len(self.tasks):,} rows, preset {self.preset}"
            f'{left_out}: question "{shortened(first.question)}" -> '
            f'"{shortened(" | ".join(first.answers))}" ({first.scorer})'
        )


def load_source(
    path: str | Path,
    preset: str = "auto",
    *,
    split: str = DEFAULT_SPLIT,
    question_key: str = "",
    answer_key: str = "",
    scorer: str = "",
    keeps_columns: bool = False,
) -> TaskSource:
    """Load the tasks of a file, of a split in a folder, or of a data set of the Hub, in order.

    In your own layout a row has `question` (string) and `answer` (string, number or list of these:
    any of them is right), and may have `id` (default: file name and row number), `kind` (default
    ""), `num_turns` (default 0, unknown), `choices` (a list), `scorer` and `sub_goals` (a list of
    {names, weight, query}; see `flowtrain.tasks.sub_goals`). `preset` is a name in `PRESETS`, or
    "auto" to recognise the layout by the first rows. The keys name other columns for question and
    answer ("reward_model.ground_truth" looks into an object); `scorer` replaces the default one.
    `keeps_columns`: for a reward function (`Layout.keeps_columns`).
    Raises UserError, which names the file, the row, the key and what it may be.
    """
    stem, reader = _opened(str(path), split)
    if preset == "auto":
        preset = recognise([row for _, _, row in islice(reader(_RECOGNISED_BY), _NUM_PEEKED)])
    layout = _with_options(PRESETS[preset], question_key, answer_key, scorer)
    if keeps_columns:
        layout = replace(layout, is_closed=False, keeps_columns=True)
    tasks: list[Task] = []
    places: dict[str, str] = {}
    solutions: dict[str, str] = {}
    num_system = num_unanswered = 0
    unanswered = ""
    reads_all = layout.is_closed or keeps_columns
    for number, where, row in reader(None if reads_all else (*layout.columns, *PICTURES)):
        task = read_task(row, layout, where, default_id=f"{stem}-{number}")
        if task.id in places:
            raise UserError(
                f"{where}: id {task.id!r} was already used by {places[task.id]}; ids must be unique"
            )
        places[task.id] = where
        tasks.append(task)
        if len(solutions) < NUM_SOLUTIONS:
            solutions[task.id] = layout.solution_of(row)
        num_system += published.SYSTEM in layout.unpack(row)
        if not task.answers:
            num_unanswered += 1
            unanswered = unanswered or _near_miss(row, layout, number)
    if not tasks:
        raise UserError(f"{path}: holds no tasks; at least one is needed")
    if 0 < num_unanswered < len(tasks):
        unanswered = f"{num_unanswered:,} of them without an answer, {unanswered}"
    else:
        unanswered = ""  # all have one, or a reward function needs none
    return TaskSource(str(path), preset, tuple(tasks), solutions, num_system, unanswered)


def _near_miss(row: Row, layout: Layout, number: int) -> str:
    """Name a row without an answer, and a column of it that may be one misspelt."""
    keys = [name.partition(".")[0] for name in layout.answers]
    columns = [name for name in row if name not in layout.columns]
    typos = [name for key in keys for name in get_close_matches(key, columns, 1, 0.75)]
    return f"the first is row {number}" + (f", which has {typos[0][:40]!r}" if typos else "")


def load_configured(path: str, tasks: Tasks, keeps_columns: bool) -> TaskSource:
    """Load the tasks of a path as the options of `[tasks]` say."""
    return load_source(
        path,
        tasks.preset,
        split=tasks.split,
        question_key=tasks.question_key,
        answer_key=tasks.answer_key,
        scorer=tasks.scorer,
        keeps_columns=keeps_columns,
    )


def load_tasks(path: str | Path, preset: str = "auto", **options: Any) -> list[Task]:
    """Return the tasks of `load_source`, whose arguments these are."""
    return list(load_source(path, preset, **options).tasks)


def shortened(text: str, size: int = 40) -> str:
    """Return a text as one line of at most `size` characters and "..."."""
    line = " ".join(text.split())
    return line if len(line) <= size else f"{line[:size].rstrip()}..."


def _with_options(layout: Layout, question_key: str, answer_key: str, scorer: str) -> Layout:
    if question_key or answer_key:
        answers = (answer_key,) if answer_key else layout.answers
        layout = replace(
            layout, question=question_key or layout.question, answers=answers, is_closed=False
        )
    if scorer:
        layout = replace(layout, default_scorer=scorer, scorer_by_kind={}, scorer_of_choices=scorer)
    return layout


def _opened(path: str, split: str) -> tuple[str, _Read]:
    """Return how the ids of its tasks begin, and how to read it."""
    place = Path(path)
    if place.is_dir():
        return f"{place.resolve().name}-{split}", partial(folder_rows, place, split)
    is_absent = not place.exists() and place.suffix not in SUFFIXES
    if is_absent and not is_hub_name(path):
        raise UserError(f"tasks.path={path!r}: there is no such file or folder")
    if is_absent:
        rows = list(hub_rows(path, split))
        return f"{path.partition('/')[2].replace(':', '-')}-{split}", lambda columns: iter(rows)
    if split != DEFAULT_SPLIT:
        raise UserError(
            f"tasks.split={split!r} requires a folder or a dataset of the Hub, not the file "
            f"{path!r}"
        )
    return place.stem, partial(read_rows, place)
