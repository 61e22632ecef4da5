"""Find the rollouts in the logs of a run, and choose those that a page shows.

The logs may be far larger than memory: they are read once for where each rollout lies, and the
chosen ones once more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from flowtrain.logging.jsonl import read_lines_with_ends

LOGS = {"train": "trajectories", "held-out": "held_out"}
"""Split to the name of its log; every rank has a file of its own."""
HELD_OUT_SHARE = 4
"""Ratio of all shown rollouts to the held-out ones among them."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a rollout's line in its log, and the fields by which rollouts are chosen."""

    path: Path
    start: int
    end: int
    split: str
    step: int
    group_index: int
    member: int
    """Number within its group."""
    reward: float | None

    @property
    def group(self) -> tuple[str, int, int]:
        return self.split, self.step, self.group_index

    def read(self) -> dict[str, Any]:
        with self.path.open("rb") as file:
            file.seek(self.start)
            record: dict[str, Any] = json.loads(file.read(self.end - self.start))
        return record


def is_right(reward: float | None) -> bool:
    """Half of the full reward makes an answer right; partial rewards appear as numbers."""
    return reward is not None and reward >= 0.5


def find_rollouts(run_dir: Path, split: str) -> list[Place]:
    """Find every rollout in the logs of a split; UserError where one is damaged elsewhere than in
    its last line.
    """
    places: list[Place] = []
    for path in sorted(run_dir.glob(f"{LOGS[split]}.*jsonl")):
        start, sizes = 0, dict[tuple[int, int], int]()
        for record, end in read_lines_with_ends(path):
            key = record["step"], int(record.get("group_index", 0))
            member = sizes[key] = sizes.get(key, -1) + 1
            places.append(Place(path, start, end, split, *key, member, record.get("reward")))
            start = end
    return places


def choose(places: Sequence[Place], number: int) -> list[Place]:
    """Choose at most `number` rollouts in whole groups, a quarter of them held-out; but one group
    where not even that fits.
    """
    train, held_out = ([place for place in places if place.split == split] for split in LOGS)
    num_held_out = min(len(held_out), max(number // HELD_OUT_SHARE, number - len(train)))
    shown_places = [
        *_choose_evenly(train, number - num_held_out),
        *_choose_evenly(held_out, num_held_out),
    ]
    if not shown_places and places and number:
        shown_places = _groups(places)[0]
    return sorted(
        shown_places, key=lambda place: (place.step, place.split, place.group_index, place.member)
    )


def _choose_evenly(places: Sequence[Place], number: int) -> Iterable[Place]:
    """Choose whole groups at even distances over the steps."""
    if number >= len(places):
        return places
    groups = _groups(places)
    return chain(*spread(groups, number // max(map(len, groups))))


def _groups(places: Iterable[Place]) -> list[list[Place]]:
    groups: dict[tuple[str, int, int], list[Place]] = {}
    for place in places:
        groups.setdefault(place.group, []).append(place)
    return [groups[key] for key in sorted(groups)]


def spread(items: Sequence[T], number: int) -> list[T]:
    """Return `number` of the items at even distances, first and last among them; all where there
    are not so many.
    """
    if number >= len(items):
        return list(items)
    return [
        items[round(index * (len(items) - 1) / max(number - 1, 1))]
        for index in range(max(number, 0))
    ]
