"""The tables of an evaluation: cells as text, the first row the heading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flowtrain.evals.summary import METRICS, Mean, Row, Score, mean_of_all

References = Mapping[str, Mapping[str, float]]
"""Accuracies of other systems, by label and benchmark."""
Table = list[list[str]]
_TITLES = {"em": "EM", "f1": "F1", "judge": "judge"}


def tables(rows: Sequence[Row], references: References) -> list[Table]:
    """Make the tables of one system by benchmark, or of several beside each other."""
    if len(rows) == 1:
        return [_one_system(rows[0], references), _rollouts(rows[0])]
    return [*_several_systems(rows, references)]


def system_label(planner: str, max_turns: int) -> str:
    """Name a planner with its budget of turns."""
    return f"{planner}, {max_turns} turn{'' if max_turns == 1 else 's'}"


# ---- one system


def _one_system(row: Row, references: References) -> Table:
    """Make a line per benchmark: accuracy beside that of other systems, and other metrics."""
    names = [name for name in METRICS if any(name in score.metrics for score in row.scores)]
    titles = [_TITLES[name] for name in names]
    heading = ["accuracy [%]", "questions", "mean", "spread", "95% interval", "failed", *titles]
    table = [[*heading, *references]]
    for score in row.scores:
        metrics = [_mean(score.metrics.get(name)) for name in names]
        others = [_percent(named.get(score.benchmark)) for named in references.values()]
        table.append([*_accuracy(score), *metrics, *others])
    if len(row.scores) > 1:
        metrics = [_percent(_metric_average(row, name)) for name in names]
        others = [
            _percent(mean_of_all(named.get(score.benchmark) for score in row.scores))
            for named in references.values()
        ]
        table.append(["mean", "", _percent(row.accuracy), "", "", "", *metrics, *others])
    return table


def _accuracy(score: Score) -> list[str]:
    return [
        score.benchmark,
        str(score.num_questions),
        _percent(score.accuracy),
        _percent(score.spread),
        f"{_percent(score.low)} to {_percent(score.high)}",
        str(score.num_failed),
    ]


def _rollouts(row: Row) -> Table:
    """Make a line per benchmark about what the rollouts were like."""
    heading = ["a rollout", "turns", "seconds", "tokens", "frozen tokens", "cost", "cut off %"]
    tools = [f"{name} %" for name in row.scores[0].stats.tool_shares]
    return [
        [*heading, "malformed %", "tool errors %", *tools],
        *map(_rollout, row.scores),
    ]


def _rollout(score: Score) -> list[str]:
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


# ---- several systems


def _several_systems(rows: Sequence[Row], references: References) -> list[Table]:
    """Make a table per number, a line per system and a column per benchmark."""
    benchmarks = [score.benchmark for score in rows[0].scores]
    average = ["average"] if len(benchmarks) > 1 else []

    def table(title: str, cell: Callable[[Score], str], last: Callable[[Row], str] | None) -> Table:
        lines = [[_label(row), *map(cell, row.scores)] for row in rows]
        if last and average:
            lines = [[*line, last(row)] for line, row in zip(lines, rows, strict=True)]
        return [[title, *benchmarks, *(average if last else [])], *lines]

    accuracy = table(
        "accuracy [%]",
        lambda score: _with_spread(score.accuracy, score.spread),
        lambda row: _with_spread(row.accuracy, row.spread),
    )
    for label, named in references.items():
        known = [named.get(name) for name in benchmarks]
        means = [_percent(mean_of_all(known))] if average else []
        accuracy.append([label, *map(_percent, known), *means])
    found = [accuracy]
    for name in METRICS:
        if any(name in score.metrics for row in rows for score in row.scores):
            found.append(_metric_table(rows, name))
    found.append(table("turns of a rollout", lambda score: f"{score.stats.turns_mean:.2f}", None))
    if any(score.num_failed for row in rows for score in row.scores):
        found.append(table("failed rollouts", lambda score: str(score.num_failed), None))
    return found


def _metric_table(rows: Sequence[Row], name: str) -> Table:
    """Make the table of a metric, with the benchmarks that have it."""
    having = [
        score.benchmark
        for number, score in enumerate(rows[0].scores)
        if any(name in row.scores[number].metrics for row in rows)
    ]
    table = [[f"{_TITLES[name]} [%]", *having, *(["average"] if len(having) > 1 else [])]]
    for row in rows:
        means = [score.metrics.get(name) for score in row.scores if score.benchmark in having]
        average = mean_of_all(None if mean is None else mean.mean for mean in means)
        table.append([_label(row), *map(_mean, means), *([_percent(average)] * (len(having) > 1))])
    return table


def _metric_average(row: Row, name: str) -> float | None:
    """Average a metric over the benchmarks of short answers; None unless all of them have it."""
    short = [score.metrics for score in row.scores if score.metrics]
    return mean_of_all(each[name].mean if name in each else None for each in short)


def _label(row: Row) -> str:
    return system_label(row.planner, row.max_turns)


def _mean(mean: Mean | None) -> str:
    return "-" if mean is None else _with_spread(mean.mean, mean.spread)


def _with_spread(share: float | None, spread: float | None) -> str:
    return _percent(share) if spread is None else f"{_percent(share)} ± {_percent(spread)}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
