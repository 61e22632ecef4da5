"""Tool commands, `execution = tool.execute(query="...")`.

AgentFlow runs this line of Python; here it is data, parsed and never executed. Only what would run
is read: no command in a comment, a text, a branch, a loop or a function, and none whose arguments
are not known.
"""

from __future__ import annotations

import ast
import contextlib
import json
import keyword
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from flowtrain.agents.agentflow.replies import canonical, cut_end_of_turn
from flowtrain.records import ToolCall
from flowtrain.tools import ToolCard
from flowtrain.utils.text import encodable

NO_COMMAND = "No command was run."
_MAX_CHARS = 100_000
"""Characters of a reply that are searched."""
_MAX_JOINED = 10_000
"""Characters of a text that is put together."""
_NOT_PYTHON = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_TOOL_CALLS = re.compile(rf"^[ \t]*(?:{_TOOL_CALL.pattern}\s*)+\Z", re.DOTALL | re.MULTILINE)
_DENIED = re.compile(
    r"(?:\b(?:not|never|avoid|wrong|cannot)|n['\u2019]t)\b.*:[ \t]*\Z", re.IGNORECASE
)
_ESCAPED_NAME = re.compile(r"\w*(?:\\_\w*)+(?=\.execute\()")
_QUOTED = re.compile(
    r"(?P<call>(?:execution\s*=\s*)?\w+\.execute\(\s*(?:\w+\s*=\s*)?)(?P<mark>[\"'])(?P<text>.*)"
    r"(?P=mark)\s*,?\s*\)",
    re.DOTALL,
)
_EXPRESSION = re.compile(r"[\"']\s*[+%*,)\]}]|[+%*,(\[{=]\s*[\"']|[\"']\s*\.\s*\w+\(")
"""Quotes beside the signs of an expression: `"a" + b`, `"a", url="b"`."""


class Command(NamedTuple):
    """A command as it was written."""

    arguments: dict[str, object]
    num_commands: int
    """Commands in the piece of the reply."""
    rules: tuple[str, ...]
    """The rules that it took to read it; none for a literal command of `tool`."""


def write_command(arguments: Mapping[str, object]) -> str:
    """Write the command on one line; `read_command` reads the same arguments from it. Names that
    Python does not take stand in a dictionary, `**{"max-age": 3}`.
    """
    if not all(name.isidentifier() and not keyword.iskeyword(name) for name in arguments):
        return f"execution = tool.execute(**{dict(arguments)!r})"
    pairs = (
        f"{name}={json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)}"
        for name, value in arguments.items()
    )
    return f"execution = tool.execute({', '.join(pairs)})"


def command_of(call: ToolCall) -> str:
    """Return the command of a call as the memory shows it."""
    if (arguments := json_object(call.arguments)) is None:
        return NO_COMMAND
    return write_command(arguments) + (f"  # {call.note}" if call.note else "")


def read_command(reply: str, card: ToolCard) -> Command:
    """Read the first command for the tool in a model's reply.

    The search goes where AgentFlow's does, in this order: the field "command" of a JSON object, the
    code after the last "Generated Command:", code fences from the longest on; without a fence all
    that follows. Beyond AgentFlow's it takes calls over several lines, arguments by position, names
    that were set before, f-strings, sums of texts, quotes within quotes, the tool's own name for
    `tool`, and JSON: `{"name": ..., "arguments": ...}`, as in Qwen's <tool_call>, or the
    arguments alone. Raises ValueError where there is no command.
    """
    for piece in _pieces(cut_end_of_turn(reply[:_MAX_CHARS])):
        if isinstance(piece, list):
            commands = [call for value in piece if (call := _json_call(value, card)) is not None]
            rules: tuple[str, ...] = ("json",)
        else:
            commands, rules = _commands(piece, card)
        if commands:
            return Command(commands[0], len(commands), rules)
    raise ValueError("no tool command")


def fitted(arguments: Mapping[str, object], card: ToolCard) -> dict[str, object]:
    """Fit arguments to a tool that takes one: under another name, or as a list of that one text."""
    required = [parameter for parameter in card.parameters if parameter.is_required]
    (only, *extras) = required or card.parameters or (None,)
    if only is None or extras or len(arguments) != 1:
        return dict(arguments)
    ((name, value),) = arguments.items()
    if isinstance(value, list) and len(value) == 1 and only.kind is str:
        (value,) = value
    is_other = name != only.name and any(name == parameter.name for parameter in card.parameters)
    return dict(arguments) if is_other or type(value) is not only.kind else {only.name: value}


