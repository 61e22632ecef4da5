"""Check that tasks can be scored, and that a source and its scorer agree on what is right."""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.records import Group, Task, Trajectory, UserError
from flowtrain.rewards import RewardFunctions, score
from flowtrain.rewards.scorers import check
from flowtrain.tasks import sub_goals
from flowtrain.tasks.files import TaskSource, shortened
from flowtrain.tasks.sets import TaskSet
from flowtrain.utils.text import final_answer, marked_answer, words

_COMPARING = ("exact", "qa", "f1", "math", "choice")
"""Scorers that compare with accepted answers; others judge answers by themselves."""
_MIN_SHARE = 0.5


def check_tasks(tasks: TaskSet, functions: RewardFunctions | None, has_judge: bool) -> None:
    """Check before the run that each task can be scored, its sub-goals, and sources by their own
    solutions. Functions of the user's own are not called.
    """
    all_tasks = (*tasks.train, *(task for split in tasks.held_out.values() for task in split))
    if functions is not None:
        functions.check(all_tasks)
    else:
        for task in all_tasks:
            check(task)
    for task in tasks.train:
        sub_goals.check(task)
    # A judge accepts what rules do not, and functions need no answers.
    for source in () if has_judge or functions is not None else tasks.sources:
        check_source(source)


def check_source(source: TaskSource) -> None:
    """Score what the first rows themselves give as solution, else their accepted answer.

    Raises UserError, which says what to change, when fewer than half score 1: a policy would learn
    nothing from such rewards.
    """
    cases = [
        (task, _right_answer(task, source.solutions[task.id]))
        for task in source.tasks[: len(source.solutions)]
        if task.scorer in _COMPARING
    ]
    wrong = [case for case, reward in zip(cases, _rewards(cases), strict=True) if reward < 1]
    if len(cases) - len(wrong) >= _MIN_SHARE * len(cases):
        return
    task, answer = wrong[0]
    raise UserError(
        f"tasks.path={source.path!r}: the scorer {task.scorer!r} rejects the solutions of "
        f"{len(wrong)} of {len(cases)} rows: {shortened(answer)!r} is not the accepted "
        f"{shortened(' | '.join(task.answers))!r} of {task.id}; another column "
        f"(tasks.answer_key), rule (tasks.scorer) or layout (tasks.preset, here {source.preset}) "
        "may be the right one"
    )


def _right_answer(task: Task, solution: str) -> str:
    """Return what a policy that has solved the task would answer.

    The answer is the marked part of the solution ("#### 72", a box). A sentence that says the
    accepted answer counts as that answer, because a policy is asked for the answer alone.
    """
    text = final_answer(solution or next(iter(task.answers), ""))
    marked = marked_answer(text)
    sentence = " ".join(("", *words(text), ""))
    if marked is None and solution:
        for accepted in task.answers:
            if f" {' '.join(words(accepted))} " in sentence:
                return accepted
    return text if marked is None else marked


def _rewards(cases: Sequence[tuple[Task, str]]) -> list[float]:
    groups = [Group(0, tuple(Trajectory(task, (), answer, 0.0, 0) for task, answer in cases))]
    return [
        trajectory.reward or 0.0 for group in score(groups) for trajectory in group.trajectories
    ]
