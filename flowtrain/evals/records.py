"""The records of an evaluation, one line per rollout; a resumed run sees in them what is done."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flowtrain.engines.chat import Usage
from flowtrain.metrics import trajectory_record
from flowtrain.metrics.jsonl import append_lines, cut_lines, read_lines
from flowtrain.metrics.rollouts import Outcome
from flowtrain.types import Trajectory

FILE = "trajectories.jsonl"


class Key(NamedTuple):
    """The name of a rollout within an evaluation."""

    planner: str
    max_turns: int
    benchmark: str
    pid: str
    """Place in the benchmark's file, from 0; for files of the user's own the row's id."""
    trial: int
    """From 1."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The part of a line that stays in memory."""

    key: Key
    error: str
    """Why the rollout failed; "" when it did not."""
    outcome: Outcome
    scored_by: str
    seconds: float
    usage: Usage
    """Tokens of frozen models: planner, modules, tools, judge."""
    metrics: Mapping[str, float]
    """See `rollout_record`."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Entry:
        return cls(
            Key(*(record[name] for name in Key._fields)),
            record["error"],
            Outcome.of_record(record),
            record["scored_by"],
            record["seconds"],
            Usage(**record["usage"]),
            record["metrics"],
        )


class RecordLog:
    """trajectories.jsonl of an evaluation: the lines of a training run's log, where a trial (from
    1) stands for a step, and some more keys.

    Example: {"step": 1, "planner": "policy", "max_turns": 10, "benchmark": "nq", "pid": "3",
    "trial": 1, "task_id": ..., "question": ..., "turns": [...], "reward": 1.0, "metrics": {"em":
    1.0, "f1": 1.0}}
    """

    def __init__(self, folder: Path) -> None:
        """Open the log and drop a line that a killed process has left unfinished."""
        self.path = Path(folder) / FILE
        self.entries: dict[Key, Entry] = {}
        """The last of every rollout, earlier processes included: one that failed may have been
        asked again."""
        self.done: set[Key] = set()
        """Keys of rollouts that have an answer; failed ones have none."""
        self._reward = 0.0
        self._lock = threading.Lock()
        cut_lines(self.path, sys.maxsize)
        for record in read_lines(self.path) if self.path.exists() else ():
            self._note(Entry.of(record))

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record, from any thread; it is on disk when the call returns."""
        with self._lock:
            append_lines(self.path, [record])
            self._note(Entry.of(record))

    def state(self) -> str:
        """Format the running accuracy over all rollouts."""
        accuracy = f"accuracy {self._reward / max(len(self.done), 1):.1%}"
        failed = len(self.entries) - len(self.done)
        return f"{accuracy}, {failed} failed" if failed else accuracy

    def _note(self, entry: Entry) -> None:
        self.entries[entry.key] = entry
        if not entry.error:
            self.done.add(entry.key)
            self._reward += entry.outcome.reward or 0.0


def rollout_record(
    key: Key, index: int, trajectory: Trajectory, usage: Usage, metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Build the record of a rollout.

    Args:
        index: the question's place among those of all benchmarks.
        usage: what the frozen models took.
        metrics: "em" and "f1" of a short answer, from 0 to 1; {} for other answers.
    """
    record = trajectory_record(trajectory, index)
    for turn, written in zip(trajectory.turns, record["turns"], strict=True):
        if text := turn.calls["planner"].prompt_text:  # of a frozen planner, which has no ids
            written["prompt_text"] = text
    head = {"step": key.trial, "version": 0, **key._asdict()}
    return {**head, **record, "metrics": dict(metrics), "usage": asdict(usage)}
