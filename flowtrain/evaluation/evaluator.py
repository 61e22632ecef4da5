"""Evaluation of the policy in training: on held-out tasks, and on benchmarks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowtrain.agents.base import Agent
from flowtrain.agents.collect import collect
from flowtrain.evaluation.summary import count_passes, short_metrics
from flowtrain.inference.protocol import Engine
from flowtrain.logging.rollouts import RolloutStats, count_rollouts
from flowtrain.logging.tally import Tally
from flowtrain.records import Task, Trajectory
from flowtrain.rewards import score
from flowtrain.rollouts.contract import EvalSettings
from flowtrain.tasks.sets import MAIN_SPLIT
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.waiting import waiting

_log = logging.getLogger(__name__)
_MAX_LIMITED_SHARE = 0.1
"""Share of rollouts above which an evaluation warns."""


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
    means: Mapping[str, float]
    """Mean reward by the turns that a question needs ("num_turns/2") and by kind ("kind/sum");
    "pass_at_2" and the like of several trials, "em" and "f1" of short answers.
    """
    trajectories: tuple[Trajectory, ...]

    @classmethod
    def of(
        cls,
        part: Part,
        trajectories: tuple[Trajectory, ...],
        tool_names: Sequence[str],
        world: World,
    ) -> Evaluation:
        """Compute the results from this rank's scored rollouts of a part; collective."""
        tally = Tally()
        tally.add(count_rollouts(trajectories, tool_names))
        for task in part.tasks:  # a label without a finished rollout counts as 0
            for label in _labels(task):
                tally.mean(label, 0.0, 0)
        for trajectory in trajectories:
            if trajectory.reward is not None:
                rewards = dict.fromkeys(_labels(trajectory.task), trajectory.reward)
                for name, value in {**rewards, **short_metrics(trajectory)}.items():
                    tally.mean(name, value, 1)
        count_passes(tally, trajectories, part.settings.trials)
        total = tally.of_all(world)
        stats = RolloutStats.of_counts(total.sums, tool_names)
        return cls(stats, total.all_means(), trajectories)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the reward with its standard error."""
        return {"eval_reward": self.stats.reward_mean, "eval_reward_error": self.stats.reward_error}

    def by(self, label: str) -> dict[str, float]:
        """Return the mean reward by "num_turns" or "kind"."""
        means_by_label = {name.partition("/"): value for name, value in sorted(self.means.items())}
        return {value: mean for (name, _, value), mean in means_by_label.items() if name == label}


def _labels(task: Task) -> tuple[str, str]:
    return f"num_turns/{task.num_turns}", f"kind/{task.kind}"


class Measured(NamedTuple):
    """Findings of an evaluation in training, over all ranks."""

    metrics: dict[str, float]
    """For the log of a step."""
    held_out: tuple[Trajectory, ...]
    """This rank's rollouts of the main split."""


