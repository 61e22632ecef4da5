"""The numbers of an evaluation, from its records: accuracy with its spread and interval, other
metrics of short answers, and what the rollouts were like.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flowtrain.evals.records import Entry
from flowtrain.metrics.rollouts import RolloutStats

CONFIDENCE = 0.95
METRICS = ("em", "f1", "judge")
"""Metrics of short answers, see `records.rollout_record`."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A number of each rollout, averaged."""

    mean: float
    """Mean over trials of the mean of each."""
    by_trial: tuple[float, ...]
    """Mean of each trial."""
    spread: float | None
    """Standard deviation of the trials (divided by their number less 1); None for a single one."""
    num_rollouts: int

    @classmethod
    def of(cls, values: Iterable[tuple[int, float]]) -> Mean | None:
        """Average (trial, value) of some rollouts; None without any."""
        trials: dict[int, list[float]] = defaultdict(list)
        for trial, value in values:
            trials[trial].append(value)
        if not trials:
            return None
        by_trial = tuple(statistics.fmean(trials[trial]) for trial in sorted(trials))
        return cls(
            statistics.fmean(by_trial), by_trial, _spread(by_trial), sum(map(len, trials.values()))
        )


@dataclass(frozen=True, slots=True)
class Score:
    """One benchmark. Failed rollouts are in `num_failed` and nowhere else."""

    benchmark: str
    num_questions: int
    """Questions with at least one scored rollout."""
    accuracy: float | None
    """Mean over trials of the mean reward; None when nothing was scored."""
    by_trial: tuple[float, ...]
    """Mean reward of each trial."""
    spread: float | None
    """Standard deviation of the trials (divided by their number less 1); None for a single one."""
    low: float | None
    """Wilson's interval around the accuracy, see `wilson`."""
    high: float | None
    metrics: dict[str, Mean]
    """Those of `METRICS` that some rollouts have."""
    num_failed: int
    """Rollouts that a frozen module or an engine could not finish."""
    seconds_mean: float
    """Per rollout, while others ran beside it."""
    tokens_mean: float
    """The policy's prompts and responses, per rollout."""
    frozen_tokens_mean: float
    """Prompts and replies of frozen models (modules, tools, judge, a frozen planner), per rollout.
    """
    cost: float
    """Price of all rollouts, by the prices in [engines]."""
    scored_by: dict[str, int]
    """Rollouts by the rule that decided."""
    stats: RolloutStats


@dataclass(frozen=True, slots=True)
class Row:
    """A planner with a budget of turns."""

    planner: str
    max_turns: int
    scores: tuple[Score, ...]
    """One per benchmark."""

    @property
    def accuracy(self) -> float | None:
        """The mean of all benchmarks, each counting alike; None unless all are known."""
        return mean_of_all(score.accuracy for score in self.scores)

    @property
    def spread(self) -> float | None:
        """The standard deviation of the trials' means over all benchmarks; None for one trial."""
        trials = {len(score.by_trial) for score in self.scores}
        if len(trials) > 1:
            return None
        by_trial = zip(*(score.by_trial for score in self.scores), strict=True)
        return _spread([statistics.fmean(trial) for trial in by_trial])


def summarise(
    entries: Iterable[Entry],
    rows: Sequence[tuple[str, int]],
    benchmarks: Sequence[str],
    tool_names: Sequence[str],
) -> list[Row]:
    """Sum the entries up by planner and budget of turns (`rows`), and by benchmark."""
    found: dict[tuple[str, int, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        found[entry.key.planner, entry.key.max_turns, entry.key.benchmark].append(entry)
    return [
        Row(
            planner,
            limit,
            tuple(_score(name, found[planner, limit, name], tool_names) for name in benchmarks),
        )
        for planner, limit in rows
    ]


def _score(benchmark: str, entries: Sequence[Entry], tool_names: Sequence[str]) -> Score:
    scored = [entry for entry in entries if not entry.error]
    rewards = Mean.of((entry.key.trial, entry.outcome.reward or 0.0) for entry in scored)
    metrics = {
        name: Mean.of((e.key.trial, e.metrics[name]) for e in scored if name in e.metrics)
        for name in METRICS
    }
    num_questions = len({entry.key.pid for entry in scored})
    low, high = (None, None) if rewards is None else wilson(rewards.mean, num_questions)
    stats = RolloutStats.of_outcomes((entry.outcome for entry in scored), tool_names)
    return Score(
        benchmark,
        num_questions,
        rewards.mean if rewards else None,
        rewards.by_trial if rewards else (),
        rewards.spread if rewards else None,
        low,
        high,
        metrics={name: mean for name, mean in metrics.items() if mean is not None},
        num_failed=len(entries) - len(scored),
        seconds_mean=statistics.fmean(entry.seconds for entry in scored) if scored else 0.0,
        tokens_mean=stats.turns_mean * (stats.prompt_len_mean + stats.response_len_mean),
        frozen_tokens_mean=statistics.fmean(
            e.usage.prompt_tokens + e.usage.reply_tokens for e in scored
        )
        if scored
        else 0.0,
        cost=math.fsum(entry.usage.cost for entry in entries),
        scored_by=dict(Counter(entry.scored_by for entry in scored)),
        stats=stats,
    )


def wilson(share: float, num_questions: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Compute Wilson's score interval of a mean of `num_questions` numbers from 0 to 1.

    It says how far the accuracy may be from that over all questions of the kind. The questions are
    the sample, however many trials each had: several trials, or partial credit, make the mean more
    exact than the interval says, never less.
    """
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    shrink = 1 + z * z / num_questions
    centre = (share + z * z / (2 * num_questions)) / shrink
    half = (
        z
        / shrink
        * math.sqrt(
            share * (1 - share) / num_questions + z * z / (4 * num_questions * num_questions)
        )
    )
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_of_all(values: Iterable[float | None]) -> float | None:
    """Average the values; None unless all are known, for the mean of some benchmarks is not that of
    all.
    """
    known = list(values)
    return (
        statistics.fmean(value for value in known if value is not None)
        if known and None not in known
        else None
    )


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Build summary.json: for each planner and budget of turns the mean accuracy, each benchmark
    counting alike, and the scores by benchmark.
    """
    return {
        "rows": [
            {
                "planner": row.planner,
                "max_turns": row.max_turns,
                "accuracy": row.accuracy,
                "spread": row.spread,
                "benchmarks": {score.benchmark: asdict(score) for score in row.scores},
            }
            for row in rows
        ]
    }


def _spread(by_trial: Sequence[float]) -> float | None:
    return statistics.stdev(by_trial) if len(by_trial) > 1 else None
