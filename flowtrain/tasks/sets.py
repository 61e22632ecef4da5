"""The questions of a run: training tasks, held-out tasks by split, and passages for Search."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from flowtrain import config as cfg
from flowtrain.records import Task, UserError
from flowtrain.tasks.benchmarks import parse_benchmarks
from flowtrain.tasks.corpus import load_corpus, passage_value, passages
from flowtrain.tasks.cursor import TaskCursor
from flowtrain.tasks.facts import SPLITS, facts_tasks, split_entities
from flowtrain.tasks.fiction import fictional_entities
from flowtrain.tasks.files import TaskSource, load_configured
from flowtrain.tasks.gameof24 import gameof24_tasks
from flowtrain.tasks.mixture import MixedCursor, shares
from flowtrain.tasks.overlap import benchmark_tasks, without_overlaps
from flowtrain.tasks.verifiers import verifiers_tasks

MAIN_SPLIT = "texts"
"""The held-out split that curves and the summary show first: texts that training never uses."""


@dataclass(frozen=True, slots=True)
class TaskSet:
    """All questions of a run."""

    train: tuple[Task, ...]
    held_out: dict[str, tuple[Task, ...]]
    """Tasks by split; `MAIN_SPLIT` is always one of them."""
    passages: tuple[str, ...]
    mixture: Mapping[str, tuple[float, tuple[Task, ...]]] = field(default_factory=dict)
    """Weight and tasks of each file or data set, in order, where `train` comes from several."""
    sources: tuple[TaskSource, ...] = ()
    """The loaded files, if tasks come from files."""
    splits: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of what is held out, by option and value of the source."""

    def cursor(self, seed: int, position: int) -> TaskCursor | MixedCursor:
        """Return the order of the training tasks."""
        if not self.mixture:
            return TaskCursor(self.train, seed, position)
        tasks = {path: group for path, (_, group) in self.mixture.items()}
        weights = {path: weight for path, (weight, _) in self.mixture.items()}
        return MixedCursor(tasks, weights, seed, position)

    def draw_weights(self) -> list[float]:
        """Return the relative frequency of each training task."""
        if not self.mixture:
            return [1.0] * len(self.train)
        return [weight / len(tasks) for weight, tasks in self.mixture.values() for _ in tasks]

    @property
    def guesses(self) -> tuple[str, ...]:
        """Return values that passages state, for the base generator to draw from."""
        return tuple(dict.fromkeys(filter(None, map(passage_value, self.passages))))


def task_set(config: cfg.Config, fictional: bool = False) -> TaskSet:
    """Load or generate the questions of `[tasks]` and `[eval]`.

    The run's seed decides the training questions; held-out ones never change. `fictional` replaces
    the corpus by made-up entities, for the demonstrations of `flowtrain.rft`.
    """
    tasks = config.tasks
    num_held_out = config.eval.num_tasks
    entities = load_corpus(tasks.corpus)
    if fictional:
        entities = fictional_entities(
            600, 400, config.run.seed, {entity.name for entity in entities}
        )
    texts = passages(entities)
    splits: dict[str, str] = {}
    match tasks.name:
        case "facts":
            draw = partial(facts_tasks, entities, kinds=tasks.kinds)
            train = draw("train", tasks.num_train, config.run.seed)
            held_out = {
                split: tuple(draw(split, num_held_out, 0)) for split in SPLITS if split != "train"
            }
            names = [entity.name for entity in split_entities(entities)[1]]
            splits = {f"tasks.corpus={tasks.corpus!r}": _fingerprint(names)}
        case "gameof24":
            train = gameof24_tasks("train", config.run.seed)
            held_out = {MAIN_SPLIT: tuple(gameof24_tasks(MAIN_SPLIT, seed=0)[:num_held_out])}
        case "verifiers":
            origin = f"tasks.verifiers={tasks.verifiers}"
            pool = verifiers_tasks(tasks.verifiers, tasks.num_train + num_held_out)
            train, held_tasks = _split(pool, tasks.held_out_share, origin)
            splits = {origin: _fingerprint_of(pool, held_tasks)}
            train = _not_held_out(train, held_tasks, origin)
            held_out = {MAIN_SPLIT: tuple(held_tasks[:num_held_out])}
        case _:
            return _from_files(config, texts)
    train = _screened(train, _benchmark_questions(config), config)
    return TaskSet(tuple(train), held_out, texts, splits=splits)