def _pieces(reply: str) -> Iterator[str | list[dict[str, Any]]]:
    """Yield the pieces of the reply that may be code or calls in JSON."""
    if (value := json_object(_unfenced(reply))) is not None:
        if isinstance(command := value.get("command"), str):
            yield _unfenced(command)
        yield [value]
        return
    if calls := _TOOL_CALLS.search(reply):
        yield [json_object(call) or {} for call in _TOOL_CALL.findall(calls[0])]
    _, label, tail = reply.rpartition("Generated Command:")
    fences = sorted(_fences(reply), key=len, reverse=True)
    for code in (*(_fences(tail)[:1] if label else ()), *fences):
        yield [value] if (value := json_object(code)) else code
    if "```" not in reply:
        yield tail.strip(" `\n")


def _is_denied(prefix: str) -> bool:
    """Return whether the line before a command says what not to run."""
    return bool(_DENIED.search(prefix.rstrip().rpartition("\n")[2]))


def _fences(text: str) -> list[str]:
    """Return the code between fences; an unclosed fence reaches to the end."""
    parts = text.split("```")
    return [
        re.sub(r"\A[ \t]*\w*[ \t]*\n", "", code)
        for prefix, code in zip(parts[::2], parts[1::2], strict=False)
        if not _is_denied(prefix)
    ]


def _unfenced(text: str) -> str:
    """Strip the fence from a text that is one fenced block; return other texts as they are."""
    stripped = text.strip()
    if stripped.startswith("```") and stripped.endswith("```") and len(stripped) > 6:
        return re.sub(r"\A\w*[ \t]*\n", "", stripped[3:-3])
    return stripped


