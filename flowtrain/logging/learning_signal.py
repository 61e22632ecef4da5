"""Steps without a learning signal: reported with their cause; several in a row end a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flowtrain.config import Config
from flowtrain.logging.tally import Tally
from flowtrain.records import Group, TrainBatch, Trajectory, UserError

_log = logging.getLogger(__name__)

MOST_BROKEN = 3
"""Number of broken steps in a row (not merely too easy or too hard) that ends a run."""
MOST_FAILED = 0.5
"""Share of the rollouts that may fail: where more do, MOST_BROKEN steps in a row end a run, too. A
rollout fails by what is around the policy, and those that are left are not like all."""
_CHARS = 200
"""Longest excerpt of a text in a message, in characters."""


@dataclass(slots=True)
class LearningSignal:
    """Counts consecutive steps without a learning signal."""

    config: Config
    is_main: bool
    num_idle: int = field(default=0, init=False)
    num_broken: int = field(default=0, init=False)
    num_failing: int = field(default=0, init=False)
    idle_steps: list[int] = field(default_factory=list, init=False)
    """All steps without a learning signal since this process began."""
    last_cause: str = field(default="", init=False)

    def watch(self, step: int, total: Tally) -> None:
        """Check the counts of a step over all ranks.

        Raises UserError, with the cause, after too many such steps in a row.
        """
        self._watch_failures(step, total)
        cause = _cause(total)
        if cause is None:
            self.num_idle = self.num_broken = 0
            return
        self.last_cause, is_broken = cause
        self.num_idle, self.num_broken = self.num_idle + 1, (self.num_broken + 1) * is_broken
        self.idle_steps.append(step)
        in_a_row = f" ({self.num_idle} steps in a row)" if self.num_idle > 1 else ""
        text = f"nothing to learn from in step {step}{in_a_row}: {self.last_cause}"
        if self.num_broken >= MOST_BROKEN or 0 < self.config.train.max_idle_steps <= self.num_idle:
            raise UserError(
                f"{text}. docs/hardening.md says what helps; the same command with run.resume = "
                "'auto' goes on from the newest checkpoint"
            )
        # Of many in a row the 1st, 2nd, 3rd, 10th, 20th, 30th, ... are told.
        if self.is_main and (self.num_idle <= 3 or self.num_idle % 10 == 0):
            _log.warning("%s", text)

    def _watch_failures(self, step: int, total: Tally) -> None:
        num, num_failed = total.sums["rollouts"], total.sums["rollouts"] - total.sums["finished"]
        # Where all fail there is nothing to learn from either, which says more.
        is_failing = MOST_FAILED * num < num_failed < num
        self.num_failing = (self.num_failing + 1) * is_failing
        if self.num_failing >= MOST_BROKEN:
            example = "; ".join(total.said.get("failure", ())[:1])
            raise UserError(
                f"step {step}: {num_failed:.0f} of {num:.0f} rollouts failed, and more than "
                f"{MOST_FAILED:.0%} in each of {MOST_BROKEN} steps, so that training sees a "
                f"biased part of the rollouts: {example}. docs/hardening.md says what helps; the "
                "same command with run.resume = 'auto' goes on from the newest checkpoint"
            )

    def summary(self) -> dict[str, Any]:
        """Return the idle steps and the cause of the last, for summary.json; {} without any."""
        if not self.idle_steps:
            return {}
        return {"idle_steps": self.idle_steps, "last_cause": self.last_cause}


def count_signal(
    tally: Tally, groups: Sequence[Group], batch: TrainBatch, low: float, has_teacher: bool = False
) -> None:
    """Return counts of the learning signal in this rank's rollouts.

    Args:
        low: the reward of a wrong rollout.
        has_teacher: samples are informative whatever their reward.
    """
    rollouts = [trajectory for group in groups for trajectory in group.trajectories]
    counts = {
        "right": sum(rollout.reward is not None and rollout.reward > low for rollout in rollouts),
        "outgrown": sum(rollout.truncated == "prompt" for rollout in rollouts),
        "samples": len(batch.samples),
        "signals": sum(has_teacher or any(sample.advantages) for sample in batch.samples),
    }
    tally.add(counts)
    if rewards := [rollout.reward for rollout in rollouts if rollout.reward is not None]:
        tally.say("rewards", [min(rewards), max(rewards)])
    if not counts["signals"] and (example := _example(rollouts, low)):
        tally.say("example", example)
    if any(rollout.error for rollout in rollouts):
        tally.say("failure", _example(rollouts, low))


def _cause(total: Tally) -> tuple[str, bool] | None:
    """Return why no token has a gradient, and whether the cause is a defect that persists; None if
    a token has one.
    """
    counts = {name: int(number) for name, number in total.sums.items()}
    if counts["signals"]:
        return None
    has_tokens = counts["tokens/sampled"] + counts["tokens/shared"] > 0
    left_out = sum(number for name, number in counts.items() if name.startswith("num_excluded/"))
    example = "; ".join(total.said.get("example", ())[:1])
    # The first that holds is told, from failed rollouts to samples left out.
    broken = {
        f"all {counts['rollouts']} rollouts failed; {example}": not counts["finished"],
        "all prompts are longer than the model's positions": not has_tokens
        and counts["outgrown"] == counts["rollouts"],
        "all responses are empty": not has_tokens,
        f"all {left_out} samples were excluded": left_out > counts["num_excluded/empty"]
        and not counts["samples"],
    }
    for text, holds in broken.items():
        if holds:
            return text, True
    rewards = [reward for rank_rewards in total.said["rewards"] for reward in rank_rewards]
    lowest, highest = min(rewards), max(rewards)
    text = f"all {counts['finished']} rewards are {lowest:g}"
    if lowest < highest:
        text = (
            "all rollouts of each question have the same reward; rewards range from "
            f"{lowest:g} to {highest:g}"
        )
    if num_malformed := counts["malformed"]:
        text += (
            f"; of {counts['turns']} actions {num_malformed} could not be parsed or named no tool"
        )
    if num_failed := counts["rollouts"] - counts["finished"]:
        text += f"; {num_failed} rollouts failed"
    return text if counts["right"] else f"{text}; {example}", False


def _example(rollouts: Sequence[Trajectory], low: float) -> str:
    """Describe the first failed or else the first wrong rollout; "" without one."""
    for rollout in rollouts:
        if rollout.error:
            return f"the first failed because of {rollout.error[:_CHARS]!r}"
    for rollout in rollouts:
        if rollout.reward == low:
            return (
                f"the first answer is {rollout.answer[-_CHARS:]!r} to "
                f"{rollout.task.question[:_CHARS]!r}, accepted: {rollout.task.answers[:3]!r}"
            )
    return ""
