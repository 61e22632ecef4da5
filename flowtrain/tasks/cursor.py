"""The order in which training walks over its tasks."""

from __future__ import annotations

import random
from collections.abc import Sequence

from flowtrain.records import Task


class TaskCursor:
    """Endless batches of tasks: one fresh seeded permutation per epoch.

    `position`, the number of tasks taken so far, is the whole state: a cursor made with the
    position of another one continues exactly like it, as long as both take batches of the same
    size. A batch that crosses the end of an epoch repeats no task either (unless it is larger than
    the number of tasks), and with batches of one size every epoch still visits each task once.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, position: int = 0) -> None:
        """Start at `position`."""
        assert tasks
        self.position = position
        self._tasks = tuple(tasks)
        self._seed = seed
        self._walk = (0, 0)
        self._epoch = -1
        self._order: list[int] = []

    def take(self, n: int) -> list[Task]:
        """Return the next `n` tasks."""
        # The permutations depend on where batches begin, so another walk starts anew.
        walk = (n, self.position % n)
        if walk != self._walk or self.position < self._epoch * len(self._tasks):
            self._walk = walk
            self._epoch = -1
            self._order = []
        batch = [self._task(position) for position in range(self.position, self.position + n)]
        self.position += n
        return batch

    def _task(self, position: int) -> Task:
        epoch, offset = divmod(position, len(self._tasks))
        while self._epoch < epoch:
            self._epoch += 1
            self._order = self._next_order()
        return self._tasks[self._order[offset]]

    def _next_order(self) -> list[int]:
        """Return the permutation of `_epoch`; a batch that crosses into it repeats no task."""
        n, phase = self._walk
        order = list(range(len(self._tasks)))
        random.Random(f"tasks/{self._seed}/{self._epoch}").shuffle(order)
        # So many tasks of the batch are of the epoch before.
        num_had = (self._epoch * len(order) - phase) % n
        if not self._order or n > len(order) or num_had == 0:
            return order
        previous = set(self._order[-num_had:])
        batch_rest = [task for task in order if task not in previous][: n - num_had]
        head = set(batch_rest)
        return batch_rest + [task for task in order if task not in head]
