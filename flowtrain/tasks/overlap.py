"""Training questions that nearly repeat a benchmark's:

    python -m flowtrain.tasks.overlap --train nq.parquet math.parquet --benchmarks benchmarks/

prints the pairs and exits with 1 when there are some. Two questions are as similar as the words
they share, each weighed by how rare it is (weighted Jaccard): case, punctuation and order do not
count, a template that many questions share counts little, a name much. Puzzles of the game of 24
are compared by their numbers.

(datasketch was looked at: MinHash estimates the unweighted Jaccard, which calls every two questions
of one template alike.)
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowtrain.tasks.benchmarks import available, load_benchmark
from flowtrain.tasks.files import load_tasks
from flowtrain.tasks.layouts import PRESETS
from flowtrain.types import Task, UserError

THRESHOLD = 0.6
"""Similarity that counts. It finds 752 of 755 benchmark questions in which one word was changed,
and of the 285,000 pairs of different ones among them eight, each about one thing and a word or two
apart."""

_Words = frozenset[tuple[str, int]]
"""A word and the how manieth of its kind it is, so that a word that stands twice counts twice."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """A training task and the benchmark task that it nearly repeats."""

    train: Task
    held_out: Task
    similarity: float
    """In (0, 1]."""


def overlaps(
    train: Sequence[Task], held_out: Sequence[Task], threshold: float = THRESHOLD
) -> list[Overlap]:
    """All pairs at least that similar, in the order of `train`; none is missed. A million short
    questions take a minute.
    """
    train_words, held_words = [_words(task) for task in train], [_words(task) for task in held_out]
    weights = _weights([*train_words, *held_words])
    index = _index(held_words, weights, threshold)
    found = []
    for task, words in zip(train, train_words, strict=True):
        places = sorted({place for word in words for place in index.get(word, ())})
        similar = ((place, _similarity(words, held_words[place], weights)) for place in places)
        found += [
            Overlap(task, held_out[place], value) for place, value in similar if value >= threshold
        ]
    return found


def without_overlaps(train: Sequence[Task], held_out: Sequence[Task]) -> list[Task]:
    """The training tasks that are like no held-out one."""
    repeated = {pair.train.id for pair in overlaps(train, held_out)}
    return [task for task in train if task.id not in repeated]


def _words(task: Task) -> _Words:
    if task.scorer == "gameof24":
        return frozenset({("24 from " + " ".join(sorted(task.answers)), 1)})
    seen: Counter[str] = Counter()
    words = set()
    for word in re.findall(r"\w+", task.question.casefold()):
        seen[word] += 1
        words.add((word, seen[word]))
    return frozenset(words)


def _weights(texts: Sequence[_Words]) -> dict[tuple[str, int], float]:
    """Inverse document frequency."""
    counts = Counter(word for words in texts for word in words)
    return {word: math.log1p(len(texts) / count) for word, count in counts.items()}


def _index(
    texts: Sequence[_Words], weights: Mapping[tuple[str, int], float], threshold: float
) -> dict[tuple[str, int], list[int]]:
    """The texts by their rarest words: so many of each that a text without any of them cannot share
    `threshold` of its weight.
    """
    index = defaultdict(list)
    for place, words in enumerate(texts):
        spare = (1 - threshold) * sum(weights[word] for word in words)
        for word in sorted(words, key=lambda word: (-weights[word], word)):
            index[word].append(place)
            spare -= weights[word]
            if spare < 0:
                break
    return index


def _similarity(one: _Words, other: _Words, weights: Mapping[tuple[str, int], float]) -> float:
    shared, either = (sum(weights[word] for word in words) for words in (one & other, one | other))
    return shared / either


def main(argv: Sequence[str]) -> int:
    """0: no overlap, 1: some, 2: what was asked for cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m flowtrain.tasks.overlap",
        description="Training questions that nearly repeat a benchmark's.",
    )
    parser.add_argument(
        "--train",
        nargs="+",
        required=True,
        metavar="FILE",
        help="training questions, in any layout that tasks.path takes",
    )
    parser.add_argument(
        "--benchmarks", required=True, metavar="DIR", help="folder with files such as medqa.json"
    )
    parser.add_argument(
        "--preset",
        choices=["auto", *PRESETS],
        default="auto",
        help="whose columns the training files have",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=THRESHOLD,
        help=f"similarity that counts, above 0 and up to 1 (default: {THRESHOLD})",
    )
    options = parser.parse_args(argv)
    try:
        if not 0 < options.threshold <= 1:
            raise UserError(f"--threshold={options.threshold}: must be above 0 and at most 1")
        held_out = benchmark_tasks(options.benchmarks)
        found = [
            pair
            for path in options.train
            for pair in overlaps(load_tasks(path, options.preset), held_out, options.threshold)
        ]
    except UserError as error:
        print(f"flowtrain.tasks.overlap: {error}", file=sys.stderr)
        return 2
    for pair in found:
        print(
            f"{pair.similarity:.2f}  {pair.train.id}: {_line(pair.train)}\n      "
            f"{pair.held_out.id}: {_line(pair.held_out)}"
        )
    print(
        f"{len(found)} pairs at {options.threshold:g} or more, against {len(held_out)} benchmark "
        "questions"
    )
    return 1 if found else 0


def benchmark_tasks(folder: str | Path) -> list[Task]:
    """All tasks of the benchmarks in a folder; UserError when it has none."""
    names = available(folder)
    if not names:
        raise UserError(
            f"{folder}: holds no benchmark file, such as medqa.json or medqa/data/data.json"
        )
    return [task for name in names for task in load_benchmark(name, folder, whole=True)]


def _line(task: Task) -> str:
    text = " ".join(task.question.split())
    return text if len(text) <= 120 else f"{text[:58]} ... {text[-57:]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
