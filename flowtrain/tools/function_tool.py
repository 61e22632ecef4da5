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
from collections.abc import Callable, Iterator
from typing import Any

from flowtrain.records import ToolResult, UserError
from flowtrain.tools.base import Tool, ToolCard
from flowtrain.tools.blocking import BlockingPool
from flowtrain.utils.errors import foreign

_NUM_THREADS = 16


class FunctionTool(Tool):
    """A function as a tool. A plain function runs in threads, so it may block."""

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
    from transformers.utils import get_json_schema  # which loads torch

    docstring = inspect.getdoc(function) or ""
    description = " ".join(docstring.split("\n\n")[0].split())
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"{origin} takes {parameter}; but models pass arguments by name only")
    with foreign(f"{origin} cannot be used as a tool"):
        schema = get_json_schema(function)["function"]["parameters"]
    examples = tuple(_examples(docstring, function.__name__, signature, origin))
    schema["additionalProperties"] = False
    card = ToolCard(function.__name__, description, schema, examples=examples)
    if problem := next(filter(None, map(card.check, examples)), ""):
        raise UserError(f"{origin}: its example is invalid: {problem}")
    return card


def _examples(
    docstring: str, name: str, signature: inspect.Signature, origin: str
) -> Iterator[dict[str, object]]:
    """Read the calls of a docstring, each after ">>> "."""
    for line in docstring.splitlines():
        code = line.strip().removeprefix(">>> ")
        if not line.strip().startswith(f">>> {name}("):
            continue
        try:
            call = ast.parse(code, mode="eval").body
            if not isinstance(call, ast.Call):
                raise ValueError("it computes something")
            values = [ast.literal_eval(node) for node in call.args]
            keywords: Any = {node.arg: ast.literal_eval(node.value) for node in call.keywords}
            yield dict(signature.bind(*values, **keywords).arguments)
        except (SyntaxError, ValueError, TypeError) as error:
            raise UserError(
                f"{origin}: its example {code!r} is not a call of this tool: {error}"
            ) from None
