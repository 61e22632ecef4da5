"""The reward of a rollout: from its task's rule with a fallback judge, from user-written functions,
or as reported by its environment or program.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from flowtrain.config import Reward
from flowtrain.config.agents import JudgeMode
from flowtrain.records import Group, Task, Trajectory
from flowtrain.rewards.functions import RewardFunctions
from flowtrain.rewards.judge import Judge
from flowtrain.rewards.scorers import MAX_CHARS, by_rule
from flowtrain.tasks.sub_goals import solved_weight
from flowtrain.utils.event_loop import run_to_end

_REFUSALS = {
    *("none", "null", "n/a", "na", "unknown", "unclear", "undetermined", "unanswerable", "idk"),
    *("no answer", "no idea", "no information", "not known", "not found", "not available"),
    *("i do not know", "i don't know", "cannot answer", "unable to answer", "cannot determine"),
    *("unable to determine", "cannot be determined", "can not be determined"),
    *("not enough information", "insufficient information"),
}

REPORTED = "reported"
"""`scored_by` of a reward that the rollout's environment or program reported."""
FINAL_SCORERS = ("f1", "gameof24")
"""Scorers that no judge overrules, because they grade or prove."""


def score(
    groups: Sequence[Group],
    judge: Judge | None = None,
    functions: RewardFunctions | None = None,
    bounds: Reward | None = None,
) -> list[Group]:
    """Return the groups with `reward` and `scored_by` of every trajectory filled, as `score_one`
    does it, and with ExceptionGroup for unforeseen failures. Not for callers on the event loop.
    """

    async def score_all() -> list[Trajectory]:
        trajectories = [t for group in groups for t in group.trajectories]
        async with asyncio.TaskGroup() as running:
            runs = [
                running.create_task(score_one(t, judge, functions, bounds)) for t in trajectories
            ]
        return [task.result() for task in runs]

    results = iter(run_to_end(score_all()))
    return [
        replace(group, trajectories=tuple(islice(results, len(group.trajectories))))
        for group in groups
    ]


async def score_one(
    trajectory: Trajectory,
    judge: Judge | None = None,
    functions: RewardFunctions | None = None,
    bounds: Reward | None = None,
) -> Trajectory:
    """Return the rollout with `reward` and `scored_by` filled.

    A task's rule scores the answer. If it gives 0 (or always, by `judge.mode`), the judge decides,
    unless there is no answer; without a judgement the rule's reward stands, or the rollout fails if
    only the judge may decide. A reported reward within `low` to `high` of `bounds` (0 to 1)
    replaces the rule, and reward functions replace both. A failed rollout gets no reward, and a
    reward out of bounds fails the rollout.

    Raises UserError for an unknown scorer, or one that cannot use the task's answers.
    """
    if functions is not None:
        return await functions.score(trajectory)
    if trajectory.reported and not trajectory.error:
        reward = math.fsum([*trajectory.reported.values(), *trajectory.turn_rewards])
        scored = replace(trajectory, reward_parts=trajectory.reported)
        return _scored(scored, reward, REPORTED, bounds or Reward())
    task, answer = trajectory.task, trajectory.answer.strip()
    if trajectory.error:
        return trajectory
    reward, scored_by = await by_rule(task, answer)
    if judge is not None and _is_for_judge(task, answer, reward, judge.mode):
        # The end, as the rule reads it: else padding would choose who grades.
        is_right = await judge.judge(task, answer[-MAX_CHARS:])
        if is_right is not None:
            reward, scored_by = float(is_right), "judge"
        elif judge.mode == "judge-only":
            return replace(trajectory, scored_by="judge", error="judge: no verdict")
    return _scored(trajectory, reward, scored_by, Reward())


def _scored(trajectory: Trajectory, reward: float, scored_by: str, bounds: Reward) -> Trajectory:
    """Return the rollout with its reward, or failed."""
    within = bounds.bounded(reward)
    problem = (
        f"scorer {scored_by}: its reward is {reward:g}, not from {bounds.low:g} to {bounds.high:g}"
    )
    return replace(
        trajectory,
        reward=within,
        scored_by=scored_by,
        error=problem if within is None else "",
        sub_goals=solved_weight(trajectory.task, trajectory.turns, trajectory.output),
    )


def _is_for_judge(task: Task, answer: str, reward: float, mode: JudgeMode) -> bool:
    """Return whether the judge decides: only after a rule's 0, or first of all."""
    is_open = reward == 0 or mode != "rules-first"
    return is_open and not is_refusal(answer) and task.scorer not in FINAL_SCORERS


def is_refusal(answer: str) -> bool:
    """Return whether a final answer is a refusal ("", "None", "I don't know.")."""
    plain = " ".join(answer[:100].casefold().replace("\u2019", "'").split())
    plain = plain.strip(" .!?\"'*`()[]<>")
    return not plain or plain in _REFUSALS


def shuffle_rewards(groups: Sequence[Group], seed: int) -> list[Group]:
    """Return the groups with the rewards of finished rollouts permuted: a control without a
    signal.
    """
    rewards = [
        (rollout.reward, rollout.policy_rewards) for group in groups for rollout in group.finished
    ]
    random.Random(seed).shuffle(rewards)
    pool = iter(rewards)

    def shuffled(trajectory: Trajectory) -> Trajectory:
        if trajectory.error:
            return trajectory
        reward, by_policy = next(pool)
        return replace(trajectory, reward=reward, policy_rewards=by_policy)

    return [
        replace(group, trajectories=tuple(map(shuffled, group.trajectories))) for group in groups
    ]
