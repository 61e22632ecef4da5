"""Find training questions that nearly repeat a benchmark's.

The similarity of two questions is the weighted Jaccard index of their words, which rare words
dominate: case, punctuation and order do not count, a common template counts little, a name much.
Puzzles of the game of 24 are compared by their numbers.

(MinHash, as in datasketch, estimates the unweighted Jaccard index, by which any two questions of
one template are alike.)
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowtrain.records import Task, UserError
from flowtrain.tasks.benchmarks import available, load_benchmark
from flowtrain.utils.text import words

THRESHOLD = 0.6
"""Similarity that counts. The test finds 752 of 755 benchmark questions after a change of one word,
and flags eight of the 285,000 pairs of different questions, which differ in a word or two."""

_Words = frozenset[tuple[str, int]]
"""(word, its number among equal words), so that a repeated word counts twice."""


def overlaps(
    train: Sequence[Task], held_out: Sequence[Task], threshold: float = THRESHOLD
) -> list[tuple[Task, Task]]:
    """Return all pairs at least that similar, in the order of `train`.

    None is missed. A million short questions take a minute.
    """
    train_words = [_words(task) for task in train]
    held_words = [_words(task) for task in held_out]
    weights = _weights([*train_words, *held_words])
    index = _index(held_words, weights, threshold)
    pairs = []
    for task, task_words in zip(train, train_words, strict=True):
        for number in sorted({number for word in task_words for number in index.get(word, ())}):
            if _similarity(task_words, held_words[number], weights) >= threshold:
                pairs.append((task, held_out[number]))
    return pairs


def without_overlaps(train: Sequence[Task], held_out: Sequence[Task]) -> list[Task]:
    """Return the training tasks that are similar to no held-out task."""
    repeated = {task.id for task, _ in overlaps(train, held_out)}
    return [task for task in train if task.id not in repeated]


def _words(task: Task) -> _Words:
    if task.scorer == "gameof24":
        return frozenset({("24 from " + " ".join(sorted(task.answers)), 1)})
    counts: Counter[str] = Counter()
    numbered = set()
    for word in words(task.question):
        counts[word] += 1
        numbered.add((word, counts[word]))
    return frozenset(numbered)


def _weights(texts: Sequence[_Words]) -> dict[tuple[str, int], float]:
    """Return the inverse document frequency of each word."""
    counts = Counter(word for text_words in texts for word in text_words)
    return {word: math.log1p(len(texts) / count) for word, count in counts.items()}


def _index(
    texts: Sequence[_Words], weights: Mapping[tuple[str, int], float], threshold: float
) -> dict[tuple[str, int], list[int]]:
    """Index the texts by their rarest words.

    A text that has none of another's indexed words cannot reach the similarity `threshold`.
    """
    index = defaultdict(list)
    for number, text_words in enumerate(texts):
        spare = (1 - threshold) * sum(weights[word] for word in text_words)
        for word in sorted(text_words, key=lambda word: (-weights[word], word)):
            index[word].append(number)
            spare -= weights[word]
            if spare < 0:
                break
    return index


def _similarity(one: _Words, other: _Words, weights: Mapping[tuple[str, int], float]) -> float:
    shared, either = (sum(weights[word] for word in group) for group in (one & other, one | other))
    return shared / either


def benchmark_tasks(folder: str | Path) -> list[Task]:
    """Load all tasks of the benchmarks in a folder; raises UserError when it has none."""
    names = available(folder)
    if not names:
        raise UserError(
            f"{folder}: holds no benchmark file, such as medqa.json or medqa/data/data.json"
        )
    return [task for name in names for task in load_benchmark(name, folder)]
