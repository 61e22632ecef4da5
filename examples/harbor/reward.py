"""The reward of a trial of Harbor: what the task's tests have given."""

from __future__ import annotations

from flowtrain.records import Task, Trajectory


def of_tests(task: Task, answer: str, trajectory: Trajectory) -> float:
    """Return it. Raises KeyError, so that the rollout fails, where it ended before the tests."""
    return trajectory.reported["reward"]
