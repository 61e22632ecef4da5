"""Held-out evaluation: one rollout of each task of a split."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from flowtrain.agents.base import Agent
from flowtrain.agents.collect import collect
from flowtrain.engines.protocol import Engine
from flowtrain.rewards import Judge, RewardFunctions, score
from flowtrain.run.components import RunComponents
from flowtrain.run.rollout_stats import RolloutStats
from flowtrain.tasks.sets import MAIN_SPLIT
from flowtrain.training.world import World
from flowtrain.types import Task, Trajectory
from flowtrain.utils.seeds import derive_seed

_log = logging.getLogger(__name__)
_MOST_OUT_OF_TIME = 0.1
"""Share of rollouts above which an evaluation warns."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results over all ranks; `trajectories` are this rank's."""

    stats: RolloutStats
    by_num_turns: dict[str, float]
    """Mean reward by the turns that a question needs."""
    by_kind: dict[str, float]
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Measures the policy on the held-out splits; collective over `world`."""

    components: RunComponents
    engines: Mapping[str, Engine]
    judge: Judge | None
    samplers: World
    """The ranks that sample."""

    def is_due(self, step: int) -> bool:
        """Tell whether `eval.every` asks for an evaluation after `step`."""
        every = self.components.config.eval.every
        return every > 0 and step % every == 0

    def evaluate(self, step: int) -> Evaluation:
        """Roll out the main split once; at a given step always with the same random numbers."""
        return self._roll_out(MAIN_SPLIT, step)

    def compare(self) -> tuple[dict[str, Any], tuple[Trajectory, ...]]:
        """Roll out every split, sampled and greedy.

        Returns the comparison for summary.json, and the sampled rollouts of the main split.
        """
        splits = self.components.tasks.held_out
        sampled = {split: self._roll_out(split, -1) for split in splits}
        greedy = {split: self._roll_out(split, -1, temperature=0.0) for split in splits}
        main = sampled[MAIN_SPLIT]
        found = {
            "eval_reward": main.stats.reward_mean,
            "eval_reward_error": main.stats.reward_error,
            "eval_reward_greedy": greedy[MAIN_SPLIT].stats.reward_mean,
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
                for split in splits
            },
        }
        return found, main.trajectories

    def _roll_out(self, split: str, step: int, temperature: float | None = None) -> Evaluation:
        config = self.components.config
        agent = self.components.make_agent(self.engines, config.agent.eval_max_turns, temperature)
        with closing(agent):
            found = evaluate(
                agent,
                self.components.tasks.held_out[split],
                derive_seed(config.run.seed, "eval", step),
                tool_names=config.agent.tools,
                world=self.components.world,
                max_in_flight=config.rollout.max_in_flight,
                judge=self.judge,
                functions=self.components.reward_functions,
                samplers=self.samplers,
            )
        share = found.stats.out_of_time_share
        if share > _MOST_OUT_OF_TIME and self.components.world.is_main:
            _log.warning(
                "held-out %s: %.0f%% of the rollouts ran out of time, or of the model's positions, "
                "which lowers the reward: see rollout.request_timeout_s=%g, in which a response "
                "also waits its turn, and rollout.max_in_flight=%d",
                split,
                100 * share,
                config.rollout.request_timeout_s,
                config.rollout.max_in_flight,
            )
        return found


def evaluate(
    agent: Agent,
    tasks: Sequence[Task],
    seed: int,
    tool_names: Sequence[str],
    world: World,
    max_in_flight: int,
    judge: Judge | None = None,
    functions: RewardFunctions | None = None,
    samplers: World | None = None,
) -> Evaluation:
    """Roll out each task once on the `samplers` (None: all ranks); collective over `world`."""
    ranks = samplers or world
    groups = collect(
        agent,
        tasks,
        group_size=1,
        seed=seed,
        max_in_flight=max_in_flight,
        rank=ranks.rank,
        num_ranks=ranks.size,
    )
    scored = score(groups, judge, functions)
    trajectories = tuple(trajectory for group in scored for trajectory in group.trajectories)
    return Evaluation(
        RolloutStats.of(trajectories, tool_names, world),
        _mean_by(lambda task: str(task.num_turns), tasks, trajectories, world),
        _mean_by(lambda task: task.kind, tasks, trajectories, world),
        trajectories,
    )


def _mean_by(
    label: Callable[[Task], str],
    tasks: Sequence[Task],
    trajectories: Sequence[Trajectory],
    world: World,
) -> dict[str, float]:
    """Mean reward per label of rollouts that did not fail; collective.

    The labels come from all tasks, so that every rank reduces the same ones.
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
