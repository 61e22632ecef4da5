"""The one exchange of a step's metrics: what ranks count adds up by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowtrain.trainer.distributed import World


@dataclass(slots=True)
class Tally:
    """The counts of one rank in a step, or of all of them. Ranks may have different names."""

    sums: dict[str, float] = field(default_factory=dict)
    """Numbers that add up over ranks."""
    maxima: dict[str, float] = field(default_factory=dict)
    """Numbers of which the greatest counts."""
    said: dict[str, list[Any]] = field(default_factory=dict)
    """JSON values of which all are kept, in the order of ranks."""
    _means: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self.sums[name] = self.sums.get(name, 0.0) + number

    def mean(self, name: str, total: float, num: float) -> None:
        """Add to a mean: `total` of so many."""
        old_total, old_num = self._means.get(name, (0.0, 0.0))
        self._means[name] = old_total + total, old_num + num

    def highest(self, name: str, number: float) -> None:
        self.maxima[name] = max(self.maxima.get(name, number), number)

    def say(self, name: str, value: Any) -> None:
        self.said.setdefault(name, []).append(value)

    def all_means(self) -> dict[str, float]:
        """Return the means; one of nothing is 0."""
        return {name: total / max(num, 1) for name, (total, num) in self._means.items()}

    def of_all(self, world: World) -> Tally:
        """Put the tallies of all ranks together, the same on every rank; collective."""
        totals = Tally()
        text = json.dumps([self.sums, self._means, self.maxima, self.said])
        for sums, means, maxima, said in map(json.loads, world.gather_text(text)):
            totals.add(sums)
            for name, total_and_num in means.items():
                totals.mean(name, *total_and_num)
            for name, number in maxima.items():
                totals.highest(name, number)
            for name, values in said.items():
                for value in values:
                    totals.say(name, value)
        return totals
