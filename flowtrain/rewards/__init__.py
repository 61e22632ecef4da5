"""Rewards of answers: by rules, and behind them by a language model as judge, or by functions that
users write.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from flowtrain.config.agents import JudgeMode
from flowtrain.rewards import gym, symbolic
from flowtrain.rewards.functions import RewardFunctions
from flowtrain.rewards.judge import Judge
from flowtrain.rewards.judge_cache import JudgeCache
from flowtrain.rewards.scorers import MAX_CHARS, SCORERS
from flowtrain.tasks.sub_goals import solved_weight
from flowtrain.types import Group, Task, Trajectory, UserError
from flowtrain.utils.text import final_answer

_REFUSALS = {
    *("none", "null", "n/a", "na", "unknown", "unclear", "undetermined", "unanswerable", "idk"),
    *("no answer", "no idea", "no information", "not known", "not found", "not available"),
    *("i do not know", "i don't know", "cannot answer", "unable to answer", "cannot determine"),
    *("unable to determine", "cannot be determined", "can not be determined"),
    *("not enough information", "insufficient information"),
}

REPORTED = "reported"
"""`scored_by` of a reward that the rollout's environment or program reported."""
FINAL_SCORERS = ("f1", "gameof24", gym.NAME)
"""Scorers that no judge overrules: one grades, the others prove."""


def score(
    groups: Sequence[Group], judge: Judge | None = None, functions: RewardFunctions | None = None
) -> list[Group]:
    """Return the groups with `reward` and `scored_by` of every trajectory filled.

    A task's rule, or the verifier of reasoning-gym, scores the final answer (`final_answer`). Where
    a rule gives 0 (or always, by `judge.mode`), the judge is asked, unless there is no answer;
    without a judgement the rule's reward stands, or the rollout fails where the judge alone
    decides. A reward that the rollout's environment or program reported takes the rule's place.
    A failed rollout gets no reward, and one whose scorer gives none from 0 to 1 fails.
    Reward functions take the place of all that. Must not be called where an event loop runs.
    Raises UserError when a task names an unknown scorer, or one that cannot use its answers.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    if functions is not None:
        scored = asyncio.run(functions.score_all(trajectories))
    else:
        scored = _by_rules(trajectories, judge)
    rest = iter(scored)
    return [
        replace(group, trajectories=tuple(islice(rest, len(group.trajectories))))
        for group in groups
    ]


async def score_one(
    trajectory: Trajectory, judge: Judge | None = None, functions: RewardFunctions | None = None
) -> Trajectory:
    """Score one rollout as `score` does, in an event loop."""
    if functions is not None:
        return await functions.score(trajectory)
    if trajectory.reported:
        return _checked(_with_reported_reward(trajectory))
    scored = _with_rule_reward(trajectory)
    if _needs_verifier(scored):
        verdict = await gym.verify(scored.task, final_answer(scored.answer))
        scored = _with_verified_reward(scored, verdict)
    elif _may_be_same(scored) and await symbolic.same(*_case(scored)):
        scored = replace(scored, reward=1.0)
    if judge is not None and _is_for_judge(scored, judge.mode):
        is_right = await judge.judge(scored.task, final_answer(scored.answer))
        scored = _with_judge_reward(scored, is_right, judge.mode)
    return _checked(scored)


def _by_rules(trajectories: Sequence[Trajectory], judge: Judge | None) -> list[Trajectory]:
    scored = [
        _with_reported_reward(trajectory) if trajectory.reported else _with_rule_reward(trajectory)
        for trajectory in trajectories
    ]
    verified = [number for number, t in enumerate(scored) if _needs_verifier(t)]
    verdicts = gym.verify_all([(scored[n].task, final_answer(scored[n].answer)) for n in verified])
    for number, verdict in zip(verified, verdicts, strict=True):
        scored[number] = _with_verified_reward(scored[number], verdict)
    unlike = [number for number, t in enumerate(scored) if _may_be_same(t)]
    for number, is_same in zip(
        unlike, symbolic.same_all([_case(scored[n]) for n in unlike]), strict=True
    ):
        scored[number] = replace(scored[number], reward=float(is_same))
    if judge is not None:
        disputed = [number for number, t in enumerate(scored) if _is_for_judge(t, judge.mode)]
        cases = [(scored[n].task, final_answer(scored[n].answer)) for n in disputed]
        for number, is_right in zip(disputed, judge.judge_all(cases), strict=True):
            scored[number] = _with_judge_reward(scored[number], is_right, judge.mode)
    return [_checked(trajectory) for trajectory in scored]


def _case(trajectory: Trajectory) -> tuple[Task, str]:
    """Return the task and as much of the final answer as rules read."""
    return trajectory.task, final_answer(trajectory.answer)[-MAX_CHARS:]


def _may_be_same(trajectory: Trajectory) -> bool:
    """Return whether math-verify may overrule the rule's 0."""
    return trajectory.reward == 0 and trajectory.scored_by == symbolic.SCORER


