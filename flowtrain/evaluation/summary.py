"""The numbers of an evaluation: accuracy with its spread and interval, EM and F1 of short answers,
pass@k, and what the rollouts were like; and those that AgentFlow's authors report, to set beside.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from flowtrain.evaluation.rollout_log import Entry
from flowtrain.logging.rollouts import RolloutStats, count_rollouts
from flowtrain.logging.tally import Tally
from flowtrain.records import Trajectory
from flowtrain.rewards.scorers import MAX_CHARS
from flowtrain.rewards.squad import published_metrics
from flowtrain.tasks.benchmarks import AGENTFLOW

CONFIDENCE = 0.95
_SHORT = ("em", "f1")
_HEADING = (
    *("planner", "budget", "benchmark", "questions", "mean %", "spread", "95% interval"),
    *("failed", "EM", "F1", "turns"),
)
_PERCENT = {
    "paper: 7B frozen": (58.4, 60.0, 51.3, 19.2, 17.2, 16.7, 47.4, 31.0, 37.0, 76.0),
    "paper: 7B Flow-GRPO": (69.6, 77.2, 57.0, 25.3, 33.1, 40.0, 61.5, 53.0, 47.0, 80.0),
}
PAPER = {
    label: dict(zip(AGENTFLOW, (value / 100 for value in row), strict=True))
    for label, row in _PERCENT.items()
}
"""Label -> benchmark -> accuracy that AgentFlow's authors report (arXiv 2510.05592, tables 1 to 3;
means of 3 trials): the planner is Qwen2.5-7B-Instruct, as it comes and trained."""


class PlannerBudget(NamedTuple):
    """A planner with a budget of turns."""

    planner: str
    max_turns: int


class Key(NamedTuple):
    """The name of a rollout within an evaluation; its line has these fields."""

    planner: str
    max_turns: int
    benchmark: str
    pid: str
    """Place in the benchmark's file, from 0; for files of the user's own the row's id."""
    trial: int
    """From 1."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A number of each rollout, averaged."""

    mean: float
    """Mean over trials of the mean of each."""
    by_trial: tuple[float, ...]
    """Mean of each trial."""
    spread: float | None
    """Standard deviation of the trials (divided by their number less 1); None for a single one."""

    @classmethod
    def of(cls, values: Iterable[tuple[int, float]]) -> Mean | None:
        """Average (trial, value) of some rollouts; None without any."""
        trials: dict[int, list[float]] = defaultdict(list)
        for trial, value in values:
            trials[trial].append(value)
        if not trials:
            return None
        by_trial = [statistics.fmean(trials[trial]) for trial in sorted(trials)]
        spread = statistics.stdev(by_trial) if len(by_trial) > 1 else None
        return cls(statistics.fmean(by_trial), tuple(by_trial), spread)

    @classmethod
    def of_all(cls, means: Sequence[Mean | None]) -> Mean | None:
        """Average benchmarks, each counting alike; None unless all are known, for the mean of some
        benchmarks is not that of all.
        """
        known = [mean for mean in means if mean is not None]
        if len(known) < len(means):
            return None
        return cls.of((trial, value) for mean in known for trial, value in enumerate(mean.by_trial))


@dataclass(frozen=True, slots=True)
class Score:
    """A planner with a turn limit on a benchmark. Only `num_failed` counts failed rollouts."""

    planner: str
    max_turns: int
    benchmark: str
    num_questions: int
    """Questions with at least one scored rollout."""
    num_failed: int
    """Rollouts that a frozen module or an engine could not finish."""
    accuracy: Mean | None
    """The reward; None when nothing was scored."""
    low: float | None
    """Wilson's interval around the accuracy, see `wilson`."""
    high: float | None
    em: Mean | None
    """SQuAD's exact match and F1; None where answers are no short texts."""
    f1: Mean | None
    seconds_mean: float
    """Per rollout, while others ran beside it."""
    frozen_tokens_mean: float
    """Prompts and replies of frozen models (modules, tools, judge, planner), per rollout."""
    cost: float
    """Price of all rollouts, by the prices in [engines]."""
    scored_by: dict[str, int]
    """Rollouts by the rule that decided."""
    stats: RolloutStats

    @classmethod
    def of(
        cls,
        system: PlannerBudget,
        benchmark: str,
        entries: Mapping[Key, Entry],
        tool_names: Sequence[str],
    ) -> Score:
        scored = {key: entry for key, entry in entries.items() if not entry.error}
        num_questions = len({key.pid for key in scored})
        accuracy = Mean.of((key.trial, entry.reward or 0.0) for key, entry in scored.items())
        low, high = wilson(accuracy.mean, num_questions) if accuracy else (None, None)
        em, f1 = (
            Mean.of((key.trial, e.metrics[name]) for key, e in scored.items() if name in e.metrics)
            for name in _SHORT
        )
        tally = Tally()
        for counts in (count_rollouts((), tool_names), *(e.counts for e in scored.values())):
            tally.add(counts)
        usages = [entry.usage for entry in scored.values()]
        num_scored = max(len(scored), 1)
        return cls(
            *system,
            benchmark,
            num_questions,
            len(entries) - len(scored),
            accuracy,
            low,
            high,
            em,
            f1,
            seconds_mean=sum(entry.seconds for entry in scored.values()) / num_scored,
            frozen_tokens_mean=sum(u.prompt_tokens + u.reply_tokens for u in usages) / num_scored,
            cost=math.fsum(entry.usage.cost for entry in entries.values()),
            scored_by=dict(Counter(entry.scored_by for entry in scored.values())),
            stats=RolloutStats.of_counts(tally.sums, tool_names),
        )


