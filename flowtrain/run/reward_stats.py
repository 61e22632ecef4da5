"""Statistics of rewards that functions give."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from flowtrain.rewards.functions import FAILURES, failure_of
from flowtrain.training.world import World
from flowtrain.types import Trajectory


def reward_metrics(
    trajectories: Sequence[Trajectory], world: World, has_functions: bool = True
) -> dict[str, float]:
    """Compute the mean of each part over the rollouts of all ranks that have it, be it given by a
    function or reported; with functions, count rollouts that they failed, by reason. Collective.
    """
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for trajectory in trajectories:
        sums.update(trajectory.reward_parts)
        counts.update(trajectory.reward_parts.keys())
    failures = Counter(failure_of(each.scored_by) for each in trajectories if each.error)
    parts = sorted(
        {part for text in world.gather_text(json.dumps(list(sums))) for part in json.loads(text)}
    )
    numbers = [*(sums[part] for part in parts), *(counts[part] for part in parts)]
    total = world.sum([*numbers, *(failures[reason] for reason in FAILURES)])
    means = {
        f"reward/{part}": total[place] / total[place + len(parts)]
        for place, part in enumerate(parts)
    }
    failed = zip(FAILURES, total[2 * len(parts) :], strict=True)
    if not has_functions:
        return means
    return means | {f"reward_failures/{reason}": number for reason, number in failed}
