"""Curriculum by success rate: a prompt is rolled out the more often, the nearer its success rate is
to one half.

The success rate s of a prompt is the mean reward of its first group; each later group updates it to
memory * s + (1 - memory) * mean reward. The prompt is rolled out with probability
e + (1 - e) * 4 s (1 - s). Here 4 s (1 - s) is the variance of a reward that is 1 with probability s
and 0 otherwise, relative to its maximum, and e is the share of exploration. A prompt that was never
tried is always rolled out. A prompt that always or never succeeds is rolled out with probability e,
so that it comes back when the policy has changed.
"""

from __future__ import annotations

from statistics import fmean
from typing import Annotated

from pydantic import Field, validate_call

from flowtrain.rollouts.rules.base import Outcome


class Curriculum:
    @validate_call
    def __init__(
        self,
        exploration: Annotated[float, Field(gt=0, le=1)] = 0.2,
        memory: Annotated[float, Field(ge=0, lt=1)] = 0.5,
    ) -> None:
        self._exploration = exploration
        self._memory = memory
        self._success: dict[str, float] = {}

    def admits(self, task_id: str, kind: str, draw: float) -> bool:
        success = self._success.get(task_id, 0.5)
        return draw < self._exploration + (1 - self._exploration) * 4 * success * (1 - success)

    def observe(self, outcome: Outcome) -> None:
        """Update the success rate. Mean rewards are clamped to [0, 1]; a group without rewards says
        nothing.
        """
        if not outcome.rewards:
            return
        mean = min(max(fmean(outcome.rewards), 0.0), 1.0)
        previous = self._success.get(outcome.task_id, mean)
        self._success[outcome.task_id] = self._memory * previous + (1 - self._memory) * mean

    def on_version(self, version: int) -> None:
        pass
