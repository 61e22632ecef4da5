"""Evaluation of the policy in training: on held-out tasks, and on benchmarks."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from flowtrain.agents.base import Agent
from flowtrain.agents.collect import collect
from flowtrain.config import Config
from flowtrain.engines.protocol import Engine
from flowtrain.rewards import Judge, RewardFunctions, score
from flowtrain.rewards.scorers import MAX_CHARS
from flowtrain.rewards.squad import published_metrics
from flowtrain.run.components import RunComponents
from flowtrain.run.rollout_stats import RolloutStats
from flowtrain.tasks.benchmarks import parse_benchmarks
from flowtrain.tasks.sets import MAIN_SPLIT
from flowtrain.training.world import World
from flowtrain.types import Group, Task, Trajectory
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.text import final_answer

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


@dataclass(frozen=True, slots=True)
class Measured:
    """What an evaluation in training found, over all ranks."""

    held_out: Evaluation
    """Of the main split."""
    benchmarks: Mapping[str, float]
    """Metrics of `Evaluator.ask_benchmarks`."""

    @property
    def metrics(self) -> dict[str, float]:
        """Return what the log of a step gets."""
        return {"eval_reward": self.held_out.stats.reward_mean, **self.benchmarks}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Measures the policy on the held-out splits; collective over `world`."""

    components: RunComponents
    engines: Mapping[str, Engine]
    judge: Judge | None
    samplers: World
    """The ranks that sample."""
    benchmarks: Mapping[str, Sequence[Task]]
    """The questions of `eval.benchmarks`, by name."""

    def is_due(self, step: int) -> bool:
        """Tell whether `eval.every` asks for an evaluation after `step`."""
        every = self.components.config.eval.every
        return every > 0 and step % every == 0

    def evaluate(self, step: int) -> Measured:
        """Roll out the main split and the benchmarks; at a given step always with the same random
        numbers.
        """
        return Measured(self._roll_out(MAIN_SPLIT, step), self.ask_benchmarks(step))

    def ask_benchmarks(self, step: int) -> dict[str, float]:
        """Ask each benchmark `eval.trials` times.

        Returns metrics by name, "eval_accuracy/aime24": the mean reward, EM and F1 of short answers
        (`published_metrics`), turns of a rollout, and failed rollouts, where there are some.
        """
        metrics: dict[str, float] = {}
        for name, tasks in self.benchmarks.items():
            found = self._ask(name, tasks, step)
            short = _mean_metrics(found.trajectories, self.components.world)
            named = {"accuracy": found.stats.reward_mean, **short, "turns": found.stats.turns_mean}
            if found.stats.failed_rollouts:
                named["failed"] = float(found.stats.failed_rollouts)
            metrics |= {f"eval_{key}/{name}": value for key, value in named.items()}
        return metrics

    def compare(self) -> tuple[dict[str, Any], tuple[Trajectory, ...]]:
        """Roll out every split, sampled and greedy.

        Returns the comparison for summary.json, with the benchmarks' metrics where there are some,
        and the sampled rollouts of the main split.
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
        if self.benchmarks:
            found["benchmarks"] = self.ask_benchmarks(-1)
        return found, main.trajectories

    def _ask(self, name: str, tasks: Sequence[Task], step: int) -> Evaluation:
        """Ask the questions of a benchmark, which are scored by its own rule and the judge."""
        config = self.components.config
        components = replace(self.components, config=with_rules_of(config, family(tasks[0])))
        temperature = config.eval.temperature
        agent = components.make_agent(self.engines, config.agent.eval_max_turns, temperature)
        with closing(agent):
            return evaluate(
                agent,
                tasks,
                derive_seed(config.run.seed, "eval", name, step),
                tool_names=config.agent.tools,
                world=self.components.world,
                max_in_flight=config.rollout.max_in_flight,
                judge=self.judge,
                samplers=self.samplers,
                trials=config.eval.trials,
            )

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


def family(task: Task) -> str:
    """Return the value of `tasks.name` whose rules fit the task, for modules that go by rules."""
    return "gameof24" if task.scorer == "gameof24" else "file"


def with_rules_of(config: Config, name: str) -> Config:
    """Return the config with the rules of another family of tasks."""
    return config.model_copy(update={"tasks": config.tasks.model_copy(update={"name": name})})


def load_benchmarks(config: Config) -> dict[str, tuple[Task, ...]]:
    """Load the questions of `eval.benchmarks`, by name.

    Raises UserError for what is unknown or missing, and for a scorer that does not exist or cannot
    use a task's answers.
    """
    found = {}
    for benchmark in parse_benchmarks(config.eval.benchmarks):
        tasks = benchmark.load(config.tasks.benchmarks)
        found[benchmark.name] = tuple(tasks[: config.eval.rows or benchmark.num_rows])
    every = [task for tasks in found.values() for task in tasks]
    score([Group(0, tuple(Trajectory(task, (), "", 0.0, 0) for task in every))])
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
    trials: int = 1,
) -> Evaluation:
    """Roll out each task `trials` times on the `samplers` (None: all ranks); collective over
    `world`.
    """
    ranks = samplers or world
    groups = collect(
        agent,
        tasks,
        group_size=trials,
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


def _mean_metrics(trajectories: Sequence[Trajectory], world: World) -> dict[str, float]:
    """Mean EM and F1 of the short answers that did not fail; {} without any; collective."""
    found = [
        published_metrics(each.task, final_answer(each.answer)[-MAX_CHARS:])
        for each in trajectories
        if not each.error
    ]
    short = [metrics for metrics in found if metrics]
    num, *sums = world.sum(
        [len(short), *(math.fsum(each[name] for each in short) for name in ("em", "f1"))]
    )
    return {name: total / num for name, total in zip(("em", "f1"), sums, strict=True) if num}


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
