"""A tool that is a plain function of a user's file, `agent.tools = ["my_tool.py:convert"]`.

Its card comes from the signature and the docstring:

    def convert(length: float, unit: str = "km") -> str:
        '''Convert a length in miles to another unit.

        >>> convert(length=3.5, unit="m")

        Args:
            length: in miles.
            unit: m or km.
        '''
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flowtrain.tools.base import Parameter, Tool, ToolCard
from flowtrain.tools.blocking import BlockingPool
from flowtrain.types import ToolResult, UserError
from flowtrain.utils.errors import foreign

_KINDS = (str, int, float, bool)
_NUM_THREADS = 16
_ENTRY = re.compile(r"^\S.*(?:\n(?:[ \t].*)?)*", re.MULTILINE)
_ARGUMENT = re.compile(r"(\w+)(?: \([^)]*\))?: (.+)")


class FunctionTool(Tool):
    """A function as a tool. One that is no coroutine function has threads, so it may block."""

    def __init__(self, function: Callable[..., Any], origin: str) -> None:
        """Raises UserError, which begins with `origin`, where there can be no card of it."""
        self._card = card_of(function, origin)
        self._function = function
        self._pool = BlockingPool(_NUM_THREADS, self._card.name)

    @property
    def card(self) -> ToolCard:
        return self._card

    async def execute(self, /, **arguments: object) -> str | ToolResult:
        """Return what the function does; a value that is no text is written as one."""
        if inspect.iscoroutinefunction(self._function):
            result = await self._function(**arguments)
        else:
            result = await self._pool.run(lambda: self._function(**arguments))
        return result if isinstance(result, ToolResult) else str(result)

    def close(self) -> None:
        self._pool.close()


def card_of(function: Callable[..., Any], origin: str) -> ToolCard:
    """Make the card of a function."""
    name = function.__name__
    about = inspect.getdoc(function) or ""
    description = " ".join(about.split("\n\n")[0].split())
    if not description:
        raise UserError(f"{origin} has no docstring, whose first paragraph tells the model its use")
    with foreign(f"{origin} has a type that cannot be resolved"):
        types_of = typing.get_type_hints(function)
    meanings = dict(_meanings(about))
    signature = inspect.signature(function)
    if unknown := meanings.keys() - signature.parameters.keys():
        raise UserError(f"{origin} has no argument {min(unknown)!r}, which its docstring describes")
    parameters = tuple(
        _parameter(each, types_of.get(each.name), meanings, origin)
        for each in signature.parameters.values()
    )
    examples = tuple(_examples(about, name, signature, origin))
    card = ToolCard(name, description, parameters, examples=examples)
    if wrong := next(filter(None, map(card.check, examples)), ""):
        raise UserError(f"{origin}: its example does not fit: {wrong}")
    return card


def _parameter(
    given: inspect.Parameter, kind: Any, meanings: Mapping[str, str], origin: str
) -> Parameter:
    names = [each.__name__ for each in _KINDS]
    if given.kind not in (given.POSITIONAL_OR_KEYWORD, given.KEYWORD_ONLY):
        raise UserError(f"{origin} takes {given}; a model gives arguments by name alone")
    if kind is None:
        raise UserError(
            f"{origin}: its argument {given.name!r} has no type; give it one of {', '.join(names)}"
        )
    if given.default is None and typing.get_origin(kind) in (typing.Union, types.UnionType):
        rest = [each for each in typing.get_args(kind) if each is not types.NoneType]
        kind = rest[0] if len(rest) == 1 else kind
    if kind not in _KINDS:
        raise UserError(
            f"{origin}: its argument {given.name!r} is none of {', '.join(names)}; a class with "
            "ToolCard(schema=...) takes more (docs/tools.md)"
        )
    meaning = meanings.get(given.name, given.name)
    if given.default is given.empty:
        return Parameter(given.name, meaning, kind)
    if given.default is not None:
        meaning = f"{meaning.rstrip('.')}; else {given.default!r}"
    return Parameter(given.name, meaning, kind, is_required=False)


def _meanings(about: str) -> Iterator[tuple[str, str]]:
    """Read the arguments of a docstring, below "Args:"; lines that are indented further go on."""
    _, _, rest = about.partition("\nArgs:\n")
    section = itertools.takewhile(lambda line: line[:1] in ("", " "), rest.splitlines())
    for entry in _ENTRY.findall(textwrap.dedent("\n".join(section))):
        if found := _ARGUMENT.fullmatch(" ".join(entry.split())):
            yield found[1], found[2]


def _examples(
    about: str, name: str, signature: inspect.Signature, origin: str
) -> Iterator[dict[str, object]]:
    """Read the calls of a docstring, each after ">>> "."""
    for line in about.splitlines():
        code = line.strip().removeprefix(">>> ")
        if not line.strip().startswith(f">>> {name}("):
            continue
        try:
            call = ast.parse(code, mode="eval").body
            if not isinstance(call, ast.Call):
                raise ValueError("it computes something")
            values = [ast.literal_eval(each) for each in call.args]
            by_name: Any = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
            yield dict(signature.bind(*values, **by_name).arguments)
        except (SyntaxError, ValueError, TypeError) as error:
            raise UserError(f"{origin}: its example {code!r} is no call of it: {error}") from None
