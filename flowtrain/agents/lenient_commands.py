"""Read tool commands that are not literal, or no Python, where `find_command` finds none.

Nothing is run: f-strings, concatenations and arithmetic of literals are evaluated node by node,
within bounds on the size of every value.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flowtrain.agents.commands import NOT_PYTHON, arguments, candidates, literal, parse, tool_call
from flowtrain.agents.lenient import canonical, cut_end_of_turn
from flowtrain.tools import ToolCard
from flowtrain.utils.text import encodable

MAX_RUNS = 5
"""Values of a list that are given to a tool which takes one, each in a run of its own."""
_MAX_TEXT = 10_000
_MAX_NUMBER = 10**30
_MAX_EXPONENT = 100
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_QUOTED = re.compile(r"""\A(\s*(?:\w+\s*=\s*)?)(["'])(.*)\2(\s*,?\s*)\Z""", re.DOTALL)
_CALL = re.compile(r"\b([A-Za-z]\w*)\s*\.\s*execute\s*\(")


class Command(NamedTuple):
    """A command as it was meant."""

    runs: tuple[dict[str, object], ...]
    """The arguments of each run; several where a list was given to a tool that takes one value."""
    num_commands: int
    """Commands in the piece of code."""
    rules: tuple[str, ...]
    """The rules that it took to read it."""


def read_command(reply: str, card: ToolCard) -> Command:
    """Read the first command of a reply that the exact form does not hold.

    Raises ValueError when there is none.
    """
    for code in candidates(cut_end_of_turn(reply)):
        for rule, text in (("values", code), ("quotes", _with_quotes_mended(code))):
            found = _calls(text, card)
            if found:
                runs, renamed = fitted(found[0], card)
                rules = [rule, *(["arguments"] if renamed else [])]
                return Command(runs, len(found), tuple(rules))
    raise ValueError("no tool command")


def fitted(
    given: Mapping[str, object], card: ToolCard
) -> tuple[tuple[dict[str, object], ...], bool]:
    """Fit arguments to what the tool takes: another name for its one argument, a list of values
    for one. Return the arguments of each run, and whether they were changed.
    """
    required = [parameter for parameter in card.parameters if parameter.is_required]
    (only, *others) = required or card.parameters or (None,)
    if only is None or others or len(given) != 1:
        return (dict(given),), False
    ((name, value),) = given.items()
    values = value if isinstance(value, list) and only.kind is str else [value]
    fits = 0 < len(values) <= MAX_RUNS and all(type(each) is only.kind for each in values)
    known = {parameter.name for parameter in card.parameters}
    if not fits or (name in known and name != only.name):
        return (dict(given),), False
    runs = tuple({only.name: each} for each in values)
    return runs, runs != (dict(given),)


def _calls(code: str, card: ToolCard) -> list[dict[str, object]]:
    """Return the arguments of every command for the tool, by any of its names."""
    try:
        statements = parse(code)
    except NOT_PYTHON:
        return []
    names = tuple(parameter.name for parameter in card.parameters)
    spellings = {
        canonical(name) for name in ("tool", card.name, f"{card.name}_Tool", *card.aliases)
    }
    known: dict[str, object] = {}
    found = []
    for statement in statements:
        try:
            if (
                call := tool_call(statement, lambda name: canonical(name) in spellings)
            ) is not None:
                found.append(arguments(call, known, names, value_of))
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                known.pop(statement.targets[0].id, None)
                known[statement.targets[0].id] = value_of(statement.value, known)
        except (*NOT_PYTHON, ArithmeticError):
            continue
    return found


def value_of(node: ast.expr, known: Mapping[str, object]) -> object:
    """Evaluate an expression of literals and names of such; raises ValueError for any other."""
    match node:
        case ast.JoinedStr(values=parts):
            value: object = "".join(_formatted(part, known) for part in parts)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            value = _combined(type(op), value_of(left, known), value_of(right, known))
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            value = _combined(ast.Sub, 0, value_of(operand, known))
        case ast.List(elts=items):
            value = [value_of(item, known) for item in items]
        case _:
            value = literal(node, known)
    if isinstance(value, str):
        if len(value) > _MAX_TEXT:
            raise ValueError("a text that is too long")
        return encodable(value)
    return value


def _formatted(part: ast.expr, known: Mapping[str, object]) -> str:
    if isinstance(part, ast.FormattedValue):
        if part.format_spec is not None or part.conversion not in (-1, ord("s")):
            raise ValueError("a format")
        return str(value_of(part.value, known))
    return str(literal(part, known))


def _combined(op: type, left: object, right: object) -> object:
    if op is ast.Add and isinstance(left, str) and isinstance(right, str):
        return left + right
    if not _is_number(left) or not _is_number(right):
        raise ValueError("no numbers")
    assert isinstance(left, int | float) and isinstance(right, int | float)
    if op is ast.Pow and abs(right) > _MAX_EXPONENT:
        raise ValueError("a power that is too large")
    value = _ARITHMETIC[op](left, right)
    if not _is_number(value):
        raise ValueError("a number that is too large")
    return value


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= _MAX_NUMBER  # type: ignore[arg-type]


def _with_quotes_mended(code: str) -> str:
    """Write the one quoted argument of a call as a proper literal, whatever stands within it."""
    call = _CALL.search(code)
    if call is None:
        return code
    quoted = _QUOTED.match(code[call.end() : max(code.rfind(")"), 0)])
    if quoted is None:
        return code
    name, _, text, rest = quoted.groups()
    return f"{call[1]}.execute({name.strip()}{text!r}{rest.strip()})"
