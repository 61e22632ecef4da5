"""Rollouts that run once, even across crashes: each is scored and logged as it ends."""

from __future__ import annotations

import asyncio
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from flowtrain.agents.base import Agent
from flowtrain.agents.collect import roll_out
from flowtrain.inference.chat import Usage, metered
from flowtrain.logging import ProgressLine
from flowtrain.logging.jsonl import append_lines, cut_lines, read_lines
from flowtrain.records import Task, Trajectory
from flowtrain.rewards import score_one
from flowtrain.utils.event_loop import run_to_end

if TYPE_CHECKING:
    from flowtrain.trainer.setup.components import Scoring

FILE = "trajectories.jsonl"
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Question(Generic[Key]):
    """A rollout to perform."""

    key: Key
    """Its name in the log."""
    index: int
    """`group_index` of its line."""
    agent: Agent
    task: Task
    seed: int


@dataclass(frozen=True, slots=True)
class Entry:
    """The part of a line that stays in memory."""

    task_id: str
    error: str
    """Why the rollout failed, which may be repeated; "" for a finished one."""
    reward: float | None
    """None for a failed rollout."""
    scored_by: str
    seconds: float
    usage: Usage
    """Tokens and cost of all models but the policy."""
    counts: Mapping[str, float]
    """Counts of `count_rollouts`, where the log has them."""
    metrics: Mapping[str, float]
    """EM and F1 of a short answer, where the log has them; {} for other answers."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Entry:
        return cls(
            record["task_id"],
            record["error"],
            record["reward"],
            record["scored_by"],
            record["seconds"],
            Usage(**record["usage"]),
            record.get("counts", {}),
            record.get("metrics", {}),
        )


class RolloutLog(ABC, Generic[Key]):
    """trajectories.jsonl: the lines of a training run's log, for people and the viewer, with the
    usage of each rollout and what `fields` adds.
    """

    def __init__(self, folder: Path, *, resumes: bool = True) -> None:
        """Read what an earlier process has left, if one did; nothing is written."""
        self.path = Path(folder) / FILE
        self.entries: dict[Key, Entry] = {}
        """The last of every rollout."""
        self.usage = Usage()
        """Usage of all rollouts that ended, failed ones and those asked for again included."""
        self.num_done = 0
        """Rollouts that did not fail."""
        self._reward = 0.0
        self._lock = threading.Lock()
        for record in read_lines(self.path) if resumes and self.path.exists() else ():
            self._note(record)

    @abstractmethod
    def key(self, record: Mapping[str, Any]) -> Key:
        """Return the key of a line."""

    @abstractmethod
    def fields(self, question: Question[Key], trajectory: Trajectory) -> dict[str, Any]:
        """Return what a line says of a rollout; "step" must be among it."""

    def is_done(self, key: Key) -> bool:
        """Return whether there is a rollout that did not fail."""
        return key in self.entries and not self.entries[key].error

    def repair(self) -> None:
        """Drop a line that a killed process has left unfinished, before anything is added."""
        cut_lines(self.path, sys.maxsize)

    def append(self, question: Question[Key], trajectory: Trajectory, usage: Usage) -> None:
        """Append a rollout, from any thread; it is on disk when the call returns."""
        record = {**self.fields(question, trajectory), "usage": asdict(usage)}
        with self._lock:
            append_lines(self.path, [record])
            self._note(record)

    @property
    def failures(self) -> list[str]:
        """Return why the failed rollouts failed."""
        return [entry.error for entry in self.entries.values() if entry.error]

    def state(self) -> str:
        """Format the mean reward so far, and what other models cost."""
        parts = [f"reward {self._reward / max(self.num_done, 1):.3f}"]
        if num_failed := len(self.entries) - self.num_done:
            parts.append(f"{num_failed} failed")
        return ", ".join([*parts, cost_text(self.usage)])

    def _note(self, record: Mapping[str, Any]) -> None:
        key, entry = self.key(record), Entry.of(record)
        self.usage.prompt_tokens += entry.usage.prompt_tokens
        self.usage.reply_tokens += entry.usage.reply_tokens
        self.usage.cost += entry.usage.cost
        # A rollout that was asked for again counts in the place of its earlier line.
        for counted, sign in ((self.entries.get(key), -1), (entry, 1)):
            if counted is not None and not counted.error:
                self.num_done += sign
                self._reward += sign * (counted.reward or 0.0)
        self.entries[key] = entry


def cost_text(usage: Usage) -> str:
    """Format what some requests cost."""
    tokens = f"{usage.prompt_tokens:,} + {usage.reply_tokens:,} tokens"
    return f"{tokens}, cost {usage.cost:.4f}"


def ask(
    questions: Sequence[Question[Key]],
    log: RolloutLog[Key],
    *,
    max_in_flight: int,
    progress: ProgressLine,
    scoring: Scoring = (None, None, None),
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Roll out and score the questions; an interrupt leaves every rollout that has ended in the
    log. Once `is_over` says so, no rollout begins any more.

    Raises UserError when an engine refuses all requests.
    """
    log.repair()
    slots = asyncio.Semaphore(max_in_flight)

    async def rollout(question: Question[Key]) -> None:
        async with slots:
            if is_over():
                return
            with metered() as usage:
                trajectory = await roll_out(question.agent, question.task, question.seed)
                if not trajectory.error:
                    trajectory = await score_one(trajectory, *scoring)
        # In a thread, because it waits for the disk.
        writing = asyncio.ensure_future(asyncio.to_thread(log.append, question, trajectory, usage))
        try:
            await asyncio.shield(writing)
        finally:
            await writing  # an interrupt waits, too
        progress.show(log.num_done, log.state())

    async def every_rollout() -> None:
        async with asyncio.TaskGroup() as task_group:
            for question in questions:
                task_group.create_task(rollout(question))

    run_to_end(every_rollout())
