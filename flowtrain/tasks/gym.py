"""Questions of reasoning-gym: over a hundred families, each with a generator and a checker.

A question is made from the number seed + index alone. Training takes numbers from `_TRAIN` on,
which the seed decides, and held-out questions take numbers below it, so no number serves both.
Different numbers may still give equal questions; those leave the held-out ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from flowtrain.config import GymSet
from flowtrain.types import Task, UserError
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.terminal import bar

SCORER = "reasoning-gym"
_WORKER = Path(__file__).with_name("gym_worker.py")
_TRAIN = 1 << 20
"""The least number of a training question; held-out ones count up from 0."""
_SEEDS = 1 << 30
"""Training begins at one of so many numbers, so that all numbers have 32 bits, as numpy wants."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Questions that a worker makes."""

    key: str
    """The table in `[tasks.gym]`."""
    name: str
    """The data set's name."""
    options: Mapping[str, Any]
    seed: int
    """The number of the first question."""
    size: int


def gym_tasks(
    sets: Mapping[str, GymSet], num_train: int, num_held_out: int, seed: int
) -> tuple[dict[str, list[Task]], list[Task]]:
    """Make about `num_train` and at most `num_held_out` questions, over all sets by weight.

    Returns the training tasks of each set, with ids "KEY-train-3", and the held-out tasks of all
    sets in turn, with ids "KEY-texts-3". Each set has one of either at least, before held-out
    questions that are asked twice, or in training, are dropped. `seed` decides on the training
    questions of sets that have none of their own. Raises UserError when reasoning-gym is missing,
    for a data set that it does not have, for options that it refuses, and when no held-out question
    is left.
    """
    if num_held_out > _TRAIN:
        raise UserError(f"eval.num_tasks={num_held_out} must be at most {_TRAIN} for reasoning-gym")
    held_draws = _draws(sets, num_held_out, lambda _: 0)
    train_draws = _draws(sets, num_train, lambda key: _first_number(sets[key], seed))
    made = iter(_made([*train_draws, *held_draws]))
    train = {draw.key: list(_tasks(draw, "train", made)) for draw in train_draws}
    held_out = {draw.key: list(_tasks(draw, "texts", made)) for draw in held_draws}
    asked = {task.question for tasks in train.values() for task in tasks}
    kept = []
    for task in _in_turn(list(held_out.values())):
        if task.question not in asked:
            asked.add(task.question)
            kept.append(task)
    if not kept:
        raise UserError(
            f"tasks.gym={list(sets)}: every held-out question is asked in training, too; ask fewer "
            "(tasks.num_train), or options that give more different ones"
        )
    return train, kept


def _first_number(options: GymSet, seed: int) -> int:
    seed = seed if options.seed is None else options.seed
    return _TRAIN + derive_seed("reasoning-gym", seed) % _SEEDS


def _draws(sets: Mapping[str, GymSet], total: int, seed_of: Callable[[str], int]) -> list[Draw]:
    """Divide `total` questions among the sets by weight."""
    weights = sum(each.weight for each in sets.values())
    return [
        Draw(
            key,
            each.name or key,
            each.options,
            seed_of(key),
            max(1, round(total * each.weight / weights)),
        )
        for key, each in sets.items()
    ]


def _tasks(draw: Draw, split: str, made: Iterator[dict[str, Any]]) -> Iterator[Task]:
    for index, line in enumerate(islice(made, draw.size)):
        yield Task(
            f"{draw.key}-{split}-{index}",
            line["question"],
            answers=() if line["answer"] is None else (line["answer"],),
            kind=draw.key,
            num_turns=0,
            scorer=SCORER,
            entry=line["entry"],
        )


def _made(draws: Sequence[Draw]) -> list[dict[str, Any]]:
    """Return the worker's lines, draw after draw, with a progress bar on a terminal."""
    lines = []
    total = sum(draw.size for draw in draws)
    process = subprocess.Popen(
        [sys.executable, "-P", str(_WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
    )
    with process, bar(total=total, desc="questions", delay=3, disable=None, leave=False) as shown:
        assert process.stdin is not None and process.stdout is not None
        json.dump([asdict(draw) for draw in draws], process.stdin)
        process.stdin.close()
        for text in process.stdout:
            line = json.loads(text)
            if "error" in line:
                raise UserError(line["error"])
            shown.update()
            lines.append(line)
    if len(lines) < total:
        raise UserError(f"the process that makes questions died (status {process.returncode})")
    return lines


def _in_turn(parts: Sequence[Sequence[Task]]) -> Iterator[Task]:
    """Yield the first of each part, then the second of each, and so on."""
    for index in range(max(map(len, parts))):
        yield from (part[index] for part in parts if index < len(part))
