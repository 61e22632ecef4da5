"""The puzzles and the solver, against a brute force that shares no code with them."""

from __future__ import annotations

import random
import re
from fractions import Fraction
from itertools import combinations_with_replacement, permutations, product

import pytest

from flowtrain.rewards.gameof24 import gameof24, is_right
from flowtrain.tasks.gameof24 import gameof24_tasks, random_expression, solvable_puzzles, solve


def value_of(expression: str) -> Fraction:
    """Evaluate by Python itself, on fractions."""
    return eval(re.sub(r"\d+", r"Fraction(\g<0>)", expression), {"Fraction": Fraction})


def apply(sign: str, x: Fraction | None, y: Fraction | None) -> Fraction | None:
    if x is None or y is None or (sign == "/" and y == 0):
        return None
    return {"+": x + y, "-": x - y, "*": x * y}[sign] if sign != "/" else x / y


def brute_force(numbers: tuple[int, ...]) -> bool:
    """Every order, every sign, every one of the five ways to set parentheses."""
    for a, b, c, d in set(permutations(map(Fraction, numbers))):
        for p, q, r in product("+-*/", repeat=3):
            ab, bc, cd = apply(p, a, b), apply(q, b, c), apply(r, c, d)
            outcomes = (
                apply(r, apply(q, ab, c), d),
                apply(r, apply(p, a, bc), d),
                apply(q, ab, cd),
                apply(p, a, apply(r, bc, d)),
                apply(p, a, apply(q, b, cd)),
            )
            if 24 in outcomes:
                return True
    return False


@pytest.mark.parametrize("numbers", list(combinations_with_replacement(range(1, 6), 4)), ids=str)
def test_solver_agrees_with_brute_force(numbers: tuple[int, ...]) -> None:
    assert (solve(numbers) is not None) == brute_force(numbers)


def test_all_1362_puzzles_have_a_right_solution() -> None:
    puzzles = solvable_puzzles()
    assert len(set(puzzles)) == len(puzzles) == 1362 and list(puzzles) == sorted(puzzles)
    for puzzle in puzzles:
        expression = solve(puzzle)
        assert expression is not None and value_of(expression) == 24
        assert tuple(sorted(map(int, re.findall(r"\d+", expression)))) == puzzle
        assert is_right(expression, puzzle)


@pytest.mark.parametrize("numbers", [(1, 1, 1, 1), (1, 1, 1, 2), (13, 13, 13, 13), (7, 7, 7, 13)])
def test_unsolvable(numbers: tuple[int, ...]) -> None:
    assert solve(numbers) is None and numbers not in solvable_puzzles()


@pytest.mark.parametrize("numbers", [(3, 3, 8, 8), (1, 5, 5, 5), (8, 3, 8, 3), (1, 3, 4, 6)])
def test_solutions_through_fractions(numbers: tuple[int, ...]) -> None:
    expression = solve(numbers)
    assert expression is not None and value_of(expression) == 24


def test_tasks() -> None:
    tasks = gameof24_tasks("train", 0)[:40]
    assert len({task.question for task in tasks}) == len({task.id for task in tasks}) == 40
    for task in tasks:
        assert (task.kind, task.num_turns, task.scorer) == ("gameof24", 1, "gameof24")
        assert task.question.startswith(
            f"Using the numbers [{', '.join(task.answers)}], create an expression that equals 24. "
        )
        (step,) = task.plan
        assert step.tool_name == "Python_Coder" and gameof24(task, step.sub_goal) == 1.0
    assert tasks == gameof24_tasks("train", 0)[:40] != gameof24_tasks("train", 1)[:40]


def test_random_expression_uses_each_number_once() -> None:
    rng, num_right = random.Random(0), 0
    for _ in range(300):
        numbers = [str(rng.randint(1, 13)) for _ in range(4)]
        expression = random_expression(numbers, rng)
        assert sorted(re.findall(r"\d+", expression)) == sorted(numbers)
        num_right += is_right(expression, [int(number) for number in numbers])
    assert 0 < num_right < 15


def test_splits_are_disjoint_and_complete() -> None:
    train, texts = (
        {task.answers for task in gameof24_tasks(split, 0)} for split in ("train", "texts")
    )
    assert (len(train), len(texts)) == (1216, 146)
    assert not train & texts and len(train | texts) == 1362