PartRollouts = Mapping[str, tuple[Trajectory, ...]]
"""This rank's scored rollouts of each part, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Measures the policy on the held-out splits; collective over `world`."""

    components: RunComponents
    engines: Mapping[str, Engine]
    benchmarks: Mapping[str, Sequence[Task]]
    """The questions of `eval.benchmarks`, by name."""

    def is_due(self, step: int) -> bool:
        """Return whether `eval.every` asks for an evaluation after `step`."""
        interval = self.components.config.eval.every
        return interval > 0 and step % interval == 0

    def parts(self, step: int) -> list[Part]:
        """Return what is asked after `step`: the main split and the benchmarks; at a given step
        always with the same random numbers.
        """
        return [self._split(MAIN_SPLIT, step), *self.benchmark_parts(step)]

    def parts_of_ends(self) -> list[Part]:
        """Return the parts before and after training: all splits, sampled and greedy, and
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

    def roll_out(self, parts: Sequence[Part]) -> PartRollouts:
        """Roll out the questions with the engines of this run."""
        return {part.name: self._roll_out(part) for part in parts}

    def measured(
        self, step: int, rollouts: PartRollouts, versions: Mapping[str, float] | None = None
    ) -> Measured:
        """Return the findings of rollouts of `parts(step)`; `versions`: of `version_metrics`, if
        any.
        """
        results = self.results(self.parts(step), rollouts)
        main = results[held_out_name(MAIN_SPLIT)]
        metrics = {**main.metrics, **self.benchmark_metrics(results), **(versions or {})}
        return Measured(metrics, main.trajectories)

    def results(self, parts: Sequence[Part], rollouts: PartRollouts) -> dict[str, Evaluation]:
        """Compute the result of each part, by its name."""
        tool_names, world = tuple(self.components.tools), self.components.world
        results = {
            part.name: Evaluation.of(part, rollouts[part.name], tool_names, world) for part in parts
        }
        for part in parts:
            if not part.settings.is_benchmark:
                self._warn_of_limits(part.name, results[part.name].stats)
        return results

    def benchmark_metrics(self, results: Mapping[str, Evaluation]) -> dict[str, float]:
        """Compute metrics by name, "eval_accuracy/aime24": the mean reward, pass@k of several
        trials, EM and F1 of short answers (`published_metrics`), turns of a rollout, and failed
        rollouts, where there are some.
        """
        metrics: dict[str, float] = {}
        for name in self.benchmarks:
            stats = results[name].stats
            means = {n: mean for n, mean in results[name].means.items() if "/" not in n}
            values = {"accuracy": stats.reward_mean, **means, "turns": stats.turns_mean}
            if stats.failed_rollouts:
                values["failed"] = float(stats.failed_rollouts)
            metrics |= {f"eval_{key}/{name}": value for key, value in values.items()}
        return metrics

    def compared(self, rollouts: PartRollouts) -> dict[str, Any]:
        """Compute the comparison for summary.json from rollouts of `parts_of_ends`, with the
        benchmarks' metrics where there are some.
        """
        results = self.results(self.parts_of_ends(), rollouts)
        sampled, greedy = (
            {split: results[held_out_name(split, t)] for split in self.components.tasks.held_out}
            for t in (None, 0.0)
        )
        main = sampled[MAIN_SPLIT]
        summary = {
            **main.metrics,
            "eval_reward_greedy": greedy[MAIN_SPLIT].stats.reward_mean,
            "by_num_turns": main.by("num_turns"),
            "by_kind": main.by("kind"),
            "tool_shares": main.stats.tool_shares,
            "turns_mean": main.stats.turns_mean,
            "splits": {
                split: {
                    "sampled": result.stats.reward_mean,
                    "greedy": greedy[split].stats.reward_mean,
                    "by_num_turns": result.by("num_turns"),
                }
                for split, result in sampled.items()
            },
        }
        if self.benchmarks:
            summary["benchmarks"] = self.benchmark_metrics(results)
        return summary

    @staticmethod
    def logged(compared: Mapping[str, Any]) -> dict[str, float]:
        """Return what the log gets of a comparison."""
        rewards = {name: compared[name] for name in ("eval_reward", "eval_reward_error")}
        return {**rewards, **compared.get("benchmarks", {}), **compared.get("versions", {})}

    def _split(self, split: str, step: int, temperature: float | None = None) -> Part:
        config, tasks = self.components.config, self.components.tasks.held_out[split]
        name = held_out_name(split, temperature)
        settings = EvalSettings(config.agent.eval_max_turns, temperature)
        return Part(name, tasks, derive_seed(config.run.seed, "eval", step), settings)

    def benchmark_parts(self, step: int) -> list[Part]:
        """Return the parts of an evaluation after `step` that ask benchmarks: each question
        `eval.trials` times, scored by its own rule and the judge.
        """
        config = self.components.config
        limit, options = config.agent.eval_max_turns, config.eval
        settings = EvalSettings(limit, options.temperature, options.trials, is_benchmark=True)
        return [
            Part(name, tasks, derive_seed(config.run.seed, "eval", name, step), settings)
            for name, tasks in self.benchmarks.items()
        ]

    def _roll_out(self, part: Part) -> tuple[Trajectory, ...]:
        components, settings = self.components, part.settings
        agent = components.make_agent(self.engines, settings.max_turns, settings.temperature)
        with closing(agent):
            return roll_out(components, agent, part.tasks, part.seed, part.name, settings)

    def _warn_of_limits(self, name: str, stats: RolloutStats) -> None:
        """Warn where many rollouts of a split ran out of time, or of positions."""
        rollout = self.components.config.rollout
        cures = {
            "time": (
                stats.out_of_time_share,
                f"see rollout.request_timeout_s={rollout.request_timeout_s:g}, which includes the "
                f"wait for a free slot, and rollout.max_in_flight={rollout.max_in_flight}",
            ),
            "the model's positions": (
                stats.out_of_positions_share,
                "see max_position_embeddings in its config.json, agent.max_result_chars and "
                "agent.memory_tokens",
            ),
        }
        for limit, (share, cure) in cures.items():
            if share > _MAX_LIMITED_SHARE and self.components.world.is_main:
                arguments = (name, 100 * share, limit, cure)
                _log.warning("%s: %.0f%% of the rollouts ran out of %s: %s", *arguments)


def held_out_name(split: str, temperature: float | None = None) -> str:
    """Return the name of the part that asks a split, at each policy's temperature or greedily."""
    return f"held-out {split}" if temperature is None else f"held-out {split}, greedy"


def roll_out(
    components: RunComponents,
    agent: Agent,
    tasks: Sequence[Task],
    seed: int,
    name: str,
    settings: EvalSettings | None = None,
) -> tuple[Trajectory, ...]:
    """Roll out each task of this rank, once or as often as the `settings` of an evaluation say, and
    score the rollouts.

    Who waits for long is told how many of `name` are done.
    """
    samplers, trials = components.placement.samplers, settings.trials if settings else 1
    num_rollouts = len(range(max(samplers.rank, 0), len(tasks), samplers.size)) * trials
    with waiting(f"rollouts of {name}", samplers.rank == 0, total=num_rollouts) as on_rollout:
        groups = collect(
            agent,
            tasks,
            group_size=trials,
            seed=seed,
            max_in_flight=components.config.rollout.max_in_flight,
            rank=samplers.rank,
            num_ranks=samplers.size,
            on_done=on_rollout,
        )
        is_benchmark = settings is not None and settings.is_benchmark
        scored = score(groups, *components.scoring(is_benchmark))
    return tuple(trajectory for group in scored for trajectory in group.trajectories)
