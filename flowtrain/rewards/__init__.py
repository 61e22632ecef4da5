"""Rule scorers: how right is an answer, from 0 to 1."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from flowtrain.rewards import exact, gameof24
from flowtrain.types import Group, Task, Trajectory, UserError

SCORERS: dict[str, Callable[[Task, str], float]] = {"exact": exact.exact_match, "gameof24": gameof24.gameof24}
"""Scorer name, as in `Task.scorer`, to the rule."""


def score(groups: Sequence[Group]) -> list[Group]:
    """The groups with every trajectory's `reward` filled by its task's scorer; UserError when a task names an unknown scorer."""
    return [replace(group, trajectories=tuple(map(_scored, group.trajectories))) for group in groups]


def _scored(trajectory: Trajectory) -> Trajectory:
    task = trajectory.task
    if task.scorer not in SCORERS:
        raise UserError(f"task {task.id!r}: scorer {task.scorer!r} is unknown; known: {', '.join(SCORERS)}")
    return replace(trajectory, reward=SCORERS[task.scorer](task, trajectory.answer))


def shuffle_rewards(groups: Sequence[Group], seed: int) -> list[Group]:
    """Deal the rewards of all groups out at random: the control in which there is nothing to learn."""
    rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
    random.Random(seed).shuffle(rewards)
    deal = iter(rewards)
    return [replace(group, trajectories=tuple(replace(t, reward=next(deal)) for t in group.trajectories)) for group in groups]


__all__ = ["SCORERS", "score", "shuffle_rewards"]
