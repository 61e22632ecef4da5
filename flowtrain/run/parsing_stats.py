"""Statistics of what lenient parsing rescued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flowtrain.agents.lenient import RULES
from flowtrain.training.world import World
from flowtrain.types import Trajectory


def parsing_metrics(trajectories: Sequence[Trajectory], world: World) -> dict[str, float]:
    """Compute the share of turns, and for the generator of rollouts, that each rule helped to read;
    rules without any are left out. Collective.
    """
    used: Counter[str] = Counter()
    for trajectory in trajectories:
        used.update(trajectory.rescued)
        for turn in trajectory.turns:
            used.update(turn.rescued)
    num_turns = sum(len(trajectory.turns) for trajectory in trajectories)
    *counts, all_rollouts, all_turns = world.sum(
        [*(used[rule] for rule in RULES), len(trajectories), num_turns]
    )
    return {
        f"rescued_share/{rule}": count
        / (all_rollouts if rule.startswith("generator/") else all_turns)
        for rule, count in zip(RULES, counts, strict=True)
        if count
    }
