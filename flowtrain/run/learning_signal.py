"""Watch whether steps have anything to learn from: one without is told at once with its cause, and
a run of them ends training.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flowtrain.config import Config
from flowtrain.training.world import World
from flowtrain.types import FilterReason, Group, TrainBatch, Trajectory, UserError

_log = logging.getLogger(__name__)

MOST_BROKEN = 3
"""Steps in a row after which a run ends where something is broken, not too easy or too hard."""
_EXAMPLE_CHARS = 200


class Cause(NamedTuple):
    """Why a step has nothing to learn from."""

    text: str
    cure: str
    is_broken: bool
    """It does not pass by itself."""


@dataclass(slots=True)
class LearningSignal:
    """Counts the steps in a row that had nothing to learn from; collective."""

    config: Config
    world: World
    num_idle: int = field(default=0, init=False)
    num_broken: int = field(default=0, init=False)
    idle_steps: list[int] = field(default_factory=list, init=False)
    """All steps since this process began that had nothing to learn from."""
    last_cause: str = field(default="", init=False)

    def watch(self, step: int, groups: Sequence[Group], batch: TrainBatch) -> None:
        """Look at this rank's part of a step: its groups, and the batch after filtering.

        Raises UserError, with the cause and a cure, when steps like this one do not end.
        """
        cause = self._cause(groups, batch)
        self.num_idle = 0 if cause is None else self.num_idle + 1
        self.num_broken = 0 if cause is None or not cause.is_broken else self.num_broken + 1
        if cause is None:
            return
        self.idle_steps.append(step)
        self.last_cause = cause.text
        in_a_row = f" ({self.num_idle} steps in a row)" if self.num_idle > 1 else ""
        text = f"nothing to learn from in step {step}{in_a_row}: {cause.text}"
        most = self.config.train.max_idle_steps
        if self.num_broken >= MOST_BROKEN or 0 < most <= self.num_idle:
            raise UserError(
                f"{text}. {cause.cure}; weights are as before, and the same command with "
                "run.resume = 'auto' goes on from the newest checkpoint"
            )
        if self.world.is_main and _is_told(self.num_idle):
            _log.warning("%s. %s", text, cause.cure)

    def summary(self) -> dict[str, Any]:
        """Return the idle steps and the cause of the last, for summary.json; {} without any."""
        if not self.idle_steps:
            return {}
        return {"idle_steps": self.idle_steps, "last_cause": self.last_cause}

    def _cause(self, groups: Sequence[Group], batch: TrainBatch) -> Cause | None:
        """Why no token of the batch is drawn to or from; None where one is. Collective."""
        rollouts = [trajectory for group in groups for trajectory in group.trajectories]
        counts = _Counts.of(rollouts, batch, self.config)
        total = _Counts(*map(round, self.world.sum(list(counts))))
        if total.num_signals:
            return None
        low = self.config.reward.low
        example = next(filter(None, self.world.gather_text(_example(rollouts, low))), "")
        if total.num_failed == total.num_rollouts:
            cure = "Mend that: rollouts that failed are not trained"
            return Cause(f"all {total.num_rollouts} rollouts failed; {example}", cure, True)
        if not total.num_tokens:
            if total.num_outgrown == total.num_rollouts:
                return Cause(
                    "all prompts outgrow the model",
                    "A model with more positions, fewer agent.max_turns or a smaller "
                    "agent.max_result_chars would help",
                    True,
                )
            return Cause(
                "no response has a token",
                "The engine was too slow for agent.rollout_timeout_s="
                f"{self.config.agent.rollout_timeout_s:g} or rollout.request_timeout_s="
                f"{self.config.rollout.request_timeout_s:g}, or the policy ends at once",
                True,
            )
        if total.num_excluded and not total.num_samples:
            cure = "The warning before this one names the first sample and what is wrong with it"
            text = f"all {total.num_excluded} samples were left out"
            return Cause(text, cure, True)
        return _equal_rewards(total, example, low)


class _Counts(NamedTuple):
    num_rollouts: int
    num_failed: int
    num_right: int
    """Rollouts with a reward above `reward.low`."""
    num_turns: int
    num_malformed: int
    """Turns whose action could not be read."""
    num_tokens: int
    num_outgrown: int
    num_samples: int
    num_excluded: int
    """Samples left out because of what is wrong with them."""
    num_signals: int
    """Samples with an advantage."""

    @classmethod
    def of(cls, rollouts: Sequence[Trajectory], batch: TrainBatch, config: Config) -> _Counts:
        turns = [turn for trajectory in rollouts for turn in trajectory.turns]
        calls = [turn.calls.get(config.train.policy) for turn in turns]
        return cls(
            num_rollouts=len(rollouts),
            num_failed=sum(bool(trajectory.error) for trajectory in rollouts),
            num_right=sum(
                each.reward is not None and each.reward > config.reward.low for each in rollouts
            ),
            num_turns=len(turns),
            num_malformed=sum(t.action is None and t.result.error is not None for t in turns),
            num_tokens=sum(len(call.response_ids) for call in calls if call is not None),
            num_outgrown=sum(trajectory.truncated == "prompt" for trajectory in rollouts),
            num_samples=len(batch.samples),
            num_excluded=sum(
                number
                for reason, number in batch.num_filtered.items()
                if reason is not FilterReason.EMPTY
            ),
            num_signals=sum(any(sample.advantages) for sample in batch.samples),
        )


def _equal_rewards(total: _Counts, example: str, low: float) -> Cause:
    """The rewards of each question are alike, which is how tasks are that are too hard or too easy,
    and scorers that accept nothing.
    """
    besides = ""
    if total.num_malformed:
        besides += f"; of {total.num_turns} actions {total.num_malformed} could not be read"
    if total.num_failed:
        besides += f"; {total.num_failed} rollouts failed"
    num_scored = total.num_rollouts - total.num_failed
    if not total.num_right:
        return Cause(
            f"all {num_scored} rewards are {low:g}{besides}; {example}",
            "Where such an answer is right, see how tasks are scored (docs/tasks.md); else easier "
            "tasks or a better start (python -m flowtrain.rft) would help",
            False,
        )
    if total.num_right == num_scored:
        return Cause(
            f"all {num_scored} rewards are above {low:g}{besides}", "Harder tasks would help", False
        )
    return Cause(
        f"the rollouts of each question have one reward{besides}",
        "More rollouts per question (rollout.group_size) or a higher temperature would help",
        False,
    )


def _example(rollouts: Sequence[Trajectory], low: float) -> str:
    """The first rollout that failed, or else that is wrong, in words; "" where none is."""
    for each in rollouts:
        if each.error:
            return f"the first failed because of {each.error[:_EXAMPLE_CHARS]!r}"
    for each in rollouts:
        if each.reward == low:
            return (
                f"the first is for {each.answer[-_EXAMPLE_CHARS:]!r} to "
                f"{each.task.question[:_EXAMPLE_CHARS]!r}, accepted: {each.task.answers[:3]!r}"
            )
    return ""


def _is_told(number: int) -> bool:
    """Of a run of idle steps the 1st, 2nd, 3rd, 10th, 20th, 30th, ... are told."""
    return number <= 3 or number % 10 == 0