def without_tasks(config: cfg.Config) -> TaskSet:
    """Return a set without tasks, for a node that gets its tasks one by one."""
    return TaskSet((), {}, passages(load_corpus(config.tasks.corpus)))


def _from_files(config: cfg.Config, texts: tuple[str, ...]) -> TaskSet:
    """Load the files of `tasks.path` or `tasks.mixture`; each gives its share of held-out tasks."""
    tasks = config.tasks
    if tasks.mixture:
        shares(tasks.mixture, config.rollout.num_questions)  # refuses a weight that is too small
    benchmark_questions = _benchmark_questions(config)
    train: dict[str, list[Task]] = {}
    held_out: list[Task] = []
    paths: dict[str, str] = {}
    sources: list[TaskSource] = []
    splits: dict[str, str] = {}
    for path in tasks.mixture or (tasks.path,):
        readers = config.reward.function, config.agent.environment, config.agent.name == "gateway"
        source = load_configured(path, tasks, keeps_columns=any(readers))
        sources.append(source)
        for task in source.tasks:
            if paths.setdefault(task.id, path) != path:
                raise UserError(
                    f"tasks.mixture: {paths[task.id]!r} and {path!r} both have a task with id "
                    f"{task.id!r}; ids must be unique"
                )
        origin = f"tasks.path={path!r}"
        questions, held_tasks = _split(source.tasks, tasks.held_out_share, origin)
        splits[origin] = _fingerprint_of(source.tasks, held_tasks)
        train[path] = _screened(questions, benchmark_questions, config)
        held_out += held_tasks
    # Only now, because a row of one file may repeat a held-out row of a later one.
    train = {
        path: _not_held_out(questions, held_out, f"tasks.path={path!r}")
        for path, questions in train.items()
    }
    if tasks.mixture:
        random.Random(0).shuffle(held_out)
    mixture = {path: (weight, tuple(train[path])) for path, weight in tasks.mixture.items()}
    all_tasks = tuple(task for questions in train.values() for task in questions)
    kept_out = {MAIN_SPLIT: tuple(held_out[: config.eval.num_tasks])}
    return TaskSet(all_tasks, kept_out, texts, mixture, tuple(sources), splits)


def _benchmark_questions(config: cfg.Config) -> list[Task]:
    """Load the benchmarks in `tasks.benchmarks` and the files in `eval.benchmarks`."""
    folder = config.tasks.benchmarks
    questions = benchmark_tasks(folder) if folder else []
    for benchmark in parse_benchmarks(config.eval.benchmarks):
        questions += benchmark.load(folder) if benchmark.path else []
    return questions


def _screened(train: list[Task], questions: Sequence[Task], config: cfg.Config) -> list[Task]:
    """Drop tasks that nearly repeat one that a benchmark asks."""
    fresh_tasks = without_overlaps(train, questions) if questions else train
    if not fresh_tasks:
        raise UserError(
            f"tasks.benchmarks={config.tasks.benchmarks!r} and "
            f"eval.benchmarks={list(config.eval.benchmarks)} contain nearly all training "
            "questions, so that none is left for training"
        )
    return fresh_tasks


def _not_held_out(train: Sequence[Task], held_out: Sequence[Task], origin: str) -> list[Task]:
    """Drop training tasks that repeat a held-out one, up to case and spaces."""
    held_keys = {_content_key(task) for task in held_out}
    fresh_tasks = [task for task in train if _content_key(task) not in held_keys]
    if not fresh_tasks:
        raise UserError(
            f"{origin}: all rows are duplicates of each other, so all of them are held out"
        )
    return fresh_tasks


def _content_key(task: Task) -> tuple[object, ...]:
    return " ".join(task.prompt.casefold().split()), task.answers, task.columns


def _split(
    tasks: Sequence[Task], held_out_share: float, origin: str
) -> tuple[list[Task], list[Task]]:
    """Shuffle with a fixed seed and hold a share out."""
    shuffled = random.Random(0).sample(tasks, len(tasks))
    num_held_out = max(1, round(len(tasks) * held_out_share))
    if num_held_out >= len(tasks):
        raise UserError(
            f"{origin} holds {len(tasks)} task(s); training and evaluation need at least one each"
        )
    return shuffled[num_held_out:], shuffled[:num_held_out]


def _fingerprint_of(tasks: Sequence[Task], held_out: Sequence[Task]) -> str:
    # Not of ids and columns, which depend on the name of the file and on who reads them.
    return _fingerprint([len(tasks), [[task.prompt, task.answers] for task in held_out]])


def _fingerprint(values: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
