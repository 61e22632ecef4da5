"""How right is an answer, from 0 to 1: rules first, and behind them a language model as judge."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from flowtrain.rewards import choice, exact, gameof24, math_answer, squad
from flowtrain.rewards.answer import MAX_CHARS, final_answer, is_refusal
from flowtrain.rewards.judge import Judge
from flowtrain.rewards.verdict_cache import VerdictCache
from flowtrain.tasks.sub_goals import solved_weight
from flowtrain.types import Group, Task, Trajectory, UserError

SCORERS: dict[str, Callable[[Task, str], float]] = {
    "exact": exact.exact_match,
    "qa": squad.exact_match,
    "f1": squad.token_f1,
    "math": math_answer.math_match,
    "choice": choice.choice,
    "gameof24": gameof24.gameof24,
}
"""Scorer name, as in `Task.scorer`, to the rule; it gets the final answer."""

FINAL_SCORERS = ("f1", "gameof24")
"""Rules that no judge is asked behind: one grades, the other proves."""


def score(groups: Sequence[Group], judge: Judge | None = None) -> list[Group]:
    """The groups with every trajectory's `reward` and `scored_by` filled.

    A task's rule scores the final answer (`final_answer`). Where it says 0 the judge is asked,
    unless there is no answer; without a verdict the rule's 0 stands. A rollout that failed gets no
    reward. UserError when a task names an unknown scorer, or one that cannot use its answers.
    """
    scored = [[_by_rule(trajectory) for trajectory in group.trajectories] for group in groups]
    if judge is not None:
        _overrule(scored, judge)
    return [
        replace(group, trajectories=tuple(members))
        for group, members in zip(groups, scored, strict=True)
    ]


async def score_one(trajectory: Trajectory, judge: Judge | None = None) -> Trajectory:
    """`score` for one rollout, in an event loop."""
    scored = _by_rule(trajectory)
    if judge is None or not _is_open(scored):
        return scored
    return _judged(scored, await judge.verdict(scored.task, final_answer(scored.answer)))


def _by_rule(trajectory: Trajectory) -> Trajectory:
    task, answer = trajectory.task, final_answer(trajectory.answer)
    if task.scorer not in SCORERS:
        raise UserError(
            f"task {task.id!r}: scorer {task.scorer!r} is unknown; known: {', '.join(SCORERS)}"
        )
    if trajectory.error:
        return trajectory
    reward = SCORERS[task.scorer](task, answer[-MAX_CHARS:])
    reward = reward if answer else 0.0
    return replace(
        trajectory,
        reward=reward,
        scored_by=task.scorer,
        sub_goals=solved_weight(task, trajectory.turns),
    )


def _overrule(scored: Sequence[list[Trajectory]], judge: Judge) -> None:
    """Replace, in place, what the judge decides."""
    places = [
        (i, j)
        for i, members in enumerate(scored)
        for j, trajectory in enumerate(members)
        if _is_open(trajectory)
    ]
    verdicts = judge.verdicts(
        [(scored[i][j].task, final_answer(scored[i][j].answer)) for i, j in places]
    )
    for (i, j), is_right in zip(places, verdicts, strict=True):
        scored[i][j] = _judged(scored[i][j], is_right)


def _judged(trajectory: Trajectory, is_right: bool | None) -> Trajectory:
    return (
        trajectory
        if is_right is None
        else replace(trajectory, reward=float(is_right), scored_by="judge")
    )


def _is_open(trajectory: Trajectory) -> bool:
    """Whether a judge may know better."""
    answer = final_answer(trajectory.answer)
    return (
        trajectory.reward == 0
        and trajectory.task.scorer not in FINAL_SCORERS
        and not is_refusal(answer)
        and len(answer) <= MAX_CHARS
    )


def shuffle_rewards(groups: Sequence[Group], seed: int) -> list[Group]:
    """Deal the rewards of all groups out at random: the control in which there is nothing to learn.
    What failed keeps none.
    """
    rewards = [trajectory.reward for group in groups for trajectory in group.finished]
    random.Random(seed).shuffle(rewards)
    deal = iter(rewards)

    def dealt(trajectory: Trajectory) -> Trajectory:
        return trajectory if trajectory.error else replace(trajectory, reward=next(deal))

    return [replace(group, trajectories=tuple(map(dealt, group.trajectories))) for group in groups]


__all__ = [
    "SCORERS",
    "Judge",
    "VerdictCache",
    "final_answer",
    "score",
    "score_one",
    "shuffle_rewards",
]
