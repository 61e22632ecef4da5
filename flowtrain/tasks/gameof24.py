"""The game of 24: every puzzle of four numbers from 1 to 13, and an exact solver."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations_with_replacement

from flowtrain.records import PlanStep, Task

TARGET = 24
_QUESTION = (
    "Using the numbers [{numbers}], create an expression that equals 24. You must use basic "
    "arithmetic operations (+, -, \u00d7, /) and "
    "parentheses. **Each number can only be used once.**  Example: for [1, 2, 3, 4], one solution "
    "is (1+2+3)\u00d74."
)
"""The words of AgentFlow's benchmark, so that a run on other puzzles can be evaluated on it."""

_Numbers = tuple[int, ...]


@cache
def solvable_puzzles() -> tuple[tuple[int, int, int, int], ...]:
    """Return the 1362 ascending quadruples of 1 to 13 that can make 24, in ascending order."""
    return tuple(
        (a, b, c, d)
        for a, b, c, d in combinations_with_replacement(range(1, 14), 4)
        if solve((a, b, c, d)) is not None
    )


def solve(numbers: Sequence[int]) -> str | None:
    """Return an expression of exactly 24 that uses each of two or more numbers once, or None."""
    expression = next(_solutions(tuple(sorted(numbers))), None)
    return None if expression is None else expression[1:-1]


def random_expression(numbers: Sequence[str], rng: random.Random) -> str:
    """Return an expression that uses each of two or more numbers once, and is 24 only by chance."""
    parts = list(numbers)
    while len(parts) > 1:
        left, right = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        parts.append(f"({left} {rng.choice('+-*/')} {right})")
    return parts[0][1:-1]


def gameof24_tasks(split: str, seed: int) -> list[Task]:
    """Return all puzzles of a split in an order set by the seed, with ids "gameof24-{split}-{i}".

    The split is "train", or the 10 % held out as "texts".
    """
    puzzles = [
        puzzle for puzzle in solvable_puzzles() if _is_text(_question(puzzle)) == (split == "texts")
    ]
    order = random.Random(f"gameof24/{split}/{seed}").sample(puzzles, len(puzzles))
    return [_task(f"gameof24-{split}-{index}", puzzle) for index, puzzle in enumerate(order)]


def _task(task_id: str, puzzle: _Numbers) -> Task:
    expression = solve(puzzle)
    assert expression is not None
    return Task(
        task_id,
        _question(puzzle),
        answers=tuple(map(str, puzzle)),
        kind="gameof24",
        num_turns=1,
        scorer="gameof24",
        rules="gameof24",
        plan=(PlanStep(expression, "Python_Coder"),),
    )


def _question(puzzle: _Numbers) -> str:
    return _QUESTION.format(numbers=", ".join(map(str, puzzle)))


def _is_text(question: str) -> bool:
    return int(hashlib.sha256(question.encode()).hexdigest(), 16) % 10 == 0


def _solutions(numbers: _Numbers) -> Iterator[str]:
    """Yield parenthesised expressions of 24: for a value of one part, look up the rest's value."""
    for left, right in _splits(numbers):
        right_values = _values(right)
        for x, x_text in _values(left).items():
            targets = [("+", TARGET - x), ("-", x - TARGET)]
            if x != 0:
                targets += [("*", TARGET / x), ("/", x / TARGET)]
            yield from (
                f"({x_text} {sign} {right_values[y]})" for sign, y in targets if y in right_values
            )


@cache
def _values(numbers: _Numbers) -> dict[Fraction, str]:
    """Return each value that uses all the numbers once, with one expression for it."""
    if len(numbers) == 1:
        return {Fraction(numbers[0]): str(numbers[0])}
    values: dict[Fraction, str] = {}
    for left, right in _splits(numbers):
        for x, x_text in _values(left).items():
            for y, y_text in _values(right).items():
                for sign, value in _results(x, y):
                    values.setdefault(value, f"({x_text} {sign} {y_text})")
    return values


def _results(x: Fraction, y: Fraction) -> list[tuple[str, Fraction]]:
    results = [("+", x + y), ("-", x - y), ("*", x * y)]
    return [*results, ("/", x / y)] if y != 0 else results


def _splits(numbers: _Numbers) -> list[tuple[_Numbers, _Numbers]]:
    """Return every way to split the numbers into two non-empty parts, each once."""
    parts = []
    for mask in range(1, 2 ** len(numbers) - 1):
        left = tuple(number for i, number in enumerate(numbers) if mask >> i & 1)
        right = tuple(number for i, number in enumerate(numbers) if not mask >> i & 1)
        parts.append((left, right))
    return list(dict.fromkeys(parts))
