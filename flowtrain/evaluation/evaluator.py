"""Evaluation of the policy in training: on held-out tasks, and on benchmarks."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from flowtrain.agents.base import Agent
from flowtrain.agents.collect import collect
from flowtrain.config import Config, Reward
from flowtrain.dataflow.contract import EvalSettings
from flowtrain.engines.protocol import Engine
from flowtrain.evaluation.benchmark_metrics import mean_metrics, pass_metrics
from flowtrain.evaluation.parts import Parts
from flowtrain.metrics.rollouts import RolloutStats
from flowtrain.rewards import Judge, RewardFunctions, score
from flowtrain.rewards.scorers import check
from flowtrain.tasks.benchmarks import parse_benchmarks
from flowtrain.tasks.sets import MAIN_SPLIT
from flowtrain.training.world import World
from flowtrain.types import Task, Trajectory
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.waiting import waiting

_log = logging.getLogger(__name__)
_MOST_OUT_OF_TIME = 0.1
"""Share of rollouts above which an evaluation warns."""
_LOGGED = ("eval_reward", "eval_reward_error")


@dataclass(frozen=True, slots=True)
class Part:
    """Questions that an evaluation asks in one way."""

    name: str
    """Unique among those after a step; that of a benchmark is the benchmark's."""
    tasks: Sequence[Task]
    seed: int
    settings: EvalSettings


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results over all ranks; `trajectories` are this rank's."""

    stats: RolloutStats
    by_num_turns: dict[str, float]
    """Mean reward by the turns that a question needs."""
    by_kind: dict[str, float]
    trajectories: tuple[Trajectory, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """Return the reward with its standard error."""
        reward, error = self.stats.reward_mean, self.stats.reward_error
        return {"eval_reward": reward, "eval_reward_error": error}

    @classmethod
    def of(
        cls,
        tasks: Sequence[Task],
        trajectories: tuple[Trajectory, ...],
        tool_names: Sequence[str],
        world: World,
    ) -> Evaluation:
        """Compute the results from this rank's scored rollouts of all `tasks`; collective."""
        return cls(
            RolloutStats.of(trajectories, tool_names, world),
            _mean_by(lambda task: str(task.num_turns), tasks, trajectories, world),
            _mean_by(lambda task: task.kind, tasks, trajectories, world),
            trajectories,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Findings of an evaluation in training, over all ranks."""

    held_out: Evaluation
    """Of the main split."""
    benchmarks: Mapping[str, float]
    """Metrics of `Evaluator.benchmark_metrics`."""
    versions: Mapping[str, float] = field(default_factory=dict)
    """Metrics of `version_metrics`, where nodes sampled."""

    @property
    def metrics(self) -> dict[str, float]:
        """Return what the log of a step gets."""
        return {**self.held_out.metrics, **self.benchmarks, **self.versions}


Found = Mapping[str, tuple[Trajectory, ...]]
"""This rank's scored rollouts of each part, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Measures the policy on the held-out splits; collective over `world`."""

    components: Parts
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

    def parts(self, step: int) -> list[Part]:
        """Return what is asked after `step`: the main split and the benchmarks; at a given step
        always with the same random numbers.
        """
        return [self._split(MAIN_SPLIT, step), *self.benchmark_parts(step)]

    def parts_of_ends(self) -> list[Part]:
        """Return what is asked before and after training: every split, sampled and greedy, and the
        benchmarks.
        """
        splits = self.components.tasks.held_out
        return [
            *(self._split(split, -1) for split in splits),
            *(self._split(split, -1, temperature=0.0) for split in splits),
            *self.benchmark_parts(-1),
        ]

    def evaluate(self, step: int) -> Measured:
        """Roll out what is asked after `step` with the engines of this run, and measure it."""
        return self.measured(step, self.roll_out(self.parts(step)))

    def roll_out(self, parts: Sequence[Part]) -> Found:
        """Roll out the questions with the engines of this run."""
        return {part.name: self._roll_out(part) for part in parts}

    def measured(
        self, step: int, found: Found, versions: Mapping[str, float] | None = None
    ) -> Measured:
        """Compute what rollouts of `parts(step)` show; `versions` as in `Measured`."""
        held_out = self._held_out(self._split(MAIN_SPLIT, step), found)
        benchmarks = self.benchmark_metrics(self.benchmark_parts(step), found)
        return Measured(held_out, benchmarks, versions or {})

    def benchmark_metrics(self, parts: Sequence[Part], found: Found) -> dict[str, float]:
        """Compute metrics by name, "eval_accuracy/aime24": the mean reward, pass@k of several
        trials, EM and F1 of short answers (`published_metrics`), turns of a rollout, and failed
        rollouts, where there are some.
        """
        metrics: dict[str, float] = {}
        world = self.components.world
        for part in parts:
            result = self._result(part, found)
            own, stats = result.trajectories, result.stats
            several = pass_metrics(own, part.settings.trials, world)
            short = mean_metrics(own, world)
            named = {"accuracy": stats.reward_mean, **several, **short, "turns": stats.turns_mean}
            if stats.failed_rollouts:
                named["failed"] = float(stats.failed_rollouts)
            metrics |= {f"eval_{key}/{part.name}": value for key, value in named.items()}
        return metrics

    def compared(self, found: Found) -> dict[str, Any]:
        """Compute the comparison for summary.json from rollouts of `parts_of_ends`, with the
        benchmarks' metrics where there are some.
        """
        splits = self.components.tasks.held_out
        sampled, greedy = (
            {split: self._held_out(self._split(split, -1, t), found) for split in splits}
            for t in (None, 0.0)
        )
        main = sampled[MAIN_SPLIT]
        summary = {
            **main.metrics,
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
            summary["benchmarks"] = self.benchmark_metrics(self.benchmark_parts(-1), found)
        return summary

    @staticmethod
    def logged(compared: Mapping[str, Any]) -> dict[str, float]:
        """Return what the log gets of a comparison."""
        own = {name: compared[name] for name in _LOGGED if name in compared}
        return {**own, **compared.get("benchmarks", {}), **compared.get("versions", {})}

    def _split(self, split: str, step: int, temperature: float | None = None) -> Part:
        config, tasks = self.components.config, self.components.tasks.held_out[split]
        name = held_out_name(split, temperature)
        settings = EvalSettings(config.agent.eval_max_turns, temperature)
        return Part(name, tasks, derive_seed(config.run.seed, "eval", step), settings)

    def benchmark_parts(self, step: int) -> list[Part]:
        """Return what of an evaluation after `step` asks benchmarks: each question `eval.trials`
        times, scored by its own rule and the judge.
        """
        config = self.components.config
        return [
            Part(
                name,
                tasks,
                derive_seed(config.run.seed, "eval", name, step),
                EvalSettings(
                    config.agent.eval_max_turns,
                    config.eval.temperature,
                    config.eval.trials,
                    is_benchmark=True,
                ),
            )
            for name, tasks in self.benchmarks.items()
        ]

    def _roll_out(self, part: Part) -> tuple[Trajectory, ...]:
        with closing(make_agent(self.components, self.engines, part.settings)) as agent:
            return roll_out(
                agent,
                part.tasks,
                part.seed,
                self.samplers,
                self.components.config.rollout.max_in_flight,
                judge=self.judge,
                scoring=scoring_of(self.components, part.settings),
                trials=part.settings.trials,
                name=part.name,
            )

    def _result(self, part: Part, found: Found) -> Evaluation:
        tool_names, world = tuple(self.components.tools), self.components.world
        return Evaluation.of(part.tasks, found[part.name], tool_names, world)

    def _held_out(self, part: Part, found: Found) -> Evaluation:
        """Compute the result of a split, and warn where many rollouts ran out of time."""
        result, config = self._result(part, found), self.components.config
        share = result.stats.out_of_time_share
        if share > _MOST_OUT_OF_TIME and self.components.world.is_main:
            _log.warning(
                "%s: %.0f%% of the rollouts ran out of time, or of the model's positions, "
                "which lowers the reward: see rollout.request_timeout_s=%g, in which a response "
                "also waits its turn, and rollout.max_in_flight=%d",
                part.name,
                100 * share,
                config.rollout.request_timeout_s,
                config.rollout.max_in_flight,
            )
        return result


def held_out_name(split: str, temperature: float | None = None) -> str:
    """Return the name of the part that asks a split, at each policy's temperature or greedily."""
    return f"held-out {split}" if temperature is None else f"held-out {split}, greedy"


def make_agent(components: Parts, engines: Mapping[str, Engine], settings: EvalSettings) -> Agent:
    """Build the agent of an evaluation; close it when done."""
    return components.make_agent(engines, settings.max_turns, settings.temperature)


def scoring_of(
    components: Parts, settings: EvalSettings
) -> tuple[RewardFunctions | None, Reward | None]:
    """Return the reward functions and the bounds of rewards of an evaluation; benchmarks have rules
    instead.
    """
    if settings.is_benchmark:
        return None, None
    return components.reward_functions, components.config.reward


def load_benchmarks(config: Config) -> dict[str, tuple[Task, ...]]:
    """Load the questions of `eval.benchmarks`, by name.

    Raises UserError for what is unknown or missing, and for a scorer that does not exist or cannot
    use a task's answers.
    """
    found = {}
    for benchmark in parse_benchmarks(config.eval.benchmarks):
        tasks = benchmark.load(config.tasks.benchmarks)
        found[benchmark.name] = tuple(tasks[: config.eval.rows or benchmark.num_rows])
        for task in found[benchmark.name]:
            check(task)
    return found


def roll_out(
    agent: Agent,
    tasks: Sequence[Task],
    seed: int,
    samplers: World,
    max_in_flight: int,
    *,
    judge: Judge | None = None,
    scoring: tuple[RewardFunctions | None, Reward | None] = (None, None),
    trials: int = 1,
    name: str = "evaluation",
) -> tuple[Trajectory, ...]:
    """Roll out each task of this rank `trials` times and score the rollouts.

    Who waits for long is told how many of `name` are done.
    """
    num_mine = len(range(max(samplers.rank, 0), len(tasks), samplers.size)) * trials
    with waiting(f"rollouts of {name}", samplers.rank == 0, total=num_mine) as tick:
        groups = collect(
            agent,
            tasks,
            group_size=trials,
            seed=seed,
            max_in_flight=max_in_flight,
            rank=samplers.rank,
            num_ranks=samplers.size,
            on_done=tick,
        )
        scored = score(groups, judge, *scoring)
    return tuple(trajectory for group in scored for trajectory in group.trajectories)


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
