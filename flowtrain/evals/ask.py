"""Ask every question of some benchmarks in every trial, and write each rollout down as it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowtrain.agents.collect import roll_out
from flowtrain.engines.chat import metered
from flowtrain.evals.records import Key, RecordLog, rollout_record
from flowtrain.evals.system import System
from flowtrain.evaluation.benchmark_metrics import short_metrics
from flowtrain.metrics import ProgressLine
from flowtrain.rewards import score_one
from flowtrain.types import Task
from flowtrain.utils.loops import run_to_end
from flowtrain.utils.seeds import derive_seed


@dataclass(frozen=True, slots=True)
class Question:
    """One rollout to be made."""

    key: Key
    index: int
    """Place among the questions of all benchmarks."""
    task: Task


def questions(
    planner: str,
    max_turns: Sequence[int],
    benchmarks: Mapping[str, Sequence[Task]],
    num_trials: int,
) -> list[Question]:
    """List all questions of the first trial, with each budget of turns, then of the second, so
    that an interrupted run has whole trials.
    """
    every = [(name, task) for name, tasks in benchmarks.items() for task in tasks]
    return [
        Question(Key(planner, limit, name, task.id.removeprefix(f"{name}-"), trial), index, task)
        for trial in range(1, num_trials + 1)
        for limit in max_turns
        for index, (name, task) in enumerate(every)
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
            key, task = question.key, question.task
            # From names alone: a rollout is the same whatever else is asked, before or beside it.
            # All planners and budgets of turns share a question's seed, so that chance tells them
            # apart less.
            own_seed = derive_seed(seed, "evals", key.benchmark, key.pid, key.trial)
            with metered() as usage:
                agent = system.agents[key.max_turns]
                scored = await roll_out(agent, task, own_seed)
                if not scored.error:
                    scored = await score_one(scored, system.judge)
        metrics = {} if scored.error else short_metrics(scored)
        record = rollout_record(key, question.index, scored, usage, metrics)
        await asyncio.to_thread(log.append, record)  # which waits for the disk
        progress.show(len(log.done), log.state())

    async def every_rollout() -> None:
        async with asyncio.TaskGroup() as running:
            for question in todo:
                running.create_task(rollout(question))

    run_to_end(every_rollout())
