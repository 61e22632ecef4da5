"""Hints for stuck rollouts.

Source: InfoFlow, arXiv 2510.26575, section 3; the rules for when and what are ours where the paper
has none. A hint comes from the environment: it is part of the prompt, which is never trained, and
the tokens sampled after it are on-policy for that prompt. It names the next thing to look for,
never what will be found.
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
    """Gives a rollout one hint at most, from turn `turn` on, after `patience` turns in vain."""

    rate: float
    """Probability that a rollout may get a hint; evaluation gives none."""
    turn: int
    """First turn (from 0) that may read one."""
    patience: int
    """Turns in a row that reached no sub-goal."""

    def give(self, task: Task, turns: Sequence[Turn], seed: int) -> str:
        """Return the hint for the next turn, or ""; it depends on the rollout alone."""
        if len(turns) < max(self.turn, self.patience):
            return ""
        if random.Random(derive_seed(seed, "hint")).random() >= self.rate:
            return ""
        reached = solved(task, turns)
        if len(reached) > len(solved(task, turns[: len(turns) - self.patience])):
            return ""
        return next((goal.query for goal in sought(task) if goal.query and goal not in reached), "")
