"""The questions of a run: training tasks, held-out tasks by split, and the passages that Search looks through."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from flowtrain import config as cfg
from flowtrain.tasks.corpus import load_corpus, passage_value, passages
from flowtrain.tasks.facts import SPLITS, facts_tasks
from flowtrain.tasks.fiction import fictional_entities
from flowtrain.tasks.files import load_tasks
from flowtrain.tasks.gameof24 import gameof24_tasks
from flowtrain.types import Task, UserError

MAIN_SPLIT = "texts"
"""The held-out split that curves and the summary lead with: question texts that training never shows."""


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Everything a run asks."""

    train: tuple[Task, ...]
    held_out: dict[str, tuple[Task, ...]]
    """By split; `MAIN_SPLIT` is always there."""
    passages: tuple[str, ...]

    @property
    def guesses(self) -> tuple[str, ...]:
        """Values that passages state, for the base generator to draw from."""
        return tuple(dict.fromkeys(value for text in self.passages if (value := passage_value(text))))


def task_set(config: cfg.Config, fictional: bool = False) -> TaskSet:
    """Load or generate what `[tasks]` and `[eval]` ask for; the seed of training questions is the run's, held-out ones never change.

    `fictional` replaces the corpus by made-up entities, for the demonstrations of `flowtrain.rft`.
    """
    tasks, num_held_out = config.tasks, config.eval.num_tasks
    entities = load_corpus(Path(tasks.corpus) if tasks.corpus else None)
    if fictional:
        entities = fictional_entities(600, 400, config.run.seed, {entity.name for entity in entities})
    texts = passages(entities)
    match tasks.name:
        case "facts":
            train = facts_tasks(entities, "train", tasks.num_train, config.run.seed)
            held_out = {split: tuple(facts_tasks(entities, split, num_held_out, seed=0)) for split in SPLITS if split != "train"}
        case "gameof24":
            train = gameof24_tasks("train", None, config.run.seed)
            held_out = {MAIN_SPLIT: tuple(gameof24_tasks(MAIN_SPLIT, None, seed=0)[:num_held_out])}
        case _:
            train, kept = _split(load_tasks(tasks.path), tasks.held_out_share, tasks.path)
            held_out = {MAIN_SPLIT: tuple(kept[:num_held_out])}
    return TaskSet(tuple(train), held_out, texts)


def _split(tasks: list[Task], held_out_share: float, path: str) -> tuple[list[Task], list[Task]]:
    """Shuffle with a fixed seed and hold a share out."""
    shuffled = random.Random(0).sample(tasks, len(tasks))
    num_held_out = max(1, round(len(tasks) * held_out_share))
    if num_held_out >= len(tasks):
        raise UserError(f"tasks.path={path!r} holds {len(tasks)} task(s); training and evaluation need at least one each")
    return shuffled[num_held_out:], shuffled[:num_held_out]
