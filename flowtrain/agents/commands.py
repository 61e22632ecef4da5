"""Tool commands, `execution = tool.execute(query="...")`.

AgentFlow runs this line of Python; here it is data, parsed and never executed.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from flowtrain.tools import ToolCard
from flowtrain.utils.text import encodable

_MAX_CHARS = 100_000
"""Characters of a reply that are searched."""
_MAX_BARE = 8
"""Commands outside of code fences that are tried, each on a line of its own."""
_BARE = re.compile(r"^[ \t>`]*((?:execution\s*=\s*)?tool\.execute\(.*)", re.MULTILINE)
NOT_PYTHON = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


def write_command(arguments: Mapping[str, object]) -> str:
    """Write the command on one line; `find_command` reads the same arguments from it. Names that
    Python does not take stand in a dictionary, `**{"max-age": 3}`.
    """
    if not all(name.isidentifier() and not keyword.iskeyword(name) for name in arguments):
        return f"execution = tool.execute(**{dict(arguments)!r})"
    pairs = (
        f"{name}={json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)}"
        for name, value in arguments.items()
    )
    return f"execution = tool.execute({', '.join(pairs)})"


def find_command(reply: str, card: ToolCard) -> tuple[dict[str, object], int]:
    """Return the arguments of the first readable command in a model's reply, and how many follow.

    The search goes where AgentFlow's does, in this order: the field "command" of a JSON object, the
    code after the last "Generated Command:", code fences from the longest on; then a command on a
    line of its own. It accepts more than AgentFlow: calls over several lines, arguments by
    position, and names that were set to a literal before the call, `q = "..."`. It accepts nothing
    that is not literal. The count includes the first and covers one piece of code. Raises
    ValueError when there is no command.
    """
    for code in candidates(reply[:_MAX_CHARS]):
        found = written_calls(code, card)
        if found:
            return found[0], len(found)
    raise ValueError("no tool command")


def written_calls(command: str, card: ToolCard) -> list[dict[str, object]]:
    """Return the arguments of all calls in a command that `write_command` wrote."""
    return _calls(command, tuple(parameter.name for parameter in card.parameters))


def candidates(reply: str) -> Iterator[str]:
    """Yield the pieces of the reply that may be code."""
    try:
        match json.loads(_unfenced(reply)):
            case {"command": str(command)}:
                yield _unfenced(command)
    except (ValueError, RecursionError):
        pass
    _, label, tail = reply.rpartition("Generated Command:")
    if label:
        yield from _fences(tail)[:1]
    yield from sorted(_fences(reply), key=len, reverse=True)
    for bare in islice(_BARE.finditer(reply), _MAX_BARE):
        yield bare[1].rstrip("`")


def _fences(text: str) -> list[str]:
    """Return the code between fences; an unclosed fence reaches to the end."""
    parts = text.split("```")[1::2]
    return [
        re.sub(r"\A[ \t]*(python|py)?[ \t]*\n", "", part, flags=re.IGNORECASE) for part in parts
    ]


def _unfenced(text: str) -> str:
    """Strip the fence from a text that is one fenced block; return other texts as they are."""
    stripped = text.strip()
    if stripped.startswith("```") and stripped.endswith("```") and len(stripped) > 6:
        return re.sub(r"\A\w*[ \t]*\n", "", stripped[3:-3])
    return stripped


def _calls(code: str, names: tuple[str, ...]) -> list[dict[str, object]]:
    """Return the arguments of every tool command in a piece of Python; `names` by position."""
    try:
        statements = parse(code)
    except NOT_PYTHON:
        return []
    found: list[dict[str, object]] = []
    known: dict[str, object] = {}
    for statement in statements:
        call = tool_call(statement)
        try:
            if call is not None:
                found.append(arguments(call, known, names))
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                known.pop(statement.targets[0].id, None)
                known[statement.targets[0].id] = literal(statement.value, known)
        except NOT_PYTHON:
            continue
    return found


def parse(code: str) -> list[ast.stmt]:
    with warnings.catch_warnings():  # about escapes in the model's strings
        warnings.simplefilter("ignore")
        return ast.parse(code.strip()).body


def tool_call(
    statement: ast.stmt, is_tool: Callable[[str], bool] = "tool".__eq__
) -> ast.Call | None:
    """Return the call of `execution = tool.execute(...)`, also without `execution =`."""
    if not isinstance(statement, ast.Assign | ast.Expr):
        return None
    match statement.value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="execute")) as call:
            return call if is_tool(name) else None
    return None


def literal(node: ast.expr, known: Mapping[str, object]) -> object:
    """Return the value of a literal, or of a name that was set to one; raises one of NOT_PYTHON."""
    if isinstance(node, ast.Name) and node.id in known:
        value = known[node.id]
    else:
        value = ast.literal_eval(node)
    # An escape can spell half a surrogate pair, which neither tokenizers nor wires take.
    return encodable(value) if isinstance(value, str) else value


def arguments(
    call: ast.Call,
    known: Mapping[str, object],
    names: tuple[str, ...],
    value_of: Callable[[ast.expr, Mapping[str, object]], object] = literal,
) -> dict[str, object]:
    """Return the arguments by name; raises what `value_of` does, and ValueError for one without."""
    if len(call.args) > len(names):
        raise ValueError("arguments without a name")
    found = {name: value_of(value, known) for name, value in zip(names, call.args, strict=False)}
    for given in call.keywords:
        value = value_of(given.value, known)
        if given.arg is not None:
            found[given.arg] = value
        elif isinstance(value, dict) and all(isinstance(name, str) for name in value):
            found |= value
        else:
            raise ValueError("arguments without a name")
    return found
