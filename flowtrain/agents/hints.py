"""Hints for stuck rollouts (InfoFlow, arXiv 2510.26575, section 3; when and what is ours where the
paper is silent).

A hint is what the environment says, not what the planner does: it stands in the prompt, which is
never trained, and what is sampled after it is on-policy for that prompt. It names the next thing to
look for, never what will be found.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from flowtrain.tasks.sub_goals import solved, sought
from flowtrain.types import Task, Turn
from flowtrain.utils.seeds import derive_seed


@dataclass(frozen=True, slots=True)
class Hints:
    """Who gets one, and when: one per rollout, from turn `turn` on, once `patience` turns have
    brought nothing.
    """

    rate: float
    """Probability that a rollout may get a hint; evaluation has none at all."""
    turn: int
    """First turn (from 0) that may read one."""
    patience: int
    """Turns in a row that reached no sub-goal."""

    def give(self, task: Task, turns: Sequence[Turn], seed: int) -> str:
        """The hint that the next turn is to read; "" for none. The same for the same rollout."""
        if len(turns) < self.turn or random.Random(derive_seed(seed, "hint")).random() >= self.rate:
            return ""
        reached = solved(task, turns)
        if len(turns) < self.patience or len(reached) > len(
            solved(task, turns[: len(turns) - self.patience])
        ):
            return ""
        return next((goal.query for goal in sought(task) if goal.query and goal not in reached), "")
