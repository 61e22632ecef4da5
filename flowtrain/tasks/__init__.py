"""Sources of questions: facts of a small corpus, the game of 24, files, and benchmarks."""

from flowtrain.tasks.benchmarks import BENCHMARKS, load_benchmark
from flowtrain.tasks.corpus import Entity, load_corpus, passage_value, passages
from flowtrain.tasks.cursor import TaskCursor
from flowtrain.tasks.facts import facts_tasks
from flowtrain.tasks.files import load_tasks
from flowtrain.tasks.gameof24 import gameof24_tasks

__all__ = [
    "BENCHMARKS",
    "Entity",
    "TaskCursor",
    "facts_tasks",
    "gameof24_tasks",
    "load_benchmark",
    "load_corpus",
    "load_tasks",
    "passage_value",
    "passages",
]
