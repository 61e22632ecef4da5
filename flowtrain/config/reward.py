"""Options of rewards that users write."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, PositiveFloat, field_validator

from flowtrain.config.section import Section

_ROUNDING = 1e-9
"""Weights that sum to 1 on paper may sum to a little more as floats."""


class Reward(Section):
    function: dict[str, float] = Field(default_factory=dict)
    """reward function, instead of each task's scorer: FILE.py:NAME or PACKAGE.MODULE:NAME of a
    function (task, answer, trajectory), or a built-in scorer; several functions are a table of
    names and weights"""
    timeout_s: PositiveFloat = 30.0
    """timeout of a call of a reward function, after which the rollout fails"""
    low: float = 0.0
    """smallest valid reward; a rollout with a lower reward fails"""
    high: float = 1.0
    """largest valid reward; a rollout with a higher reward fails"""

    @field_validator("function", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {value: 1.0} if value else {}
        return value

    def bounded(self, reward: float | None) -> float | None:
        """Return the reward within `low` to `high`, or None where it lies outside of them by more
        than rounding, or is not finite.
        """
        if reward is None or not math.isfinite(reward):
            return None
        clipped = min(max(reward, self.low), self.high)
        return clipped if abs(clipped - reward) <= _ROUNDING * (self.high - self.low) else None

    def share(self, reward: float) -> float:
        """Return where the reward lies between `low`, which is 0, and `high`, which is 1."""
        return (reward - self.low) / (self.high - self.low)
