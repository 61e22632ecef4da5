"""Sources of questions are checked before a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowtrain.config import Config
from flowtrain.records import Task, UserError
from flowtrain.rewards.references import check_tasks
from flowtrain.tasks.files import TaskSource
from flowtrain.tasks.sets import without_tasks


def test_a_source_whose_solutions_are_wrong_needs_a_judge() -> None:
    task = Task("t", "Sum?", ("The sum is\n#### 4",))
    source = TaskSource("sums.jsonl", "own", (task,), {"t": ""})
    tasks = replace(without_tasks(Config()), train=(task,), sources=(source,))
    with pytest.raises(UserError, match=r"sums\.jsonl': .* rejects the solutions of 1 of 1"):
        check_tasks(tasks, None, has_judge=False)
    check_tasks(tasks, None, has_judge=True)
    check_tasks(replace(tasks, sources=()), None, has_judge=False)


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (Task("t", "q", ("Gout",), scorer="choice", choices=("a", "b")), "an answer among the opt"),
        (Task("t", "q", ("x",), scorer="gameof24"), "the numbers of the puzzle as answers"),
        (Task("t", "q", ("x",), scorer="guess"), "'guess' is unknown"),
    ],
)
def test_a_task_that_cannot_be_scored_is_found_before_the_run(task: Task, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        check_tasks(replace(without_tasks(Config()), train=(task,)), None, has_judge=True)
