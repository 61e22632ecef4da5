"""Which rollouts are in the logs of a run, and which of them a page shows.

The logs may be far larger than memory: they are read once for where each rollout lies, and the
chosen ones once more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from flowtrain.report.jsonl import read_lines_with_ends

LOGS = {"train": "trajectories", "held-out": "held_out"}
"""Split to the name of its log; every rank has a file of its own."""
HELD_OUT_SHARE = 4
"""One in so many of the shown rollouts is a held-out one."""

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
    """Half of the full reward makes an answer right; partial rewards are shown as the numbers they
    are.
    """
    return reward is not None and reward >= 0.5


def log_files(run_dir: Path, split: str) -> list[Path]:
    return sorted(run_dir.glob(f"{LOGS[split]}.jsonl")) + sorted(
        run_dir.glob(f"{LOGS[split]}.rank*.jsonl")
    )


def find_rollouts(run_dir: Path, split: str) -> list[Place]:
    """Every rollout in the logs of a split; UserError where one is damaged elsewhere than in its
    last line.
    """
    places: list[Place] = []
    for path in log_files(run_dir, split):
        start, sizes = 0, dict[tuple[int, int], int]()
        for record, end in read_lines_with_ends(path):
            key = record["step"], int(record.get("group_index", 0))
            member = sizes[key] = sizes.get(key, -1) + 1
            places.append(Place(path, start, end, split, *key, member, record.get("reward")))
            start = end
    return places


def choose(places: Sequence[Place], number: int) -> list[Place]:
    """At most `number` rollouts in whole groups, a quarter of them held-out; but one group where
    not even that fits.
    """
    train, held_out = ([place for place in places if place.split == split] for split in LOGS)
    num_held_out = min(len(held_out), max(number // HELD_OUT_SHARE, number - len(train)))
    chosen = [
        *_choose_evenly(train, number - num_held_out),
        *_choose_evenly(held_out, num_held_out),
    ]
    if not chosen and places and number:
        chosen = _groups(places)[0]
    return sorted(
        chosen, key=lambda place: (place.step, place.split, place.group_index, place.member)
    )


def _choose_evenly(places: Sequence[Place], number: int) -> list[Place]:
    """Rounds over the steps, a group of each per round; the last round, for which there is no room,
    over steps at even distances.
    """
    by_step: dict[int, list[list[Place]]] = {}
    for group in _groups(places):
        by_step.setdefault(group[0].step, []).append(group)
    queues = [
        _both_outcomes_first(_rotated(by_step[step], number))
        for number, step in enumerate(sorted(by_step))
    ]
    chosen: list[Place] = []
    for turn in zip_longest(*queues):
        candidates = [group for group in turn if group is not None]
        room = (number - len(chosen)) // max(map(len, candidates))
        chosen += chain(*spread(candidates, room))
    return chosen


def _groups(places: Iterable[Place]) -> list[list[Place]]:
    groups: dict[tuple[str, int, int], list[Place]] = {}
    for place in places:
        groups.setdefault(place.group, []).append(place)
    return [groups[key] for key in sorted(groups)]


def _rotated(items: Sequence[T], number: int) -> list[T]:
    """Rotate the items by `number`, for a group's index decides its mini-batch."""
    start = number * 5 % len(items)
    return [*items[start:], *items[:start]]


def _both_outcomes_first(groups: Sequence[list[Place]]) -> list[list[Place]]:
    """Groups with right and wrong answers, which are those that teach; then wrong and right ones by
    turns.
    """
    by_outcome: dict[frozenset[bool], list[list[Place]]] = {}
    for group in groups:
        by_outcome.setdefault(frozenset(is_right(place.reward) for place in group), []).append(
            group
        )
    mixed, wrong, right = (
        by_outcome.get(frozenset(outcome), []) for outcome in ((False, True), (False,), (True,))
    )
    return mixed + [
        group for pair in zip_longest(wrong, right) for group in pair if group is not None
    ]


def spread(items: Sequence[T], number: int) -> list[T]:
    """`number` of the items at even distances, first and last among them; all where there are not
    so many.
    """
    if number >= len(items):
        return list(items)
    return [
        items[round(index * (len(items) - 1) / max(number - 1, 1))]
        for index in range(max(number, 0))
    ]
