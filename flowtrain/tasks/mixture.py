"""Several sources of tasks, mixed by weight."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from flowtrain.records import Task, UserError
from flowtrain.tasks.cursor import TaskCursor
from flowtrain.utils.seeds import derive_seed


class MixedCursor:
    """Endless batches that mix several sources by weight, each with a `TaskCursor` of its own.

    `position`, the number of tasks taken so far, is the whole state, as in `TaskCursor`.
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[Task]],
        weights: Mapping[str, float],
        seed: int,
        position: int = 0,
    ) -> None:
        """Take `sources` and `weights` by name."""
        self.position = position
        self._weights = dict(weights)
        self._seed = seed
        self._cursors = {
            name: TaskCursor(tasks, derive_seed(seed, "mixture", name))
            for name, tasks in sources.items()
        }

    def take(self, n: int) -> list[Task]:
        """Return the next `n` tasks, the sources' shares shuffled; raises as `shares` does."""
        batch: list[Task] = []
        for name, share in shares(self._weights, n).items():
            cursor = self._cursors[name]
            cursor.position = self.position // n * share  # as many as earlier batches took of it
            batch += cursor.take(share)
        random.Random(f"mixture/{self._seed}/{self.position}").shuffle(batch)
        self.position += n
        return batch


def shares(weights: Mapping[str, float], n: int) -> dict[str, int]:
    """Divide `n` tasks among the sources in proportion to the weights, by largest remainders.

    Raises UserError when a source would get none.
    """
    exact = {name: n * weight / sum(weights.values()) for name, weight in weights.items()}
    counts = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: n - sum(counts.values())]:
        counts[name] += 1
    if none := [name for name, share in counts.items() if share == 0]:
        raise UserError(
            f"tasks.mixture assigns {none[0]!r} none of the {n} questions of a step; raise its "
            f"weight {weights[none[0]]} or rollout.num_questions"
        )
    return counts
