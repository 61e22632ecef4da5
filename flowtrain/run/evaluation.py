"""Run the flow once over held-out tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowtrain.agents.collect import collect
from flowtrain.agents.flow import Flow
from flowtrain.rewards import Judge, score
from flowtrain.run.rollout_stats import RolloutStats
from flowtrain.training.world import World
from flowtrain.types import Task, Trajectory


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results over all ranks; `trajectories` are this rank's."""

    stats: RolloutStats
    by_num_turns: dict[str, float]
    """Mean reward by the turns that a question needs."""
    by_kind: dict[str, float]
    trajectories: tuple[Trajectory, ...]


def evaluate(
    flow: Flow,
    tasks: Sequence[Task],
    seed: int,
    tool_names: Sequence[str],
    world: World,
    max_in_flight: int,
    judge: Judge | None = None,
    samplers: World | None = None,
) -> Evaluation:
    """One rollout of each task, by `samplers` (None: all ranks); collective over `world`."""
    ranks = samplers or world
    groups = collect(
        flow,
        tasks,
        group_size=1,
        seed=seed,
        max_in_flight=max_in_flight,
        rank=ranks.rank,
        num_ranks=ranks.size,
    )
    trajectories = tuple(
        trajectory for group in score(groups, judge) for trajectory in group.trajectories
    )
    return Evaluation(
        RolloutStats.of(trajectories, tool_names, world),
        _mean_by(lambda task: str(task.num_turns), tasks, trajectories, world),
        _mean_by(lambda task: task.kind, tasks, trajectories, world),
        trajectories,
    )


def comparison(
    sampled: Mapping[str, Evaluation], greedy: Mapping[str, Evaluation], main_split: str
) -> dict[str, Any]:
    """What summary.json tells of a policy, by split sampled at its temperature and greedily."""
    main = sampled[main_split]
    return {
        "eval_reward": main.stats.reward_mean,
        "eval_reward_greedy": greedy[main_split].stats.reward_mean,
        "by_num_turns": main.by_num_turns,
        "by_kind": main.by_kind,
        "tool_shares": main.stats.tool_shares,
        "turns_mean": main.stats.turns_mean,
        "splits": {
            split: {
                "sampled": sampled[split].stats.reward_mean,
                "greedy": greedy[split].stats.reward_mean,
                "by_num_turns": sampled[split].by_num_turns,
            }
            for split in sampled
        },
    }


def _mean_by(
    label: Callable[[Task], str],
    tasks: Sequence[Task],
    trajectories: Sequence[Trajectory],
    world: World,
) -> dict[str, float]:
    """Mean reward per label of what did not fail. The labels come from all tasks, so that every
    rank reduces the same ones.
    """
    labels = sorted({label(task) for task in tasks})
    rewards: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for trajectory in trajectories:
        if trajectory.reward is not None:
            rewards[label(trajectory.task)] += trajectory.reward
            counts[label(trajectory.task)] += 1
    totals = world.sum([*(rewards[name] for name in labels), *(counts[name] for name in labels)])
    return {
        name: total / max(count, 1)
        for name, total, count in zip(labels, totals, totals[len(labels) :], strict=False)
    }
