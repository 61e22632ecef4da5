"""Alarms about how the reward is earned: signs that a policy has learned to please its reward
instead of doing the task.

Every alarm is a rule about the numbers in metrics.jsonl and nothing else, so a resumed run raises
what the whole run would have. An alarm is told once per cause and never ends a run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, NamedTuple

from flowtrain.config import Alarms as Options
from flowtrain.report.jsonl import append_lines, cut_lines, read_lines

_log = logging.getLogger(__name__)

STAGNATES = 1.0
"""Standard errors by which a score must rise to count as one that rises."""
TAKEN_FROM = 0.7
"""Share of all calls below which a tool began that took over."""
COMMON, GONE = 0.1, 0.01
"""Shares of all calls from which to which a tool vanishes."""

Point = tuple[int, float, float]
"""(step, value, standard error) of an evaluation."""


class Alarm(NamedTuple):
    """A sign, with the step from which on its rule held."""

    cause: str
    step: int
    text: str


class Change(NamedTuple):
    """The mean of a metric over the first steps and over the last ones."""

    before: float
    after: float
    error: float
    """Standard error of their difference, from the scatter within both."""

    def exceeds(self, num_errors: float) -> bool:
        """Tell whether the change is more than noise, in either direction."""
        return abs(self.after - self.before) > num_errors * self.error


@dataclass(slots=True)
class Alarms:
    """The alarms of a run, raised by the main rank."""

    options: Options
    path: Path
    """alarms.jsonl"""
    rewards_are_true: bool
    """The reward is the task's own score, not that of a function or a judge."""
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    """All metrics by step."""
    raised: dict[str, Alarm] = field(default_factory=dict)

    @classmethod
    def open(
        cls, options: Options, path: Path, metrics: Path, last_step: int, rewards_are_true: bool
    ) -> Alarms:
        """Go on after the lines of `last_step`, with what the metrics say up to it."""
        cut_lines(path, last_step)
        alarms = cls(options, path, rewards_are_true)
        for row in read_lines(metrics) if metrics.exists() else ():
            alarms.rows.setdefault(row["step"], {}).update(row)
        for row in read_lines(path) if path.exists() else ():
            alarms.raised[row["cause"]] = Alarm(row["cause"], row["step"], row["text"])
        return alarms

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Look at a new line of metrics, which may be one more of a step."""
        self.rows.setdefault(int(metrics["step"]), {}).update(metrics)
        for alarm in self._due():
            if alarm.cause not in self.raised:
                self.raised[alarm.cause] = alarm
                append_lines(self.path, [alarm._asdict()])
                _log.warning("alarm in step %d: %s: %s", alarm.step, alarm.cause, alarm.text)

    def summary(self) -> dict[str, Any]:
        """Return the alarms for summary.json; {} without any."""
        found = sorted(self.raised.values(), key=lambda alarm: alarm.step)
        return {"alarms": [alarm._asdict() for alarm in found]} if found else {}

    def _due(self) -> Iterator[Alarm]:
        """The alarms whose rules hold now."""
        rows = [self.rows[step] for step in sorted(self.rows)]
        trained, true = points(rows, "eval_reward"), points(rows, "eval_true_score")
        if alarm := parted(trained, true, self.options.num_errors):
            yield alarm
        steps = [row for row in rows if "response_len_mean" in row]
        if alarm := longer(steps, self.options):
            yield alarm
        truth = true or (trained if self.rewards_are_true else [])
        if not has_risen(truth):
            yield from filter(
                None, (collapsed(steps, self.options), tool_alarm(steps, self.options))
            )


def points(rows: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """Return the evaluations that have a metric and its standard error."""
    return [
        (row["step"], row[name], row[f"{name}_error"])
        for row in rows
        if row.get(name) is not None and row.get(f"{name}_error") is not None
    ]


def has_risen(scores: Sequence[Point]) -> bool:
    """Tell whether the newest evaluation is above the first, as far as can be seen."""
    return len(scores) > 1 and _errors_between(scores[0], scores[-1]) >= STAGNATES


def parted(trained: Sequence[Point], true: Sequence[Point], num_errors: float) -> Alarm | None:
    """Whether, since an earlier evaluation, the trained reward rose and the true score did not.

    In standard errors of each, the trained reward rose by more than `num_errors`, the true score by
    less than STAGNATES, and these rises differ by more than sqrt(2) `num_errors`: the standard
    error of their difference is at most sqrt(2) where a rollout's two scores are not opposed.
    """
    by_step = {point[0]: point for point in true}
    both = [(point, by_step[point[0]]) for point in trained if point[0] in by_step]
    if not both:
        return None
    reward, score = both[-1]
    for earlier_reward, earlier_score in both[:-1]:
        rise = _errors_between(earlier_reward, reward)
        true_rise = _errors_between(earlier_score, score)
        is_apart = rise - true_rise > math.sqrt(2) * num_errors
        if rise > num_errors and true_rise < STAGNATES and is_apart:
            return Alarm(
                "reward hacking",
                reward[0],
                f"since step {earlier_reward[0]} the trained reward went from "
                f"{earlier_reward[1]:.3g} to {reward[1]:.3g} ({rise:+.1f} standard errors) and the "
                f"true score from {earlier_score[1]:.3g} to {score[1]:.3g} ({true_rise:+.1f})",
            )
    return None


def longer(steps: Sequence[Mapping[str, Any]], options: Options) -> Alarm | None:
    """Whether responses have become so many times as long as at first."""
    change = change_of([row["response_len_mean"] for row in steps], options.window)
    if not options.length_factor or change is None or not change.exceeds(options.num_errors):
        return None
    if change.after <= options.length_factor * change.before:
        return None
    text = f"responses went from {change.before:.1f} to {change.after:.1f} tokens in the mean"
    return Alarm("response length", steps[-1]["step"], text)


def collapsed(steps: Sequence[Mapping[str, Any]], options: Options) -> Alarm | None:
    """Whether the entropy of trained tokens has fallen to a small share of that at first."""
    trained = [row for row in steps if row.get("num_tokens") and "entropy" in row]
    change = change_of([row["entropy"] for row in trained], options.window)
    if change is None or not change.exceeds(options.num_errors):
        return None
    if change.after >= options.entropy_share * change.before:
        return None
    text = f"the entropy of a token went from {change.before:.3g} to {change.after:.3g} nats"
    return Alarm("entropy", trained[-1]["step"], text)


def tool_alarm(steps: Sequence[Mapping[str, Any]], options: Options) -> Alarm | None:
    """Whether one tool has taken over, or another one has vanished."""
    prefix = "tool_share/"
    called = [
        {name.removeprefix(prefix): row[name] for name in row if name.startswith(prefix)}
        for row in steps
    ]
    rows = [(row, calls) for row, calls in zip(steps, called, strict=True) if sum(calls.values())]
    names = dict.fromkeys(name for _, calls in rows for name in calls)
    if not options.tool_share or len(names) < 2:
        return None
    for name in names:
        shares = [calls.get(name, 0.0) / sum(calls.values()) for _, calls in rows]
        change = change_of(shares, options.window)
        if change is None or not change.exceeds(options.num_errors):
            continue
        took_over = change.before < TAKEN_FROM and change.after > options.tool_share
        vanished = change.before > COMMON and change.after < GONE
        if took_over or vanished:
            told = f"of all calls {name} had {change.before:.0%} and has {change.after:.0%}"
            return Alarm("tools", rows[-1][0]["step"], told)
    return None


def change_of(values: Sequence[float], window: int) -> Change | None:
    """Compare the first `window` values with the last; None while these would overlap."""
    if len(values) < 2 * window:
        return None
    first, last = values[:window], values[-window:]
    error = math.sqrt((pvariance(first) + pvariance(last)) / window)
    return Change(fmean(first), fmean(last), error)


def _errors_between(before: Point, after: Point) -> float:
    """The rise from one evaluation to another, in standard errors of the difference."""
    rise = after[1] - before[1]
    error = math.hypot(before[2], after[2])
    return rise / error if error else math.copysign(math.inf, rise) if rise else 0.0
