"""GRESO (arXiv 2506.02177): prompts whose last groups had equal rewards are mostly left out,
because the next group will probably have equal rewards too.

For every prompt, z counts its latest consecutive groups in which all rewards were the same, all
high ("easy") or all low ("hard"). A group with differing rewards sets z to 0, a group of the other
side sets it to 1. The prompt is rolled out with probability max(p^z, floor), where p and floor are
those of its side: always when z is 0, and never with less than the floor, so every prompt comes
again. At each new version, p of a side falls by `step` if the share of its groups since the last
version reached its target, and else rises by `step`: the rule explores as much as the target
allows. In the first epoch, which ends when some prompt has its second group, p does not change: no
prompt could be left out yet.

The paper has floors of 0.01 and also counts groups that are nearly alike. The floors here are
AstraFlow's, because an improving policy makes hard prompts worth another look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, validate_call

from flowtrain.rollouts.rules.base import Outcome

Share = Annotated[float, Field(gt=0, le=1)]

LEAST, MOST = 0.05, 0.95
"""Bounds of p."""


@dataclass(slots=True)
class Side:
    """The state of one side, easy or hard."""

    chance: float
    """p, for prompts whose last group was on this side."""
    target: float
    floor: float
    num_new: int = 0
    """Groups on this side since the last version."""

    def probability(self, streak: int) -> float:
        return max(self.chance**streak, self.floor)

    def adapt(self, num_groups: int, step: float) -> None:
        """Explore less if `num_groups` groups held enough of this side, else more."""
        change = -step if self.num_new >= self.target * num_groups else step
        self.chance = min(max(self.chance + change, LEAST), MOST)


class Greso:
    @validate_call
    def __init__(
        self,
        start: Share = 0.5,
        step: Share = 0.01,
        target_easy: Share = 1 / 12,
        target_hard: Share = 1 / 6,
        floor_easy: Share = 0.1,
        floor_hard: Share = 0.4,
    ) -> None:
        """
        Args:
            start: p before the first version.
            step: change of p per version.
            target_easy, target_hard: shares of all groups.
            floor_easy, floor_hard: least probability of a rollout.
        """
        self.easy = Side(start, target_easy, floor_easy)
        self.hard = Side(start, target_hard, floor_hard)
        self._step = step
        self._streaks: dict[str, tuple[Side, int]] = {}
        self._num_new = 0
        self._is_first_epoch = True

    def admits(self, task_id: str, kind: str, draw: float) -> bool:
        side, streak = self._streaks.get(task_id, (self.easy, 0))
        return draw < side.probability(streak)

    def observe(self, outcome: Outcome) -> None:
        """Update z; a group of fewer than two finished rollouts says nothing."""
        if len(outcome.rewards) < 2:
            return
        side, streak = self._streaks.get(outcome.task_id, (self.easy, 0))
        self._is_first_epoch &= outcome.task_id not in self._streaks
        self._num_new += 1
        if outcome.is_mixed:
            self._streaks[outcome.task_id] = (side, 0)
            return
        current_side = self.easy if outcome.rewards[0] >= 0.5 else self.hard
        current_side.num_new += 1
        self._streaks[outcome.task_id] = (current_side, streak + 1 if current_side is side else 1)

    def on_version(self, version: int) -> None:
        """Adapt p; a version without a group since the last one changes nothing."""
        for side in (self.easy, self.hard):
            if self._num_new and not self._is_first_epoch:
                side.adapt(self._num_new, self._step)
            side.num_new = 0
        self._num_new = 0
