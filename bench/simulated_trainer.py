"""A trainer in virtual time around a real ledger; `simulated_pool.py` has its nodes and clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bench.simulated_pool import POLICY, World
from flowtrain.dataflow.codec import unpack_group
from flowtrain.dataflow.contract import BatchRequest, Dataflow, Progress, Register
from flowtrain.types import Group

ALIVE_S = 30.0
"""Between signs of life of a trainer."""


@dataclass(slots=True)
class Step:
    """Virtual seconds of one."""

    asked: float
    served: float = 0.0
    trained: float = 0.0


class Trainer:
    """Registers when it is made, and then takes batch after batch."""

    def __init__(
        self,
        world: World,
        ledger: Dataflow,
        num_groups: int,
        max_staleness: int,
        train_s: float,
        num_steps: int,
    ) -> None:
        self._world, self._ledger, self._train_s, self._num_steps = (
            world,
            ledger,
            train_s,
            num_steps,
        )
        self.steps: list[Step] = []
        self.trained: list[tuple[int, Counter[int]]] = []
        """Work item of every group of every batch, and its tokens by staleness in versions."""
        ledger.register(Register(POLICY, "", "", num_groups, max_staleness, 1 << 16, 1 << 16))
        self._next()
        self._live()

    @property
    def is_done(self) -> bool:
        return len(self.steps) == self._num_steps and self.steps[-1].trained > 0

    def _next(self) -> None:
        self.steps.append(Step(self._world.now))
        self.look()

    def _live(self) -> None:
        """A sign of life, which the ledger wants now and then however long a step takes."""
        if not self.is_done:
            done = len(self.steps) - 1
            self._ledger.progress(Progress(POLICY, done, done))
            self._world.after(ALIVE_S, self._live)

    def look(self) -> None:
        """Is the batch full? Asked when something was pushed; the service answers a request that
        waits at the same moment.
        """
        step = self.steps[-1]
        if step.served:
            return
        batch = self._ledger.batch(BatchRequest(POLICY, len(self.steps)))
        if batch.num_missing:
            return
        step.served = self._world.now
        for served in batch.groups:
            ages = [
                (len(self.steps) - 1 - version, number)
                for version, number in tokens(unpack_group(served.payload))
            ]
            self.trained.append(
                (served.work_item, Counter(age for age, number in ages for _ in range(number)))
            )
        self._world.after(self._train_s, self._trained)

    def _trained(self) -> None:
        step, number = self.steps[-1], len(self.steps)
        step.trained = self._world.now
        busy_s, waited_s = step.trained - step.served, step.served - step.asked
        self._ledger.progress(
            Progress(POLICY, number, number, busy_s, waited_s, is_done=number == self._num_steps)
        )
        if number < self._num_steps:
            self._next()


def staleness(trained: Iterable[tuple[int, Counter[int]]]) -> dict[str, float]:
    """Summarise the staleness of tokens: the mean, the most, and the share of each."""
    ages = sum((counts for _, counts in trained), Counter[int]())
    shares = {f"behind_{age}": ages[age] / ages.total() for age in range(max(ages) + 1)}
    return {
        "staleness_mean": sum(age * number for age, number in ages.items()) / ages.total(),
        "staleness_max": max(ages),
        **shares,
    }


def tokens(group: Group) -> Iterator[tuple[int, int]]:
    """(version, number) of the tokens that would be trained."""
    for each in group.finished:
        for turn in each.turns:
            spans = turn.calls["planner"].spans
            yield from ((span.version, span.end - span.start) for span in spans)
