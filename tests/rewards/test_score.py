"""Filling in rewards."""

from __future__ import annotations

import time

import make
import pytest

from flowtrain.records import Group, Task, Trajectory, UserError
from flowtrain.rewards import score

FACT = Task("a", "Capital of Norway?", ("Oslo",))
PUZZLE = Task("b", "Make 24.", ("3", "3", "8", "8"), scorer="gameof24")


def trajectory(task: Task, answer: str) -> Trajectory:
    return make.rollout(task=task, answer=answer)


def test_every_trajectory_gets_its_tasks_reward() -> None:
    groups = [
        Group(4, (trajectory(FACT, "oslo"), trajectory(FACT, "Bergen"))),
        Group(7, (trajectory(PUZZLE, "8/(3-8/3)"), trajectory(PUZZLE, "Oslo"))),
    ]
    scored = score(groups)
    assert [[each.reward for each in group.trajectories] for group in scored] == [[1.0, 0.0]] * 2
    assert [group.index for group in scored] == [4, 7]
    assert [each.answer for each in scored[0].trajectories] == ["oslo", "Bergen"]
    assert all(each.reward is None for group in groups for each in group.trajectories)


def test_a_rule_reads_the_answer_and_is_recorded() -> None:
    tasks = [
        (Task("q", "q", ("Oslo",), scorer="qa"), "The Oslo.", 1.0),
        (Task("f", "q", ("Oslo",), scorer="f1"), "Oslo, Norway", 2 / 3),
        (
            Task("m", "q", ("0.5",), scorer="math"),
            "\\boxed{\\frac12}",
            1.0,
        ),
        (Task("c", "q", ("b",), scorer="choice", choices=("a", "b")), "(B)", 1.0),
        (PUZZLE, "8/(3-8/3) = 24", 1.0),
        (FACT, "Bergen", 0.0),
    ]
    (group,) = score([Group(0, tuple(trajectory(task, answer) for task, answer, _ in tasks))])
    for each, (task, _, reward) in zip(group.trajectories, tasks, strict=True):
        assert (each.reward, each.scored_by) == (pytest.approx(reward), task.scorer)


@pytest.mark.parametrize("scorer", ["exact", "qa", "f1", "math"])
def test_no_answer_is_never_right(scorer: str) -> None:
    """Even where an accepted answer is nothing after normalisation."""
    task = Task("t", "q", (".", "the", "$$"), scorer=scorer)
    (group,) = score([Group(0, tuple(trajectory(task, answer) for answer in ("", " ")))])
    assert [each.reward for each in group.trajectories] == [0.0] * 2


@pytest.mark.clock
@pytest.mark.parametrize(
    "piece", [*("a ", "1,", "<answer>", "\\frac{", "-5 ", "the answer is ", ". ")]
)
def test_a_huge_answer_is_scored_at_once(piece: str) -> None:
    answer = piece * (1_000_000 // len(piece))
    for scorer in ("exact", "qa", "f1", "math", "choice", "gameof24"):
        task = Task("t", "q", ("3", "8"), scorer=scorer, choices=("3", "8"))
        started = time.process_time()
        (group,) = score([Group(0, (trajectory(task, answer),))])
        assert time.process_time() - started < 2, scorer
        assert group.trajectories[0].reward is not None, scorer


def test_of_a_long_answer_the_end_is_read() -> None:
    task = Task("t", "q", ("y" * 2000,), scorer="qa")
    (group,) = score(
        [Group(0, (trajectory(task, "x" * 5000 + "y" * 2000), trajectory(task, "y" * 2000 + "x")))]
    )
    assert [each.reward for each in group.trajectories] == [1.0, 0.0]


def test_nothing_to_score() -> None:
    assert score([]) == []


def test_unknown_scorer_is_refused_by_name() -> None:
    task = Task("t9", "q", ("x",), scorer="guess")
    told = "task 't9': scorer 'guess' is unknown; known: exact, qa, f1, math, choice, gameof24"
    with pytest.raises(UserError, match=told):
        score([Group(0, (trajectory(task, "x"),))])
