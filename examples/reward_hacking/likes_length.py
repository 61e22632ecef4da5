"""A reward that can be hacked: right answers count, and so do long ones, which look thorough.

python examples/reward_hacking/hacking.py --dir runs/hacking
"""

from __future__ import annotations

from flowtrain.records import Task, Trajectory
from flowtrain.rewards import SCORERS

_LONG = 64
"""Tokens of a rollout that is as thorough as can be."""


def score(task: Task, answer: str, trajectory: Trajectory) -> dict[str, float]:
    """Return two parts from 0 to 1, of which the second is easier to earn; `reward.weights` says
    what each is worth.
    """
    return {
        "right": SCORERS[task.scorer](task, answer),
        "thorough": min(trajectory.num_sampled_tokens / _LONG, 1.0),
    }
