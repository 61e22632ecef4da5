"""The numbers of an evaluation, from its records: accuracy with its spread and interval, and what
the rollouts were like.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flowtrain.evals.records import Entry
from flowtrain.report import aligned
from flowtrain.run.rollout_stats import RolloutStats

CONFIDENCE = 0.95


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


def summarise(entries: Iterable[Entry], tool_names: Sequence[str]) -> list[Score]:
    """Compute one score per benchmark, in the order of the entries."""
    by_benchmark: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_benchmark[entry.key[0]].append(entry)
    return [_score(benchmark, some, tool_names) for benchmark, some in by_benchmark.items()]


def _score(benchmark: str, entries: Sequence[Entry], tool_names: Sequence[str]) -> Score:
    scored = [entry for entry in entries if not entry.error]
    rewards: dict[int, list[float]] = defaultdict(list)
    for entry in scored:
        rewards[entry.key[2]].append(entry.outcome.reward or 0.0)
    by_trial = tuple(statistics.fmean(rewards[trial]) for trial in sorted(rewards))
    num_questions = len({entry.key[1] for entry in scored})
    accuracy = statistics.fmean(by_trial) if by_trial else None
    low, high = (None, None) if accuracy is None else wilson(accuracy, num_questions)
    stats = RolloutStats.of_outcomes((entry.outcome for entry in scored), tool_names)
    return Score(
        benchmark,
        num_questions,
        accuracy,
        by_trial,
        statistics.stdev(by_trial) if len(by_trial) > 1 else None,
        low,
        high,
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


def as_json(scores: Sequence[Score]) -> dict[str, Any]:
    """Build summary.json: scores by benchmark, and their mean, each counting alike."""
    known = [score.accuracy for score in scores if score.accuracy is not None]
    return {
        "accuracy": statistics.fmean(known) if known else None,
        "benchmarks": {score.benchmark: asdict(score) for score in scores},
    }


def table(scores: Sequence[Score], references: Mapping[str, Mapping[str, float]]) -> str:
    """Format two tables: accuracies beside those of other systems, by label and benchmark; and the
    rollouts.
    """
    heading = ["accuracy [%]", "questions", "mean", "spread", "95% interval", "failed", *references]
    first = [heading, *(_accuracy_row(score, references) for score in scores)]
    if len(scores) > 1:
        means = [_percent(_mean(score.accuracy for score in scores)), "", "", ""]
        first.append(
            [
                "mean",
                "",
                *means,
                *(
                    _percent(_mean(named.get(s.benchmark) for s in scores))
                    for named in references.values()
                ),
            ]
        )
    tools = list(scores[0].stats.tool_shares)
    second = [
        [
            "a rollout",
            "turns",
            "seconds",
            "tokens",
            "frozen tokens",
            "cost",
            "cut off %",
            "malformed %",
            "tool errors %",
            *(f"{name} %" for name in tools),
        ]
    ]
    second += [_rollout_row(score) for score in scores]
    return f"{aligned(first)}\n{aligned(second)}"


def _accuracy_row(score: Score, references: Mapping[str, Mapping[str, float]]) -> list[str]:
    interval = f"{_percent(score.low)} to {_percent(score.high)}"
    numbers = [
        str(score.num_questions),
        _percent(score.accuracy),
        _percent(score.spread),
        interval,
        str(score.num_failed),
    ]
    return [
        score.benchmark,
        *numbers,
        *(_percent(named.get(score.benchmark)) for named in references.values()),
    ]


def _rollout_row(score: Score) -> list[str]:
    stats = score.stats
    cut_off = stats.out_of_turns_share + stats.out_of_time_share
    shares = [cut_off, stats.malformed_share, stats.tool_error_share, *stats.tool_shares.values()]
    means = [
        f"{stats.turns_mean:.2f}",
        f"{score.seconds_mean:.2f}",
        f"{score.tokens_mean:.0f}",
        f"{score.frozen_tokens_mean:.0f}",
    ]
    means.append(f"{score.cost / max(stats.num_rollouts, 1):.4f}" if score.cost else "-")
    return [score.benchmark, *means, *map(_percent, shares)]


def _mean(values: Iterable[float | None]) -> float | None:
    """Average the values; None unless all are known, for the mean of some benchmarks is not that of
    all.
    """
    known = list(values)
    return (
        statistics.fmean(value for value in known if value is not None)
        if None not in known
        else None
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