Rows = Mapping[PlannerBudget, Sequence[Score]]
"""The scores of each planner and budget, one for each benchmark."""


def summarise(
    entries: Mapping[Key, Entry],
    systems: Sequence[PlannerBudget],
    benchmarks: Sequence[str],
    tool_names: Sequence[str],
) -> Rows:
    """Sum the entries up by planner and budget of turns (`systems`), and by benchmark."""
    groups: dict[tuple[str, int, str], dict[Key, Entry]] = defaultdict(dict)
    for key, entry in entries.items():
        groups[key.planner, key.max_turns, key.benchmark][key] = entry
    return {
        system: [Score.of(system, name, groups[*system, name], tool_names) for name in benchmarks]
        for system in systems
    }


def wilson(share: float, num_questions: int) -> tuple[float, float]:
    """Compute Wilson's score interval of a mean of `num_questions` numbers from 0 to 1.

    The interval bounds the accuracy over all questions of this kind. The questions are the sample,
    whatever the number of trials: several trials or partial credit make the mean more exact than
    the interval says, never less.
    """
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    shrink = 1 + z * z / num_questions
    centre = (share + z * z / (2 * num_questions)) / shrink
    variance = share * (1 - share) / num_questions + (z / (2 * num_questions)) ** 2
    half_width = z / shrink * math.sqrt(variance)
    return max(0.0, centre - half_width), min(1.0, centre + half_width)


def as_json(rows: Rows) -> dict[str, Any]:
    """Build summary.json: all scores, and the average accuracy of each planner and budget."""
    averages = [
        {"planner": planner, "max_turns": limit, "accuracy": mean and asdict(mean)}
        for (planner, limit), scores in rows.items()
        for mean in [_average(scores)]
    ]
    scores = [asdict(score) for group in rows.values() for score in group]
    return {"scores": scores, "averages": averages}


def table(rows: Rows, references: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Make the table, the first row the heading: a line for each score, and one for the average of
    several benchmarks.

    Args:
        references: accuracies of other systems to show beside, by label and benchmark.
    """
    lines = [[*_HEADING, *references]]
    for (planner, limit), scores in rows.items():
        system = [planner, f"{limit} turn{'' if limit == 1 else 's'}"]
        for score in scores:
            cells = [
                *(score.benchmark, str(score.num_questions), *_with_spread(score.accuracy)),
                f"{_percent(score.low)} to {_percent(score.high)}",
                *(str(score.num_failed), _mean(score.em), _mean(score.f1)),
                f"{score.stats.turns_mean:.2f}",
            ]
            beside = [_percent(row.get(score.benchmark)) for row in references.values()]
            lines.append([*system, *cells, *beside])
        if len(scores) > 1:
            em, f1 = (Mean.of_all([getattr(score, name) for score in scores]) for name in _SHORT)
            cells = ["average", "", *_with_spread(_average(scores)), "", ""]
            beside = [_percent(_mean_of(row, scores)) for row in references.values()]
            lines.append([*system, *cells, _mean(em), _mean(f1), "", *beside])
    return lines


def _average(scores: Sequence[Score]) -> Mean | None:
    return Mean.of_all([score.accuracy for score in scores])


def _mean_of(accuracies: Mapping[str, float], scores: Sequence[Score]) -> float | None:
    """Average a reference's accuracies; None unless it has all of the benchmarks."""
    known = [accuracies[score.benchmark] for score in scores if score.benchmark in accuracies]
    return statistics.fmean(known) if len(known) == len(scores) else None


def _with_spread(mean: Mean | None) -> list[str]:
    return [_mean(mean), _percent(None if mean is None else mean.spread)]


def _mean(mean: Mean | None) -> str:
    return _percent(None if mean is None else mean.mean)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """Estimate pass@k from `num` answers to a question, of which `num_right` are right, without
    bias: 1 - C(num - num_right, k) / C(num, k), the share of all sets of k answers with a right one
    (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    assert 0 <= num_right <= num and 1 <= k <= num, (num, num_right, k)
    return 1.0 - math.comb(num - num_right, k) / math.comb(num, k)


def count_passes(tally: Tally, trajectories: Sequence[Trajectory], trials: int) -> None:
    """Add "pass_at_2", "pass_at_4", ... and that of all trials, as means over questions; nothing
    for a single trial.

    An answer is right with the reward 1. A question counts where at least k of its rollouts did not
    fail.
    """
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.reward is not None:
            rewards[trajectory.task.id].append(trajectory.reward)
    powers = [2**n for n in range(1, trials.bit_length())]
    for k in sorted({*powers, trials} - {1}):
        for question_rewards in rewards.values():
            if len(question_rewards) >= k:
                num_right = sum(reward >= 1 for reward in question_rewards)
                tally.mean(f"pass_at_{k}", pass_at_k(len(question_rewards), num_right, k), 1)


def short_metrics(trajectory: Trajectory) -> dict[str, float]:
    """Compute EM and F1 of a short answer; {} for other answers."""
    return published_metrics(trajectory.task, trajectory.answer[-MAX_CHARS:])
