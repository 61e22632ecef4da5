"""Tasks from files: the user's own, and published training sets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flowtrain.tasks.layouts import PRESETS, read_task, recognise
from flowtrain.tasks.rows import column_names, read_rows
from flowtrain.types import Task, UserError


def load_tasks(
    path: str | Path,
    preset: str = "auto",
    *,
    question_key: str = "",
    answer_key: str = "",
    scorer: str = "",
    keeps_columns: bool = False,
) -> list[Task]:
    """Load the tasks of a .jsonl, .json or .parquet file, in file order.

    In your own layout a row has `question` (string) and `answer` (string, number or list of these:
    any of them is right), and may have `id` (default: file name and row number), `kind` (default
    ""), `num_turns` (default 0, unknown), `choices` (a list), `scorer` and `sub_goals` (a list of
    {names, weight, query}; see `flowtrain.tasks.sub_goals`). `preset` is a name in `PRESETS`, or
    "auto" to recognise the layout by its columns. The keys name other columns for question and
    answer ("reward_model.ground_truth" looks into an object); `scorer` replaces the default one.
    `keeps_columns`: for a reward function (`Layout.keeps_columns`).
    Raises UserError, which names the file, the row, the key and what it may be.
    """
    path = Path(path)
    layout = recognise(column_names(path)) if preset == "auto" else PRESETS[preset]
    if question_key or answer_key:
        answers = (answer_key,) if answer_key else layout.answers
        layout = replace(
            layout, question=question_key or layout.question, answers=answers, is_closed=False
        )
    if scorer:
        layout = replace(layout, default_scorer=scorer, scorer_by_kind={})
    if keeps_columns:
        layout = replace(layout, is_closed=False, keeps_columns=True)
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    reads_all = layout.is_closed or keeps_columns
    for number, where, row in read_rows(path, None if reads_all else layout.columns):
        task = read_task(row, layout, where, default_id=f"{path.stem}-{number}")
        if task.id in seen:
            raise UserError(
                f"{where}: id {task.id!r} was already used by {seen[task.id]}; ids must be unique"
            )
        seen[task.id] = where
        tasks.append(task)
    if not tasks:
        raise UserError(f"{path}: holds no tasks; at least one is needed")
    return tasks
