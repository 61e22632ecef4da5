"""Ask every question of some benchmarks in every trial, and write each rollout down as it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from flowtrain.agents.collect import roll_out, run_to_end
from flowtrain.engines.chat import metered
from flowtrain.evals.records import Key, RecordLog, rollout_record
from flowtrain.evals.system import System
from flowtrain.report import ProgressLine
from flowtrain.rewards import score_one
from flowtrain.types import Task
from flowtrain.utils.seeds import derive_seed


@dataclass(frozen=True, slots=True)
class Question:
    """One rollout to be made."""

    key: Key
    index: int
    """Place in the benchmark."""
    task: Task


def questions(benchmarks: dict[str, Sequence[Task]], num_trials: int) -> list[Question]:
    """List all questions of the first trial, then of the second, so that an interrupted run has
    whole trials.
    """
    return [
        Question((benchmark, task.id.removeprefix(f"{benchmark}-"), trial), index, task)
        for trial in range(1, num_trials + 1)
        for benchmark, tasks in benchmarks.items()
        for index, task in enumerate(tasks)
    ]


def ask(
    system: System,
    todo: Sequence[Question],
    log: RecordLog,
    seed: int,
    max_in_flight: int,
    progress: ProgressLine,
) -> None:
    """Roll out what is left to do; an interrupt leaves every rollout that has ended in the log.

    Raises UserError when an engine refuses all requests.
    """
    free = asyncio.Semaphore(max_in_flight)

    async def rollout(question: Question) -> None:
        async with free:
            # From names alone: a rollout is the same whatever else is asked, before or beside it.
            with metered() as usage:
                trajectory = await roll_out(
                    system.agents[question.key[0]],
                    question.task,
                    derive_seed(seed, "evals", *question.key),
                )
                scored = (
                    trajectory if trajectory.error else await score_one(trajectory, system.judge)
                )
        log.append(rollout_record(question.key, question.index, scored, usage, system.decode))
        progress.show(len(log.done), _state(log))

    async def every_rollout() -> None:
        async with asyncio.TaskGroup() as running:
            for question in todo:
                running.create_task(rollout(question))

    run_to_end(every_rollout())


def _state(log: RecordLog) -> str:
    """Format the running accuracy over all rollouts in the log."""
    rewards = [entry.outcome.reward or 0.0 for entry in log.entries.values() if not entry.error]
    failed = len(log.entries) - len(rewards)
    accuracy = f"accuracy {sum(rewards) / max(len(rewards), 1):.1%}"
    return f"{accuracy}, {failed} failed" if failed else accuracy