def json_object(text: str) -> dict[str, Any] | None:
    """Read a JSON object that a model wrote; None where it is none."""
    try:
        value = json.loads(text, parse_constant=_no_number)
        # JSON can spell half a surrogate pair, which neither tokenizers nor wires take.
        value = json.loads(encodable(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _json_call(value: dict[str, Any], card: ToolCard) -> dict[str, object] | None:
    """Return the arguments of a call in JSON, or of an object that is the arguments."""
    if set(value) in ({"name", "arguments"}, {"name", "parameters"}):
        arguments = value.get("arguments", value.get("parameters"))
        arguments = json_object(arguments) if isinstance(arguments, str) else arguments
        is_own = isinstance(value["name"], str) and _is_named(card)(value["name"])
        return arguments if is_own and isinstance(arguments, dict) else None
    names = {parameter.name for parameter in card.parameters}
    required = {parameter.name for parameter in card.parameters if parameter.is_required}
    return value if value and required <= set(value) <= names else None


def _is_named(card: ToolCard) -> Callable[[str], bool]:
    """Return whether a name is one of the tool's, in any spelling."""
    names = {canonical(name) for name in ("tool", card.name, f"{card.name}_Tool", *card.aliases)}
    return lambda name: canonical(name) in names


def _commands(code: str, card: ToolCard) -> tuple[list[dict[str, object]], tuple[str, ...]]:
    """Return the arguments of every command that runs, and the rules that it took."""
    rules = []
    try:
        statements = _parse(code.strip())
    except _NOT_PYTHON:
        try:
            statements = _parse(_requoted(code.strip()))
        except _NOT_PYTHON:
            return [], ()
        rules.append("quotes")
    names, is_tool = tuple(parameter.name for parameter in card.parameters), _is_named(card)
    values: dict[str, object] = {}
    commands: list[dict[str, object]] = []
    bound: set[str] = set()  # names that the code has given to something else
    for statement in statements:
        match statement:
            case (
                ast.Assign(value=ast.Call(func=ast.Attribute(ast.Name(name), "execute")) as call)
                | ast.Expr(value=ast.Call(func=ast.Attribute(ast.Name(name), "execute")) as call)
            ) if is_tool(name) and name not in bound:
                try:
                    commands.append(_arguments(call, values, names))
                except _NOT_PYTHON:
                    continue
                is_exact = name == "tool" and not any(
                    isinstance(node, ast.BinOp | ast.JoinedStr) for node in ast.walk(statement)
                )
                rules += [] if is_exact or len(commands) > 1 else ["values"]
            case (
                ast.Raise()
                | ast.Assert()
                | ast.Return()
                | ast.Expr(ast.Call(ast.Name("exit" | "quit") | ast.Attribute(_, "exit")))
            ):
                break
            case _:
                bound |= {
                    name for name in _rebinds(statement) if not _makes_tool(statement, is_tool)
                }
                _remember(statement, values)
    return commands, tuple(rules)


def _parse(code: str) -> list[ast.stmt]:
    with warnings.catch_warnings():  # about escapes in the model's strings
        warnings.simplefilter("ignore")
        return ast.parse(code).body


def _rebinds(statement: ast.stmt) -> set[str]:
    """Return the names that a statement may give a new meaning."""
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return {node.id for node in names if not isinstance(node.ctx, ast.Load)}


def _makes_tool(statement: ast.stmt, is_tool: Callable[[str], bool]) -> bool:
    """Return whether a statement makes the tool: `tool = Wikipedia_Search_Tool()`."""
    match statement:
        case ast.Assign([ast.Name()], ast.Call(ast.Name(name), [], [])):
            return is_tool(name)
    return False


def _remember(statement: ast.stmt, values: dict[str, object]) -> None:
    """Keep what a statement sets to a known value; forget all else that it may change."""
    assignments: dict[str, object] = {}
    match statement:
        case ast.Assign([ast.Name(name)], value):
            with contextlib.suppress(*_NOT_PYTHON):
                assignments[name] = _value(value, values)
        case ast.Expr(ast.Call(ast.Name("exec" | "eval" | "setattr"))):
            values.clear()
        case ast.Expr():
            pass
        case _:
            values.clear()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not (
            isinstance(node.ctx, ast.Load) and isinstance(values.get(node.id), str | int | float)
        ):
            values.pop(node.id, None)
    values |= assignments


def _arguments(
    call: ast.Call, values: Mapping[str, object], names: tuple[str, ...]
) -> dict[str, object]:
    """Return the arguments by name; raises what `_value` does, and ValueError for one without."""
    if len(call.args) > len(names):
        raise ValueError("arguments without a name")
    arguments = {name: _value(value, values) for name, value in zip(names, call.args, strict=False)}
    for argument in call.keywords:
        value = _value(argument.value, values)
        if argument.arg in arguments:
            raise ValueError("an argument that is given twice")
        if argument.arg is not None:
            arguments[argument.arg] = value
        elif isinstance(value, dict) and all(isinstance(name, str) for name in value):
            arguments |= value
        else:
            raise ValueError("arguments without a name")
    return arguments


def _value(node: ast.expr, values: Mapping[str, object]) -> object:
    """Return the value of a literal, a known name, an f-string of such, or a sum of such texts;
    raises one of _NOT_PYTHON for any other.
    """
    match node:
        case ast.Name(name) if name in values:
            value = values[name]
        case ast.List(items):
            value = [_value(item, values) for item in items]
        case ast.JoinedStr(parts):
            value = "".join(str(_value(part, values)) for part in parts)
        case ast.FormattedValue(inner, -1, None):
            value = _value(inner, values)
        case ast.BinOp(left, ast.Add(), right):
            left_text, right_text = _value(left, values), _value(right, values)
            if not isinstance(left_text, str) or not isinstance(right_text, str):
                raise ValueError("no texts")
            value = left_text + right_text
        case _:
            value = ast.literal_eval(node)
    if isinstance(value, str):
        if len(value) > _MAX_JOINED and not isinstance(node, ast.Constant):
            raise ValueError("a text that is too long")
        # An escape can spell half a surrogate pair, which neither tokenizers nor wires take.
        return encodable(value)
    return value


def _requoted(code: str) -> str:
    r"""Write Python\_Coder without the backslash that Markdown wants, and the one text of a call as
    a proper literal, whatever quotes stand within it.
    """
    code = _ESCAPED_NAME.sub(lambda match: match[0].replace("\\", ""), code)
    match = _QUOTED.fullmatch(code)
    if match is None or _EXPRESSION.search(match["text"]):
        return code
    return f"{match['call']}{match['text']!r})"