def _checked(trajectory: Trajectory) -> Trajectory:
    """Let a rollout fail whose scorer gave no reward from 0 to 1, NaN for example."""
    reward = trajectory.reward
    if trajectory.error or (reward is not None and 0 <= reward <= 1):
        return trajectory
    error = f"scorer {trajectory.scored_by}: its reward is {reward}, not from 0 to 1"
    return replace(trajectory, reward=None, error=error)


def _with_rule_reward(trajectory: Trajectory) -> Trajectory:
    task = trajectory.task
    answer = final_answer(trajectory.answer)
    if task.scorer == gym.NAME:
        gym.check(task)
    elif task.scorer not in SCORERS:
        raise UserError(
            f"task {task.id!r}: scorer {task.scorer!r} is unknown; known: {', '.join(SCORERS)}"
        )
    if trajectory.error:
        return trajectory
    rule = SCORERS.get(task.scorer, _no_rule)
    reward = rule(task, answer[-MAX_CHARS:])
    return replace(
        trajectory,
        reward=reward if answer else 0.0,
        scored_by=task.scorer,
        sub_goals=solved_weight(task, trajectory.turns, trajectory.output),
    )


def _with_reported_reward(trajectory: Trajectory) -> Trajectory:
    if trajectory.error:
        return trajectory
    return replace(
        trajectory,
        reward=math.fsum(trajectory.reported.values()),
        scored_by=REPORTED,
        reward_parts=trajectory.reported,
        sub_goals=solved_weight(trajectory.task, trajectory.turns, trajectory.output),
    )


def _no_rule(task: Task, answer: str) -> float:
    """Give 0 until the verifier has scored."""
    return 0.0


def _needs_verifier(trajectory: Trajectory) -> bool:
    return trajectory.scored_by == gym.NAME


def _with_verified_reward(trajectory: Trajectory, verified: gym.Verified) -> Trajectory:
    return replace(trajectory, reward=verified.reward, scored_by=verified.scored_by)


def _with_judge_reward(
    trajectory: Trajectory, is_right: bool | None, mode: JudgeMode
) -> Trajectory:
    if is_right is not None:
        return replace(trajectory, reward=float(is_right), scored_by="judge")
    if mode == "judge-only":
        return replace(trajectory, reward=None, scored_by="judge", error="judge: no verdict")
    return trajectory


def _is_for_judge(trajectory: Trajectory, mode: JudgeMode) -> bool:
    """Return whether the judge is asked: about a rule's 0 alone, or first, about its 1 too."""
    if (
        trajectory.error
        or trajectory.scored_by == REPORTED
        or trajectory.task.scorer in FINAL_SCORERS
    ):
        return False
    answer = final_answer(trajectory.answer)
    is_open = trajectory.reward == 0 or mode != "rules-first"
    return is_open and not is_refusal(answer) and len(answer) <= MAX_CHARS


def is_refusal(answer: str) -> bool:
    """Return whether a final answer gives none ("", "None", "I don't know.")."""
    plain = " ".join(answer[:100].casefold().replace("\u2019", "'").split())
    plain = plain.strip(" .!?\"'*`()[]<>")
    return not plain or plain in _REFUSALS


def shuffle_rewards(groups: Sequence[Group], seed: int) -> list[Group]:
    """Permute the rewards of all finished rollouts: a control with nothing to learn."""
    rewards = [trajectory.reward for group in groups for trajectory in group.finished]
    random.Random(seed).shuffle(rewards)
    left = iter(rewards)

    def shuffled(trajectory: Trajectory) -> Trajectory:
        return trajectory if trajectory.error else replace(trajectory, reward=next(left))

    return [
        replace(group, trajectories=tuple(map(shuffled, group.trajectories))) for group in groups
    ]


__all__ = [
    "SCORERS",
    "Judge",
    "JudgeCache",
    "RewardFunctions",
    "score",
    "score_one",
    "shuffle_rewards",
]
