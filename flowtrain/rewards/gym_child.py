"""Scores one answer by a checker of reasoning-gym; a text that `gym.py` runs in the sandbox.

Some checkers call `eval` or sympy's `parse_expr`, which is `eval` behind a thin disguise, on the
answer. The sandbox keeps that from the host, but not from the reward: an answer that ran as code
could print a reward of its own. So both read expressions alone here.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import reasoning_gym
import sympy

FUNCTIONS = """
sin cos tan sec csc cot asin acos atan asec acsc acot sinh cosh tanh sech csch coth asinh acosh
atanh sinc exp log ln sqrt cbrt root Abs abs sign floor ceiling factorial gamma erf erfc erfi
Ei li Si Ci pi oo Rational Integer Float Pow Add Mul re im conjugate
"""
"""The names of more than one letter that an expression may have."""
NUMBER = re.compile(r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?")
WORD = re.compile(r"[^\W\d]+")
EXPRESSION = re.compile(r"[\w\s+\-*/^().,]*")
ARITHMETIC = re.compile(r"[0-9a-fA-FxX\s+\-*/%&|^~<>()]*")


class Refused(ValueError):
    """A text that is no expression."""


def checked(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap sympy's `parse_expr`: it refuses what has strings, lists or unknown names."""

    def parse_checked(text: str, *arguments: Any, **options: Any) -> Any:
        words = WORD.findall(NUMBER.sub(" ", text))
        is_known = all(len(word) == 1 or word in FUNCTIONS.split() for word in words)
        if not is_known or not EXPRESSION.fullmatch(text):
            raise Refused("the text is no expression")
        return parse(text, *arguments, **options)

    return parse_checked


def evaluate(text: str, *scopes: Any) -> Any:
    """Stand in for `eval`: literals, and arithmetic of whole numbers, which has no names."""
    if ARITHMETIC.fullmatch(text) and not re.search(r"(?<![0-9a-fA-FxX])[a-fA-FxX]", text):
        return eval(text, {"__builtins__": {}}, {})
    return ast.literal_eval(text.strip())


def score(text: str, answer: str) -> str:
    """Return {"reward": float}, or {"error": str} for a checker that raises, as JSON.

    `text`: `Task.entry`.
    """
    task = ast.literal_eval(text)
    made = reasoning_gym.create_dataset(task["name"], **task["options"], seed=0, size=1)
    guard()
    try:
        reward = float(made.score_answer(answer, task["entry"]))
    # A checker may raise anything on a hostile answer.
    except Exception as error:  # noqa: BLE001
        return json.dumps({"error": type(error).__name__})
    return json.dumps({"reward": reward})


def guard() -> None:
    """Put the two stand-ins where checkers look for `eval` and `parse_expr`."""
    original = sympy.parse_expr
    stand_in = checked(original)
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym."):
            vars(module)["eval"] = evaluate
            if vars(module).get("parse_expr") is original:
                vars(module)["parse_expr"] = stand_in
    sympy.parse_expr = stand_in
