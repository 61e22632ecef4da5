"""The metrics of a run that pages draw, as they arrive."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any

from flowtrain.report.curves import PANELS, Series
from flowtrain.view.log import spread

_NAMES = {key for panel in PANELS for key in panel.lines if not key.endswith("/")} | {"version"}
_PREFIXES = (*(key for panel in PANELS for key in panel.lines if key.endswith("/")), "tokens/")

Point = tuple[int, float]
"""(step, value)."""


class Points:
    """One metric in the order in which it was logged, 24 bytes per point."""

    def __init__(self) -> None:
        self._steps, self._values, self._numbers = array("q"), array("d"), array("q")
        self.total = 0.0
        """Sum over steps; of two values for a step the later one counts."""

    def add(self, number: int, step: int, value: float) -> None:
        """`number` is that of the record, ascending."""
        if self._steps and step <= self._steps[-1]:
            self.total -= self._value_at(step)
        self.total += value
        self._steps.append(step)
        self._values.append(value)
        self._numbers.append(number)

    def _value_at(self, step: int) -> float:
        for index in range(len(self._steps) - 1, -1, -1):
            if self._steps[index] == step:
                return self._values[index]
        return 0.0

    def after(self, number: int, most: int) -> list[Point]:
        """Return the points of later records than `number`, steps ascending; at most `most`, at
        even distances.
        """
        start = bisect_right(self._numbers, number)
        by_step = dict(zip(self._steps[start:], self._values[start:], strict=True))
        return spread(sorted(by_step.items()), most)

    @property
    def first(self) -> float:
        """The value that was logged first."""
        return self._values[0]

    @property
    def last(self) -> float:
        """The value of the last step."""
        return max(zip(self._steps, range(len(self._steps)), self._values, strict=True))[2]


class Metrics:
    """The metrics of a run that a page shows; others are passed over."""

    def __init__(self) -> None:
        self._points: dict[str, Points] = {}
        self.num_records = 0
        self.step: int | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        """Take a line of metrics.jsonl in."""
        self.num_records += 1
        step = record["step"]
        self.step = step if self.step is None else max(self.step, step)
        for key, value in record.items():
            if _is_shown(key) and isinstance(value, int | float) and abs(value) < float("inf"):
                self._points.setdefault(key, Points()).add(self.num_records, step, value)

    def ends(self, key: str) -> list[float]:
        """Return the first and the last value; [] where none was logged."""
        points = self._points.get(key)
        return [points.first, points.last] if points else []

    def points(self, key: str, most: int) -> list[Point]:
        """Return the points of a metric, at most `most`, at even distances."""
        return self._points[key].after(0, most) if key in self._points else []

    def totals(self) -> dict[str, float]:
        """Return the sum of each metric over the steps."""
        return {key: points.total for key, points in self._points.items()}

    def panels(self, number: int, most: int) -> list[dict[str, Any]]:
        """Return the panels with what came after record `number`: of each line at most `most`
        points; lines and panels without news are left out.
        """
        news = _News(self._points, number, most)
        panels = []
        for place, panel in enumerate(PANELS):
            lines = [
                {"label": label, "is_sparse": is_sparse, "points": points}
                for label, (_, points), is_sparse in panel.curves(news)
                if points
            ]
            if lines:
                told = {"title": panel.title, "form": panel.form, "is_stack": panel.is_stack}
                panels.append({"place": place, **told, "lines": lines})
        return panels


class _News(Mapping[str, Series]):
    """What panels choose their lines from: a series is (nothing, points) here."""

    def __init__(self, points: Mapping[str, Points], number: int, most: int) -> None:
        self._points, self._number, self._most = points, number, most

    def __getitem__(self, key: str) -> Any:
        return (), self._points[key].after(self._number, self._most)

    def __iter__(self) -> Iterator[str]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)


def _is_shown(key: str) -> bool:
    is_seconds = key.endswith("_s") and key != "tokens_per_s"
    return key in _NAMES or is_seconds or key.startswith(_PREFIXES)
