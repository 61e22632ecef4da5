"""Counts of what an attack tried and what got through, printed after the tests.

They travel with the reports of tests, so that processes of pytest-xdist add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

_KEY = "attack"


@dataclass(frozen=True, slots=True)
class Tally:
    """The counts of one test."""

    node: pytest.Item

    def add(self, surface: str, num_tried: int, num_through: int = 0) -> None:
        """Count attempts, e.g. `tally.add("programs in the sandbox", 58)`. `num_through` of them
        did what they must not; the test that counts them fails as well.
        """
        self.node.user_properties.append((_KEY, (surface, num_tried, num_through)))


def table(reports: Iterable[object]) -> list[str]:
    """Return the lines of a table over the reports of tests; no line without a count."""
    tried: Counter[str] = Counter()
    through: Counter[str] = Counter()
    for report in reports:
        for key, value in getattr(report, "user_properties", ()):
            if key == _KEY and getattr(report, "when", "") == "teardown":
                tried[value[0]] += value[1]
                through[value[0]] += value[2]
    if not tried:
        return []
    width = max(map(len, tried))
    head = f"{'attack':{width}}  {'tried':>9}  got through"
    return [head, *(f"{name:{width}}  {tried[name]:9,}  {through[name]:,}" for name in tried)]
