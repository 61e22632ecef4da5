"""The tools of the example programs: a search over facts, arithmetic, and a guess."""

from __future__ import annotations

import ast
import functools
import hashlib
import operator
from collections.abc import Callable

from flowtrain.tasks.corpus import load_corpus, passage_value, passages
from flowtrain.tools.retrieval.bm25 import Bm25

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_MAX_CHARS = 200


def search(query: str) -> str:
    """Looks a few words up in a collection of texts; returns the passage that fits best."""
    texts, index = _index()
    best = index.rank(query, 1)
    return texts[best[0]] if best else "Error: no passage matches"


def calculate(query: str) -> str:
    """Evaluates an expression; prints the result."""
    try:
        return str(_value(ast.parse(query[:_MAX_CHARS], mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, OverflowError) as error:
        return f"Error: {error}"


def guess(query: str) -> str:
    """Guesses a value without looking anything up; it is rarely right."""
    values = _guesses()
    digest = hashlib.sha256(query.encode("utf-8", "replace")).digest()
    return values[int.from_bytes(digest, "big") % len(values)]


TOOLS = {"Search": search, "Python_Coder": calculate, "Base_Generator": guess}
"""By the names that the policy of configs/tools.toml knows."""


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(int() | float() as value):
            return value
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
        case ast.BinOp(left, symbol, right) if type(symbol) in _OPERATORS:
            return _OPERATORS[type(symbol)](_value(left), _value(right))
    raise ValueError("only numbers, +, -, * and / are allowed")


@functools.cache
def _index() -> tuple[tuple[str, ...], Bm25]:
    texts = passages(load_corpus(""))
    return texts, Bm25.build(texts)


@functools.cache
def _guesses() -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, map(passage_value, _index()[0]))))
