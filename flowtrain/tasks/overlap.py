"""Find training questions that nearly repeat a benchmark's.

    python -m flowtrain.tasks.overlap --train nq.parquet math.parquet --benchmarks benchmarks/

prints the pairs and exits with 1 when there are some. The similarity of two questions is the
weighted Jaccard index of their words, which rare words dominate: case, punctuation and order do not
count, a common template counts little, a name much. Puzzles of the game of 24 are compared by their
numbers.

(MinHash, as in datasketch, estimates the unweighted Jaccard index, by which any two questions of
one template are alike.)
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
"""Similarity that counts. It finds 752 of 755 benchmark questions after one word was changed, and
eight of the 285,000 pairs of different ones, which differ in a word or two."""

_Words = frozenset[tuple[str, int]]
"""(word, its number among equal words), so that a repeated word counts twice."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """A training task and the benchmark task that it nearly repeats."""

    train: Task
    held_out: Task
    similarity: float
    """Weighted Jaccard index in (0, 1]."""


def overlaps(
    train: Sequence[Task], held_out: Sequence[Task], threshold: float = THRESHOLD
) -> list[Overlap]:
    """Return all pairs at least that similar, in the order of `train`.

    None is missed. A million short questions take a minute.
    """
    train_words = [_words(task) for task in train]
    held_words = [_words(task) for task in held_out]
    weights = _weights([*train_words, *held_words])
    index = _index(held_words, weights, threshold)
    found = []
    for task, words in zip(train, train_words, strict=True):
        for number in sorted({number for word in words for number in index.get(word, ())}):
            similarity = _similarity(words, held_words[number], weights)
            if similarity >= threshold:
                found.append(Overlap(task, held_out[number], similarity))
    return found


def without_overlaps(train: Sequence[Task], held_out: Sequence[Task]) -> list[Task]:
    """Return the training tasks that are similar to no held-out task."""
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
    """Return the inverse document frequency of each word."""
    counts = Counter(word for words in texts for word in words)
    return {word: math.log1p(len(texts) / count) for word, count in counts.items()}


def _index(
    texts: Sequence[_Words], weights: Mapping[tuple[str, int], float], threshold: float
) -> dict[tuple[str, int], list[int]]:
    """Index the texts by their rarest words.

    A text that has none of another's indexed words cannot reach the similarity `threshold`.
    """
    index = defaultdict(list)
    for number, words in enumerate(texts):
        spare = (1 - threshold) * sum(weights[word] for word in words)
        for word in sorted(words, key=lambda word: (-weights[word], word)):
            index[word].append(number)
            spare -= weights[word]
            if spare < 0:
                break
    return index


def _similarity(one: _Words, other: _Words, weights: Mapping[tuple[str, int], float]) -> float:
    shared, either = (sum(weights[word] for word in words) for words in (one & other, one | other))
    return shared / either


def main(argv: Sequence[str]) -> int:
    """Return 0 for no overlap, 1 for some, 2 when the input cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m flowtrain.tasks.overlap",
        description="Training questions that nearly repeat a benchmark's.",
    )
    add = parser.add_argument
    text = "training questions, in any layout that tasks.path takes"
    add("--train", nargs="+", required=True, metavar="FILE", help=text)
    add("--benchmarks", required=True, metavar="DIR", help="folder with files such as medqa.json")
    add("--preset", choices=["auto", *PRESETS], default="auto", help="layout of the training files")
    text = f"similarity that counts, above 0 and up to 1 (default: {THRESHOLD})"
    add("--threshold", type=float, default=THRESHOLD, help=text)
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
    """Load all tasks of the benchmarks in a folder; raises UserError when it has none."""
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
