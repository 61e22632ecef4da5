"""Statistics of a refiner that is a policy of its own."""

from __future__ import annotations

from collections.abc import Iterable

from flowtrain.training.world import World
from flowtrain.types import Trajectory


def evidence_metrics(trajectories: Iterable[Trajectory], world: World) -> dict[str, float]:
    """Compute, over all ranks, the share of the refiner's replies that left the passages as they
    were, and the characters of evidence to those of the passages that it stands for; collective.
    """
    num_calls = num_empty = num_chars = num_passage_chars = 0
    for turn in (turn for trajectory in trajectories for turn in trajectory.turns):
        if "refiner" not in turn.calls:
            continue
        num_calls += 1
        num_empty += not turn.retrieved
        if turn.retrieved:
            num_chars += len(turn.result.output)
            num_passage_chars += len(turn.retrieved)
    total, empty, chars, passage_chars = world.sum(
        [num_calls, num_empty, num_chars, num_passage_chars]
    )
    return {
        "refiner/empty_share": empty / max(total, 1),
        "refiner/kept_share": chars / max(passage_chars, 1),
    }
