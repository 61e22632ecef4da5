"""Filling in rewards."""

from __future__ import annotations

import pytest

from flowtrain.rewards import score
from flowtrain.types import Group, Task, Trajectory, UserError

FACT = Task("a", "Capital of Norway?", ("Oslo",))
PUZZLE = Task("b", "Make 24.", ("3", "3", "8", "8"), scorer="gameof24")


def trajectory(task: Task, answer: str) -> Trajectory:
    return Trajectory(task, (), answer, seconds=1.0, seed=5)


def test_every_trajectory_gets_its_tasks_reward() -> None:
    groups = [
        Group(4, (trajectory(FACT, "oslo"), trajectory(FACT, "Bergen"))),
        Group(7, (trajectory(PUZZLE, "8/(3-8/3)"), trajectory(PUZZLE, "Oslo"))),
    ]
    scored = score(groups)
    assert [[each.reward for each in group.trajectories] for group in scored] == [[1.0, 0.0], [1.0, 0.0]]
    assert [group.index for group in scored] == [4, 7]
    assert [each.answer for each in scored[0].trajectories] == ["oslo", "Bergen"]
    assert all(each.reward is None for group in groups for each in group.trajectories)


def test_nothing_to_score() -> None:
    assert score([]) == []


def test_unknown_scorer_is_refused_by_name() -> None:
    task = Task("t9", "q", ("x",), scorer="judge")
    with pytest.raises(UserError, match="task 't9': scorer 'judge' is unknown; known: exact, gameof24"):
        score([Group(0, (trajectory(task, "x"),))])
